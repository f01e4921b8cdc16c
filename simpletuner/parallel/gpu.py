"""What a run does with its GPU beside computing: which one it is, its precision, and its memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.cuda.nccl import version as nccl_version
from torch.nn.attention import SDPBackend

from simpletuner.errors import TrainingError
from simpletuner.settings.sections import Settings

GIB = 2**30


def describe_device(device: torch.device) -> str:
    """Return the GPU, its driver's and torch's CUDA, and the attention kernel that torch chooses there."""
    if device.type != "cuda":
        return f"{device.type}, {torch.get_num_threads()} threads, attention: {attention_kernel(device)}"
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


def attention_kernel(device: torch.device) -> str:
    """Return which of torch's kernels computes attention without a mask, in bf16 and with heads of 128."""
    # A cuDNN that LD_LIBRARY_PATH puts before torch's own makes this FlashAttention 2, which on an H100 takes 1.6 times
    # as long, and nothing else would say so.
    query = torch.empty(1, 1, 128, 128, device=device, dtype=torch.bfloat16)
    chosen: Any = torch._fused_sdp_choice(query, query, query)
    return SDPBackend(chosen).name.lower().removesuffix("_attention").replace("_", " ")


def set_float32_precision(allow_tf32: bool) -> None:
    """Compute float32 products and convolutions on GPUs in float32, or in TF32 (10 bits of mantissa).

    torch's own defaults are one for convolutions and the other for products.
    """
    precision = "tf32" if allow_tf32 else "ieee"
    backends: Any = torch.backends
    for operators in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operators.fp32_precision = precision


def return_memory(device: torch.device) -> None:
    """Return what is no longer used to the driver: NCCL, cuDNN and other processes cannot use what torch keeps."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def explain_out_of_memory(settings: Settings, device: torch.device) -> Iterator[None]:
    """Raise TrainingError with what was used, what was free, and what to try, where a GPU's memory is used up."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        wanted = str(error).partition("GPU ")[0].strip().rstrip(".")
        raise TrainingError(f"{wanted}{memory_used(device)}", next_to_try(settings)) from error


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
        return "use several GPUs with fsdp_enable, set zero_stage=2 and offload_optimizer=cpu, or model_type=lora"
    return "use more GPUs, a lower resolution, or zero_stage=3 with offload_optimizer=cpu and offload_param=cpu"
