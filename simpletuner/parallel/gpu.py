"""GPU of a run: its model, precision and memory limit."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.cuda.nccl import version as nccl_version

from simpletuner.errors import TrainingError
from simpletuner.parallel.model.activations import memory_budget
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
    """Return the power limit of a GPU, on which its board's mean power is held; 0 where the driver does not say."""
    if device.type != "cuda":
        return 0.0
    query = ("--query-gpu=power.limit", "--format=csv,noheader,nounits")
    name = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        said = subprocess.run(
            ["nvidia-smi", name, *query], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )
        return float(said.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # not there, or it says [N/A]
        return 0.0


def set_float32_precision(allow_tf32: bool) -> None:
    """Compute float32 products and convolutions on GPUs in float32, or in TF32 (10 bits of mantissa).

    torch's own defaults are one for convolutions and the other for products.
    """
    # The older switches, which set the newer `fp32_precision`, too. With that alone torch raises wherever an older one
    # is read, as inductor does for every product that max-autotune tunes.
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32


def return_memory(device: torch.device) -> None:
    """Return what is no longer used to the driver: NCCL, cuDNN and other processes cannot use what torch keeps."""
    if device.type == "cuda":
        # First: tensors in reference cycles are still in use for the allocator.
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def explain_out_of_memory(settings: Settings, device: torch.device) -> Iterator[None]:
    """Raise TrainingError with what was used, what was free, and what to try, where a GPU's memory is used up."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        wanted = str(error).partition("GPU ")[0].strip().partition("\n")[0].rstrip(".")
        raise TrainingError(f"{wanted}{memory_used(device)}", next_to_try(settings)) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory was used up: torch's allocator has a class of its own for it, but not the CUDA runtime
    (page-locked memory, contexts), cuBLAS, cuDNN and NCCL."""
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
    if budget := memory_budget(settings):
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
