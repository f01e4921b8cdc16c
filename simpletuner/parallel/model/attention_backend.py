"""Attention kernels of torch: the setting, and what torch chooses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletuner.errors import SettingsError
from simpletuner.private_api import of_torch

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HINT = "set attention_backend=auto for the fastest kernel that there is"


@contextmanager
def attention_by(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Compute attention with this kernel within the block, and where it cannot, as with a mask, with another one.

    It holds for the whole process, so also for recomputation in autograd's threads. Raises SettingsError for a kernel
    that is not there, or not for this device and dtype.
    """
    if name == "auto":
        yield
        return
    if name == "flash3":
        try:
            attention.activate_flash_attention_impl("FA3")
        except (ImportError, AttributeError) as error:  # AttributeError: an older torch
            raise SettingsError(f"attention_backend = flash3 needs flash_attn_interface: {error}", HINT) from None
    backend = BACKENDS[name]
    try:
        with sdpa_kernel(backend):
            check(name, device, dtype)
        # In order of priority, except `math`, which can do all: on a CPU torch has an order of its own.
        others = [] if backend == SDPBackend.MATH else list(BACKENDS.values())
        with sdpa_kernel([backend, *others], set_priority=bool(others)):
            yield
    finally:
        if name == "flash3":
            attention.restore_flash_attention_impl()


def check(name: str, device: torch.device, dtype: torch.dtype) -> None:
    with warnings.catch_warnings(record=True) as said:  # torch warns of each reason by itself
        warnings.simplefilter("always")
        try:
            chosen = choice(device, dtype)
        except RuntimeError:  # no kernel is left
            chosen = None
    if chosen != BACKENDS[name]:
        reasons = [str(each.message).partition("(Triggered")[0].strip() for each in said]
        why = f": {' '.join(reasons)}" if reasons else ""
        precision = str(dtype).removeprefix("torch.")
        message = f"attention_backend = {name}: torch has no such kernel for {precision} on this {device.type}{why}"
        raise SettingsError(message, HINT)


def choice(device: torch.device, dtype: torch.dtype) -> SDPBackend:
    """Return the kernel of attention without a mask and with heads of 128. Raises RuntimeError where there is none."""
    query = torch.empty(1, 1, 128, 128, device=device, dtype=dtype)
    return SDPBackend(of_torch.chosen_attention_kernel(query))


def attention_kernel(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return the name of the kernel that torch chooses now."""
    # A cuDNN that LD_LIBRARY_PATH puts before torch's own makes this FlashAttention 2, which on an H100 takes 1.6 times
    # as long, and nothing else would say so.
    name = choice(device, dtype).name.lower().removesuffix("_attention").replace("_", " ")
    implementation = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return f"{name} ({implementation})" if name == "flash" and implementation else name
