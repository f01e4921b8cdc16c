"""The machine itself: versions, rates, the kernel of split weights, what a training step waits for, the link."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from gpu.records import Record, tell
from gpu.steps import MIB, on_gpu, settings_of, used_mib

from simpletuner.errors import SimpleTunerError

GIB = 2**30
PACKAGES = [
    "torch", "triton", "transformers", "accelerate", "diffusers", "huggingface_hub", "safetensors", "numpy",
    "tokenizers", "peft", "typer", "rich", "pydantic", "pillow", "pyarrow", "platformdirs", "psutil",
    "imagesize", "xxhash", "filelock", "protobuf", "sentencepiece", "matplotlib", "jinja2", "markupsafe",
    "pyyaml", "deepspeed", "torchao", "tensorboard", "av", "obstore",
]  # fmt: skip
TINY_STEP = {"model_flavour": "tiny", "resolution": 64, "resolution_type": "pixel", "tokenizer_max_length": 16}


def environment(tiny: bool) -> None:
    """Tell what is there: all that would end the other parts is found here at once."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = {name: shutil.disk_usage(name).free / GIB for name in ("/tmp", "/dev/shm") if Path(name).exists()}
    found: Record = {"what": "environment", "python": sys.version.split()[0], "versions": versions, "free GiB": free}
    found["missing"] = [name for name in PACKAGES if name not in versions]
    found["tools"] = [tool for tool in ("nvcc", "gcc", "g++", "ninja", "nvidia-smi") if shutil.which(tool)]
    found["host GiB"] = {name: int(memory[name].split()[0]) / MIB for name in ("MemTotal", "MemAvailable")}
    found |= {"cores": os.cpu_count(), "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)}
    if on_gpu(tiny):
        from simpletuner.commands.plan import device_of_this_machine
        from simpletuner.parallel.gpu import describe_device
        from simpletuner.settings import load

        began = time.monotonic()
        torch.zeros(1, device="cuda")
        found |= {"first kernel, s": time.monotonic() - began, "device": describe_device(torch.device("cuda", 0))}
        found["as plan knows it"] = repr(device_of_this_machine(load({}, complete=False, environment={})))
    tell(**found)


def seconds_of(call: Callable[[], object], at_least: float = 0.5) -> float:
    """Return the median time of a call, which is made for so many seconds."""
    taken: list[float] = []
    call()
    end = time.perf_counter() + at_least
    while len(taken) < 3 or time.perf_counter() < end:
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rates(tiny: bool) -> None:
    """Tell the rates that `plan` assumes: products, copies, page-locked copies, attention; and the CUDA context."""
    tell(what="rates", **measure_rates(128, MIB, 0.1) if tiny else measure_rates(8192, 2**31, 3.0))
    for backend in ("auto", "cudnn", "flash", "flash3", "efficient"):
        try:
            found = measure_attention(backend, (1, 2, 64, 32) if tiny else (4, 24, 4608, 128), tiny)
        except (SimpleTunerError, RuntimeError) as error:  # a kernel that is not there costs no other
            found = {"error": str(error).strip().splitlines()[0][:200]}
        tell(what=f"attention {backend}", **found)
    if on_gpu(tiny):
        measure_host_buffer()
        exhaust_memory()


def measure_rates(edge: int, size: int, seconds: float) -> Record:
    gpu = torch.cuda.is_available()
    device, before = "cuda" if gpu else "cpu", used_mib()
    torch.zeros(1, device=device)
    found: Record = {"context, MiB": used_mib() - before}
    left, right = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * edge**3 / 1e12
    found["bf16 product, TFLOP/s"] = flops / seconds_of(lambda: left @ right, min(1, seconds))
    found["for longer, TFLOP/s"] = flops / seconds_of(lambda: left @ right, seconds)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy, TB/s"] = 2 * size / seconds_of(lambda: target.copy_(source)) / 1e12
    for name, pinned in (("pinned", gpu), ("pageable", False)):
        host = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=pinned)
        there, part = host.numel() / 1e9, source[: host.numel()]
        found[f"{name} to device, GB/s"] = there / seconds_of(lambda: part.copy_(host, non_blocking=True))  # noqa: B023
        found[f"device to {name}, GB/s"] = there / seconds_of(lambda: host.copy_(part, non_blocking=True))  # noqa: B023
    return found


def measure_attention(backend: str, shape: tuple[int, int, int, int], tiny: bool) -> Record:
    """Return TFLOP/s of attention over (samples, heads, tokens, width)."""
    from simpletuner.parallel.model.attention_backend import attention_by

    samples, heads, tokens, width = shape
    device = torch.device("cuda" if on_gpu(tiny) else "cpu")
    # As diffusers' processors give them: transposed views of (samples, tokens, heads, width).
    leaves = [
        torch.randn(samples, tokens, heads, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
    flops = 4 * samples * heads * tokens**2 * width / 1e12
    with attention_by(backend, device, torch.bfloat16):
        forward = seconds_of(lambda: F.scaled_dot_product_attention(query, key, value))
        output = F.scaled_dot_product_attention(query, key, value)
        gradient = torch.randn_like(output)
        backward = seconds_of(lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True))
    return {"forward, TFLOP/s": flops / forward, "backward, TFLOP/s": 2.5 * flops / backward}


def layouts(tiny: bool) -> None:
    """Tell how far gradients of attention are from float32's where the output's gradient is dense and then a slice, by
    torch alone and within a run. The other order is an illegal memory access by torch alone."""
    from simpletuner.parallel.model.attention_backend import attention_by

    device = torch.device("cuda" if on_gpu(tiny) else "cpu")
    for name, tokens in (("torch alone", 256), ("within a run", 320)):  # torch keeps what it has compiled by shapes
        with attention_by("auto", device, torch.bfloat16) if name != "torch alone" else nullcontext():
            tell(what=f"attention of slices, {name}, off", **dict(measure_layouts(tokens, device)))


def measure_layouts(tokens: int, device: torch.device) -> Iterator[tuple[str, float]]:
    leaves = [torch.randn(1, tokens, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    wide = torch.randn(1, tokens, 1024, device=device, dtype=torch.bfloat16)
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    for layout, gradient in (("dense", wide[..., :256].contiguous()), ("slice", wide[..., 256:512])):
        found, expected = (
            torch.autograd.grad(attended(each), each, gradient.to(each[0].dtype)) for each in (leaves, exact)
        )
        yield layout, max(((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True))


def attended(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return attention as diffusers' processors compute it, (samples, tokens, heads x width)."""
    query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def measure_host_buffer() -> None:
    """Tell what page-locking 2 GiB takes, and whether copies into it go on beside the host."""
    from simpletuner.parallel.host_buffer import HostBuffer

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    began = time.perf_counter()
    buffer = HostBuffer({"all": source}, page_locked=True)
    locked = time.perf_counter() - began
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    buffer.views["all"].copy_(source, non_blocking=True)
    ended.record()
    queued = time.perf_counter()
    ended.synchronize()
    waited, rate = time.perf_counter() - queued, 2**31 / started.elapsed_time(ended) / 1e6
    is_pinned = buffer.block.is_pinned()
    tell(what="HostBuffer of 2 GiB", locking=locked, is_pinned=is_pinned, GB_per_s=rate, asynchronous=waited > 0.01)
    buffer.release()


def exhaust_memory() -> None:
    """Tell what a run would say whose memory is used up."""
    from simpletuner.errors import TrainingError
    from simpletuner.parallel.gpu import explain_out_of_memory

    device = torch.device("cuda", 0)
    try:
        with explain_out_of_memory(settings_of(TINY_STEP), device):
            torch.empty(2 * torch.cuda.mem_get_info(device)[1], dtype=torch.uint8, device=device)
    except TrainingError as error:
        tell(what="out of memory", said=f"{error.message}; {error.hint}")


def waits(tiny: bool) -> None:
    """Count the waits for the device in two steps of the training loop, by line of code.

    One of each step is known: the logger reads the numbers of the step before.
    """
    for family in ("flux", "sdxl"):
        places = find_waits(TINY_STEP | {"model_family": family, "use_cpu": tiny})
        tell(what=f"waits in two steps, tiny {family}", places=dict(places))


def find_waits(flags: dict[str, Any]) -> Counter[str]:
    from simpletuner.counting.step_memory import Workload
    from simpletuner.data.prefetch import Batch, StepBatch
    from simpletuner.data.sampler.batch_sampler import SamplerState
    from simpletuner.parallel.mesh import Mesh
    from simpletuner.report import Report
    from simpletuner.settings.values.shape import SampleShape, Shape
    from simpletuner.system.processes.signals import StopRequest
    from simpletuner.tools.plan.estimate import opened_family
    from simpletuner.tools.plan.measure import random_engine, random_inputs
    from simpletuner.training.checkpointer import Checkpointer
    from simpletuner.training.metrics.speed import Durations
    from simpletuner.training.optimizers import LearningRate, Schedule
    from simpletuner.training.step_logger import StepLogger, StopVote
    from simpletuner.training.trainer import Trainer

    settings, shape = settings_of(flags), SampleShape(Shape(1, flags["resolution"], flags["resolution"]))
    with opened_family(settings, Report(quiet=True)) as family, random_engine(settings, family) as (engine, world):
        gpu, stop = world.device.type == "cuda", StopRequest()
        vote = StopVote(stop)
        inputs = random_inputs(settings, Workload(family, shape), torch.device("cpu"))
        latents = inputs.pop("latents")
        samples = len(latents)
        micro_batch = Batch(latents, torch.randn_like(latents), torch.full((samples,), 0.5), inputs, ("",) * samples)
        data = StepBatch([micro_batch.pinned() if gpu else micro_batch], SamplerState(0, 0, samples, {}))
        trainer = Trainer(
            engine=engine, family=family, objective=family.objective(), batches=iter(()), ema=None, evaluations=(),
            learning_rate=LearningRate(Schedule(100), settings.optimizer), checkpointer=cast(Checkpointer, None),
            logger=StepLogger(Mesh(world), vote, None, None, samples), stop_vote=vote, device=world.device,
            activity=world.activity, stop=stop, report=Report(quiet=True), step=0, max_steps=100, checkpoint_every=100,
            max_grad_norm=1.0, dtype=torch.bfloat16, dropout_seed=0, profiler=None, durations=Durations(),
            answer_request=lambda step, advance: None,
        )  # fmt: skip
        for number in (1, 2):
            trainer.logger.log(number, trainer.train_step(data), data, 0.0)
        with waits_recorded(gpu) as places:
            for number in (3, 4):
                trainer.logger.log(number, trainer.train_step(data), data, 0.0)
    return places


@contextmanager
def waits_recorded(gpu: bool) -> Iterator[Counter[str]]:
    places: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            own = [each for each in traceback.extract_stack() if "simpletuner" in Path(each.filename).parts]
            places[f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line}" if own else "elsewhere"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if gpu:
            torch.cuda.set_sync_debug_mode("warn")
        yield places
        if gpu:
            torch.cuda.set_sync_debug_mode("default")


FACTORS = [0.1, 0.999, 0.001, 0.001, 1e-8, 0.9999, 1e-4]
"""Of an update of AdamW, as `update_on_gpu` takes them."""
KERNEL_BYTES = 14
"""Bytes that the kernel reads and writes for each value."""


def kernel(tiny: bool) -> None:
    """Hold the Triton kernel of SplitAdamW against torch's operators on the CPU, and time it."""
    from simpletuner.parallel.precision.split_adamw import (
        QuantizedMoment,
        Update,
        columns,
        numbers,
        update_in_chunks,
        update_on_gpu,
    )

    if not on_gpu(tiny):
        tell(what="split kernel", error="needs a GPU")
        return

    def update_on(device: str, count: int, seed: int) -> Update:
        torch.manual_seed(seed)
        low = torch.randint(-32768, 32767, (count,), dtype=torch.int16)
        bits, gradient = torch.randn(count).mul_(0.02).bfloat16().view(torch.int16), torch.randn(count).bfloat16()
        mean, square = (QuantizedMoment.zeros(count, signed, torch.device(device)) for signed in (True, False))
        return Update(bits.to(device), low.to(device), gradient.to(device), mean, square, seed, FACTORS)

    def launch(updates: list[Update]) -> float:
        began = time.perf_counter()
        update_on_gpu(*columns(updates), scale, *numbers(updates))
        return time.perf_counter() - began

    scale = torch.ones((), device="cuda")
    ours, theirs = (
        [update_on(device, count, seed) for seed, count in enumerate((128 * 1024 + 77, 64, 3))]
        for device in ("cuda", "cpu")
    )
    compiling = launch(ours)
    for each in theirs:
        update_in_chunks(each, torch.ones(()))
    parts = {
        "weights": lambda each: each.weight,
        "low bits": lambda each: each.remainder,
        "means": lambda each: each.mean.codes,
        "squares": lambda each: each.square.codes,
    }
    joined = {name: [torch.cat([*map(part, each)]).cpu() for each in (ours, theirs)] for name, part in parts.items()}
    same = {name: (one == other).float().mean().item() for name, (one, other) in joined.items()}
    tell(what="split kernel, share equal to the CPU's", compiling=compiling, **same)
    low_rank()
    many = ours * 500
    tell(
        what="split kernel, launch of 1,500 weights on the host, us", here=median(launch(many) for _ in range(20)) * 1e6
    )
    large = [update_on("cuda", 2**28, 7)]
    seconds = seconds_of(lambda: launch(large))
    tell(what="split kernel, 2^28 values", seconds=seconds, TB_per_s=KERNEL_BYTES * 2**28 / seconds / 1e12)


def low_rank() -> None:
    """Tell how far the GPU's best pair of matrices is from the CPU's: `lora extract` and `lora resize` seek one."""
    from simpletuner.tools.lora.low_rank import Wanted, best_pair

    torch.manual_seed(3)
    matrix = torch.randn(512, 64) @ torch.randn(64, 384) + 0.01 * torch.randn(512, 384)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    expected = (left[:, :16] * values[:16]) @ right[:16]
    down, up = best_pair(matrix, Wanted(16, None))
    tell(what="pair of rank 16, off", here=((up @ down - expected).norm() / expected.norm()).item())


def link(tiny: bool) -> None:
    """Tell the rate of NCCL between the GPUs of the machine; two gloo ranks stand for them without one."""
    count = 2 if tiny else torch.cuda.device_count()
    if count < 2:
        tell(what="link", error="one GPU")
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [*torchrun, str(Path(__file__).with_name("link.py")), str(MIB if tiny else GIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tell(what=f"link of {count} ranks, GB/s", **json.loads(done.stdout.splitlines()[-1]))
