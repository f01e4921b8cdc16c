"""Attention kernels of torch, and fused query, key and value projections (diffusers' fused processors).

Fused weights stay under their published names and are concatenated at each call: 1 % of the product's time
for a batch of FLUX. So checkpoints, EMA, sharding and the optimizer are the same with and without.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletuner.errors import SettingsError
from simpletuner.extras import install_command
from simpletuner.private_api import of_torch

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
OF_THE_HUB = "FA3 of the hub"
HINT = "set attention_backend=auto for the fastest kernel that there is"


@contextmanager
def attention_by(name: str, device: torch.device, dtype: torch.dtype, kernel: str = "") -> Iterator[None]:
    """Compute attention with this kernel within the block, and where it cannot, as with a mask, with another
    one.

    It holds for the whole process, including recomputation in autograd's threads. `kernel` is `flash3`'s on
    the hub. Raises SettingsError for a kernel that is missing, or unfit for this device and dtype.
    """
    library = of_torch.equal_gradient_layouts() if device.type == "cuda" else None
    try:
        with chosen_kernel(name, device, dtype, kernel):
            yield
    finally:
        del library  # torch's own kernel is back with the last reference; a second registration beside it is refused


@contextmanager
def chosen_kernel(name: str, device: torch.device, dtype: torch.dtype, kernel: str) -> Iterator[None]:
    if name == "auto":
        yield
        return
    if name == "flash3":
        activate_flash3(kernel)
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


def activate_flash3(kernel: str) -> None:
    """Register FlashAttention 3 with torch: from the hub (`owner/name@commit`), or flash_attn_interface."""
    needs = f"attention_kernel = {kernel}" if kernel else "attention_backend = flash3 needs flash_attn_interface"
    try:
        if kernel:
            operators = operators_of_the_hub(kernel)
            attention.register_flash_attention_impl(
                OF_THE_HUB, register_fn=partial(of_torch.register_flash3, operators)
            )
        attention.activate_flash_attention_impl(OF_THE_HUB if kernel else "FA3")
    # AttributeError: an older torch, or a kernel that is none. ValueError, OSError: what is not on the hub,
    # or not for this torch and device.
    except (ImportError, AttributeError, ValueError, OSError) as error:
        hint = install_command("kernels") if "'kernels'" in str(error) else HINT
        raise SettingsError(f"{needs}: {first_line(error)}", hint) from None


def operators_of_the_hub(kernel: str) -> object:
    """Namespace of torch's operators that a kernel of the hub brings; it runs what was published there."""
    from kernels import get_kernel

    repository, _, commit = kernel.partition("@")
    # Whoever names a commit has chosen what runs: the package would ask for publishers that the hub trusts.
    module = get_kernel(repository, revision=commit, trust_remote_code=[repository])
    return importlib.import_module(f"{module.__name__}._ops").ops


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
    """Kernel of attention without a mask and with heads of 128. Raises RuntimeError where there is none."""
    query = torch.empty(1, 1, 128, 128, device=device, dtype=dtype)
    return SDPBackend(of_torch.chosen_attention_kernel(query))


def attention_kernel(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return the name of the kernel that torch chooses now."""
    # A cuDNN that LD_LIBRARY_PATH puts before torch's own makes this FlashAttention 2, which on an H100 takes
    # 1.6 times as long, and nothing else would say so.
    name = choice(device, dtype).name.lower().removesuffix("_attention").replace("_", " ")
    implementation = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return f"{name} ({implementation})" if name == "flash" and implementation else name


PARTS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""Diffusers' names of a fused layer and of its parts."""


class FusedLinear:
    """Linear layers over one input as one product. No module, so that their weights have no second name."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)

    def __call__(self, x: Tensor) -> Tensor:
        weight = torch.cat([layer.weight for layer in self.layers])
        biases: list[Tensor] = [layer.bias for layer in self.layers if layer._parameters["bias"] is not None]
        return functional.linear(x, weight, torch.cat(biases) if biases else None)


def fuse_qkv(model: nn.Module) -> None:
    """Fuse the projections of all attention modules, in place, of a model on the meta device."""
    model.fuse_qkv_projections()  # pyright: ignore[reportCallIssue]
    for module in list(model.modules()):
        for name, parts in PARTS.items():
            if isinstance(getattr(module, name, None), nn.Linear):
                delattr(module, name)  # a layer with weights of its own
                setattr(module, name, FusedLinear([module.get_submodule(part) for part in parts]))  # pyright: ignore[reportArgumentType]
