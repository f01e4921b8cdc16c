"""The GPU of each rank: which one it takes, its model, precision and memory limit.

Slurm, wrappers and containers show a task one GPU, some, or all of its machine, under numbers that begin at 0
in each. So numbers decide nothing: ranks tell one another the UUIDs of what they see.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda.nccl import version as nccl_version

from simpletuner.errors import EnvironmentNotReady, TrainingError
from simpletuner.parallel.model.attention_backend import attention_kernel
from simpletuner.settings.declared.sections import Settings
from simpletuner.system.numbers import count_noun

GIB = 2**30
# For an answer of nvidia-smi, which takes 2 s where persistence mode is off.
SECONDS = 20.0


def describe_device(device: torch.device) -> str:
    """Return the GPU, its driver's and torch's CUDA, and the attention kernel that torch chooses there."""
    if device.type != "cuda":
        name = device.type + " (no GPU found)" * (not torch.cuda.is_available())
        return f"{name}, {count_noun(torch.get_num_threads(), 'thread')}, attention: {attention_kernel(device)}"
    gpu = torch.cuda.get_device_properties(device)
    cudnn, nccl = torch.backends.cudnn.version(), ".".join(map(str, nccl_version()))
    return (
        f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, driver {driver_version()}, CUDA {torch.version.cuda}, "
        f"cuDNN {cudnn}, NCCL {nccl}, attention: {attention_kernel(device)}"
    )


def driver_version() -> str:
    """Return the version of the NVIDIA driver; `unknown` where the system does not say."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
        return next((word for word in words if word[:1].isdigit()), "unknown")
    except OSError:
        return "unknown"


def power_limit_watts(device: torch.device) -> float:
    """Power limit of a GPU, on which its board's mean power is held; 0 where the driver does not say."""
    try:
        return float(ask_driver(device, "--query-gpu=power.limit"))
    except ValueError:  # [N/A]
        return 0.0


def ask_driver(device: torch.device, query: str) -> str:
    """Return nvidia-smi's facts about a GPU, as CSV without units; empty without an answer."""
    if device.type != "cuda":
        return ""
    name, form = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", "--format=csv,noheader,nounits"
    command = ["nvidia-smi", name, query, form]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def slowed_by(device: torch.device, own_pid: int) -> list[str]:
    """Return what the driver says against a GPU's speed: a low clock, and other processes on it."""
    found = []
    match ask_driver(device, "--query-gpu=clocks.sm,clocks.max.sm,temperature.gpu").split(", "):
        case [clock, most, degrees] if clock.isdigit() and most.isdigit() and int(clock) < 0.8 * int(most):
            found.append(f"the GPU's clock is {clock} of {most} MHz, at {degrees} degrees")
    pids = ask_driver(device, "--query-compute-apps=pid").split()
    others = [pid for pid in pids if pid != str(own_pid)]
    # In a container the driver may name processes by the numbers of its host.
    if others and str(own_pid) in pids:
        found.append(f"processes {', '.join(others)} use the same GPU")
    return found


def set_float32_precision(allow_tf32: bool) -> None:
    """Compute float32 products and convolutions on GPUs in float32, or in TF32 (10 bits of mantissa).

    torch's own defaults are one for convolutions and the other for products.
    """
    # The older switches, which set the newer `fp32_precision`, too. With that alone torch raises wherever an
    # older one is read, as inductor does for every product that max-autotune tunes.
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32


def return_memory(device: torch.device) -> None:
    """Free torch's cached blocks: NCCL, cuDNN and other processes cannot use them."""
    if device.type == "cuda":
        # First: tensors in reference cycles are still in use for the allocator.
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def explain_out_of_memory(settings: Settings, device: torch.device) -> Iterator[None]:
    """Raise TrainingError for used-up GPU memory, with used and free bytes and what to try."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        wanted = str(error).partition("GPU ")[0].strip().partition("\n")[0].rstrip(".")
        raise TrainingError(f"{wanted}{memory_used(device)}", next_to_try(settings)) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if memory ran out.

    Only torch's allocator has a class for it: the CUDA runtime (page-locked memory, contexts), cuBLAS, cuDNN
    and NCCL do not.
    """
    said = str(error)
    is_cuda = any(word in said for word in ("CUDA", "CUBLAS", "CUDNN", "NCCL"))
    exhausted = any(word in said for word in ("out of memory", "ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or (is_cuda and exhausted)


def memory_used(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
    peak, own = torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.memory_reserved(device) / GIB
    return f": {free:.1f} of {total:.1f} GiB are free, this process holds {own:.1f}, and at its peak used {peak:.1f}"


def next_to_try(settings: Settings) -> str:
    """Return the change that costs least among those that are left."""
    training, parallel = settings.training, settings.parallel
    is_sharded = parallel.fsdp_enable or parallel.zero_stage is not None
    if budget := training.activation_memory_budget:
        return f"set activation_memory_budget={budget / 2:.2g}: more is recomputed, and less kept"
    if not training.gradient_checkpointing:
        return "set gradient_checkpointing: a third more time, a tenth of the activations"
    if training.train_batch_size > 1:
        return (
            f"set train_batch_size={training.train_batch_size // 2} and "
            f"gradient_accumulation_steps={training.gradient_accumulation_steps * 2}, which trains the same"
        )
    if settings.ema.use_ema and settings.ema.ema_device == "accelerator":
        return "set ema_device=cpu"
    if settings.launch.num_processes > 1 and not is_sharded:
        return "set fsdp_enable, which shards weights, gradients and optimizer state over the ranks"
    if settings.model.model_type == "full" and not is_sharded:
        return (
            "set fsdp_enable with fsdp_offload_params, which keep weights and optimizer state in the machine's memory, "
            "use several GPUs with fsdp_enable, or model_type=lora"
        )
    if not training.offload_activations:
        return "set offload_activations: what blocks are given is kept in the machine's memory"
    return "use more GPUs, a lower resolution, or zero_stage=3 with offload_optimizer=cpu and offload_param=cpu"


DEVICES = Path("/dev")
OWN_CARD = (
    "start as many ranks on a machine as it has GPUs (num_processes), or let each task see one of its own: "
    "`srun --gpus-per-task=1`, or CUDA_VISIBLE_DEVICES=$SLURM_LOCALID in a wrapper"
)
MIG = "; CUDA shows one MIG slice to a process, so that several ranks need several GPUs without MIG"


@dataclass(frozen=True)
class View:
    """The GPUs that a rank sees; `cards` are UUIDs in CUDA's order, none for a rank on the CPU."""

    host: str
    local_rank: int
    visible: str
    """CUDA_VISIBLE_DEVICES."""
    cards: tuple[str, ...]


def view_of_rank(local_rank: int, use_cpu: bool = False, devices: Path = DEVICES) -> View:
    """Host and visible GPUs of this rank. Raises EnvironmentNotReady for an unusable GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    cards: list[str] = []
    if not use_cpu and torch.cuda.is_available():
        # Properties, unlike set_device, take no memory of a GPU that another rank will use.
        cards = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    elif not use_cpu and visible not in ("", "-1"):  # both are ways to hide all GPUs
        check_no_gpu_is_lost(devices)
    return View(socket.gethostname(), local_rank, visible, tuple(cards))


def check_no_gpu_is_lost(devices: Path) -> None:
    """Raise EnvironmentNotReady for a GPU that torch cannot use: the CPU would train for days."""
    # Not nvidia0 alone: a container that is given the fourth GPU has nvidia3.
    for device_file in sorted(devices.glob("nvidia[0-9]*"))[:1]:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise EnvironmentNotReady(
            f"this machine has a GPU ({device_file}), but torch {torch.__version__}, which {build}, cannot use it",
            "`nvidia-smi` shows whether the driver works and which CUDA it supports; --use_cpu trains on the CPU",
        )


def agree_on_devices(store: dist.Store, rank: int, size: int, view: View) -> torch.device:
    """Return this rank's device. Collective; raises EnvironmentNotReady on all ranks where one has no GPU of
    its own.

    Rank 0 decides: a thousand ranks that read each other's views are a million requests.
    """
    store.set(f"cards/{rank}", json.dumps(asdict(view)))
    if rank == 0:
        views = [json.loads(text) for text in store.multi_get([f"cards/{number}" for number in range(size)])]
        answer = decide([View(**each | {"cards": tuple(each["cards"])}) for each in views])
        store.set("cards/decided", json.dumps(answer))
    answer = json.loads(store.get("cards/decided"))
    if "error" in answer:
        raise EnvironmentNotReady(answer["error"], answer["hint"])
    return torch.device("cuda", int(answer["indices"][rank])) if view.cards else torch.device("cpu")


def decide(views: Sequence[View]) -> dict[str, object]:
    """Return the index of each rank's card among those that it sees, or an error, as JSON."""
    try:
        return {"indices": assign_cards(views)}
    except EnvironmentNotReady as error:
        return {"error": error.message, "hint": error.hint}


def assign_cards(views: Sequence[View]) -> list[int]:
    """Assign each rank a card of its own: by local rank if ranks see the same list, else its first.

    Raises EnvironmentNotReady, which names both ranks and the card, where that cannot be.
    """
    check_all_see_some(views)
    alike, lists = Counter(view.cards for view in views), defaultdict[str, set[tuple[str, ...]]](set)
    for view in views:
        for card in view.cards:
            lists[card].add(view.cards)
    users: dict[str, int] = {}
    indices = [0] * len(views)
    # Those with the least choice first.
    for rank in sorted(range(len(views)), key=lambda number: (len(views[number].cards), number)):
        view = views[rank]
        is_one_list = alike[view.cards] > 1 or len(views) == 1
        is_one_list = is_one_list and all(lists[card] == {view.cards} for card in view.cards)
        first = view.local_rank if is_one_list and view.local_rank < len(view.cards) else 0
        order = [*range(first, len(view.cards)), *range(first)]
        index = next((number for number in order if view.cards[number] not in users), None)
        if index is None and view.cards:
            raise shared_card(views, rank, users[view.cards[0]])
        if index is not None:
            users[view.cards[index]], indices[rank] = rank, index
    return indices


def check_all_see_some(views: Sequence[View]) -> None:
    """Raise EnvironmentNotReady where some ranks have a GPU and others have none."""
    some = next((rank for rank, view in enumerate(views) if view.cards), None)
    none = next((rank for rank, view in enumerate(views) if not view.cards), None)
    if some is not None and none is not None:
        raise EnvironmentNotReady(
            f"rank {none} on {views[none].host} sees no GPU (CUDA_VISIBLE_DEVICES = {views[none].visible}), "
            f"and rank {some} on {views[some].host} sees {len(views[some].cards)}",
            "give each rank a GPU; `nvidia-smi` shows what a task sees; --use_cpu trains on the CPU",
        )


def shared_card(views: Sequence[View], rank: int, other: int) -> EnvironmentNotReady:
    view = views[rank]
    names = ", ".join(f"GPU-{card}" for card in view.cards)
    return EnvironmentNotReady(
        f"rank {rank} has no GPU of its own on {view.host}: it sees {len(view.cards)} ({names}), "
        f"the first of which is that of rank {other}",
        OWN_CARD + (MIG if "MIG" in view.visible else ""),
    )
