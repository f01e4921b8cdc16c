"""Memory and work of a training step, counted on fake tensors: shapes, dtypes and lifetimes, but no numbers.

Everything that eager torch runs is run, so recomputation, saved tensors and temporaries are those of the real step. Of
a denoiser with 12 billion parameters this takes seconds and no memory.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from simpletuner.models.analysis.flops import convolution_backward
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.model.activations import CastParameter, HostMemory
from simpletuner.private_api.of_torch import (
    FakeTensorMode,
    TorchDispatchMode,
    run_backward,
    tree_iter,
    tree_map_only,
)
from simpletuner.settings.values.shape import Shape

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_permuted,
}
"""Operators that launch no kernel."""


@dataclass(frozen=True)
class StepTrace:
    """Forward and backward of one micro-batch on one device."""

    samples: int
    kept_bytes: int
    """Bytes held for the backward pass when the forward pass ends, weights excluded."""
    host_bytes: int
    """The same in the machine's memory, where activations are offloaded."""
    backward_points: tuple[tuple[int, float], ...]
    """(bytes of activations at most since the last point, fraction of all gradients that exist by then)."""
    product_flops: int
    """Of products and convolutions, recomputation included."""
    attention_flops: int
    other_bytes: int
    """Read and written by all other operators, each of which passes through the device's memory."""
    launches: int
    released: tuple[str, ...] = ()
    """The parameters in the order of `backward_points`, each of which is before one's gradient."""

    def peak(
        self, gradient_bytes: float, are_kept: bool = False, gathered: Iterable[float] = ()
    ) -> tuple[float, float, float]:
        """Return the bytes of activations, of gradients, and of what is `gathered` at each point, when all together are
        most.

        `gradient_bytes` are those of all gradients at the end; they are there from the start where micro-batches
        before this one have left theirs (`are_kept`).
        """
        points = zip(self.backward_points, chain(gathered, repeat(0.0)), strict=False)
        return max(((live, gradient_bytes * (are_kept or exist), more) for (live, exist), more in points), key=sum)

    def peak_bytes(self, gradient_bytes: float) -> float:
        return sum(self.peak(gradient_bytes))

    def scaled(self, samples: int, other: StepTrace) -> StepTrace:
        """Return the trace of another number of samples, on the line through this trace and another."""
        return replace(self.towards(other, (samples - self.samples) / (other.samples - self.samples)), samples=samples)

    def towards(self, other: StepTrace, share: float) -> StepTrace:
        """Return what lies between this trace (0) and another (1), or beyond."""

        def line(ours: float, theirs: float) -> int:
            return round(ours + (theirs - ours) * share)

        both = zip(self.backward_points, other.backward_points, strict=True)
        points = tuple((line(mine, its), fraction) for (mine, fraction), (its, _) in both)
        names = ("kept_bytes", "host_bytes", "product_flops", "attention_flops", "other_bytes", "launches")
        numbers = {name: line(getattr(self, name), getattr(other, name)) for name in names}
        return replace(self, backward_points=points, **numbers)


class FusedRMSNorm(torch.autograd.Function):
    """nn.RMSNorm with the saved tensors of CUDA's fused kernel; on the CPU it is several operators, which keep more."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None) -> Tensor:
        inverse = values.new_empty(*values.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(values, weight, inverse)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), None if weight is None else torch.empty_like(weight)


# A plan is made on a machine without a GPU, for GPUs: what their kernels keep is what counts.
def use_cuda_kernels(model: nn.Module) -> None:
    def fused_rms_norm(values: Tensor, norm: nn.RMSNorm) -> Any:
        autocast = torch.is_autocast_enabled(values.device.type)
        return FusedRMSNorm.apply(values.float() if autocast else values, norm.weight)

    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(fused_rms_norm, norm=module)


FLOAT32_ON_CUDA = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "softplus",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "group_norm",
        "frobenius_norm",
        "nuclear_norm",
        "cosine_similarity",
        "poisson_nll_loss",
        "cosine_embedding_loss",
        "nll_loss",
        "nll_loss2d",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "pdist",
        "cdist",
        "renorm",
        "logsumexp",
        "upsample_nearest1d",
        "_upsample_nearest_exact1d",
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "_upsample_bilinear2d_aa",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        "_upsample_bicubic2d_aa",
        "prod",
        "softmax",
        "log_softmax",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "sum",
    ]
)
"""Functions that autocast computes in float32 on CUDA (ATen/autocast_mode.h), but in bf16 on a CPU."""

# Names under which Python calls them.
ALIASES = {
    "__pow__": "pow",
    "__rpow__": "pow",
    "interpolate": "upsample_bilinear2d",
    "vector_norm": "linalg_vector_norm",
}


class CudaAutocast(TorchFunctionMode):
    """Within the CPU's autocast, compute in float32 what that of CUDA does: activations are up to a third larger."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if ALIASES.get(name, name) in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, in_float32, (args, kwargs))
        return func(*args, **(kwargs or {}))


def in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@dataclass(eq=False)
class MemoryCounter(TorchDispatchMode):
    """Follow the bytes of all tensors that are made within, from their making until nothing refers to them."""

    live: int = 0
    peak: int = 0
    on_host: int = 0
    """Of tensors on the meta device, which stands for the machine's memory."""
    moved: int = 0
    """Read and written by operators that are neither products nor attention."""
    launches: int = 0
    flops: Counter[Any] = field(default_factory=Counter)
    known: Any = field(default_factory=weakref.WeakKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func.namespace != "aten":  # such as prim.device, which a fake tensor is asked for all the time
            return outputs
        made = [each for each in tree_iter(outputs) if isinstance(each, Tensor)]
        for each in made:
            self.add(each)
        if not (func.is_view or func.overloadpacket in ALLOCATIONS):
            self.count_work(func.overloadpacket, args, kwargs, outputs, made)
        return outputs

    def count_work(self, operator: Any, args: Any, kwargs: Any, outputs: Any, made: list[Tensor]) -> None:
        self.launches += 1
        if (formula := FLOPS.get(operator)) is not None:
            self.flops[operator] += formula(*args, **kwargs, out_val=outputs)
            return
        read = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self.moved += sum(each.numel() * each.element_size() for each in [*read, *made])

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # Views share a storage, which counts once.
        if storage not in self.known:
            self.known[storage] = size = storage.nbytes()
            self.hold(size, tensor.is_meta)
            self.peak = max(self.peak, self.live)
            # torch keeps one Python object per storage while a tensor uses it: with it goes the memory.
            weakref.finalize(storage, self.hold, -size, tensor.is_meta)

    def hold(self, size: int, on_host: bool) -> None:
        if on_host:
            self.on_host += size
        else:
            self.live += size

    def exclude(self, tensors: Iterator[Tensor]) -> None:
        """Leave out what was there before."""
        for each in tensors:
            self.known[each.untyped_storage()] = 0

    def restart_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.live
        return peak


def attention_forward(query: list[int], key: list[int], value: list[int], *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def attention_backward(
    gradient: list[int], query: list[int], key: list[int], value: list[int], *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# The CPU's flash attention keeps what that of CUDA does: query, key, value, output and the logarithm of the sums.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(attention_forward),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(attention_backward),
}
FLOPS = {**flop_registry, aten.convolution_backward: shape_wrapper(convolution_backward), **ATTENTION}
"""FLOPs of those operators whose time is that of their arithmetic."""


class MetaMemory(HostMemory):
    """HostMemory that keeps no contents: only their bytes are counted."""

    def unpack(self, packed: tuple[torch.device, Tensor] | CastParameter) -> Tensor:
        if isinstance(packed, CastParameter) or not packed[1].is_meta:
            return super().unpack(packed)
        device, tensor = packed
        return torch.empty_like(tensor, device=device)


def with_fake_parameters(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace the parameters, cast to `dtype`, and buffers of a model on the meta device by fake ones, in place."""
    # to_empty() would do so, too, but converting each meta tensor takes longer than tracing a step
    with mode:
        for module in model.modules():
            for name, each in module._parameters.items():
                if each is not None:
                    made = torch.empty(each.shape, dtype=dtype or each.dtype)
                    module._parameters[name] = nn.Parameter(made, requires_grad=each.requires_grad)
            for name, each in module._buffers.items():
                if each is not None:
                    module._buffers[name] = torch.empty(each.shape, dtype=each.dtype)
    return model


def new_mode() -> FakeTensorMode:
    """Return a mode for fake tensors, among which real ones are taken as inputs, too: masks, and rotary tables."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace_step(
    family: ModelFamily, model: nn.Module, mode: FakeTensorMode, shapes: Mapping[str, tuple[int, ...]], samples: int,
    dtype: torch.dtype, autocast: bool, on_gpu: bool = False, offloads: bool = False,
) -> StepTrace:  # fmt: skip
    """Trace a model with fake parameters, in the dtype that they compute in, or that autocast casts to `dtype`.

    `shapes` are those of one sample; `on_gpu`, the casts are those of CUDA, and with `offloads`
    what is kept is in the machine's memory.
    """
    with mode:
        inputs = {name: torch.empty(samples, *shape) for name, shape in shapes.items() if "mask" not in name}
        timesteps = torch.empty(samples)
        latents = inputs.pop("latents").to(dtype)
    # Masks are real: their sums are lengths, which become shapes.
    masks = {name: torch.ones(samples, *shape, dtype=torch.long) for name, shape in shapes.items() if "mask" in name}
    memory, trained = MemoryCounter(), {name: each for name, each in model.named_parameters() if each.requires_grad}
    memory.exclude(iter([*model.parameters(), *model.buffers(), latents, *inputs.values()]))
    points: list[tuple[int, float]] = []
    released: list[str] = []
    casts = CudaAutocast() if on_gpu else nullcontext()
    with memory, casts, gradients_released(trained, memory, points, released):
        with torch.autocast("cpu", dtype, enabled=autocast):
            with MetaMemory("meta") if offloads else nullcontext():
                prediction = family.predict(model, latents, timesteps, inputs | masks)
            loss = prediction.float().square().mean()
        kept, on_host = memory.live, memory.on_host
        run_backward(loss)
        points.append((memory.restart_peak(), 1.0))
    attention = sum(memory.flops[each] for each in ATTENTION)
    products = memory.flops.total() - attention
    work = (products, attention, memory.moved, memory.launches)
    return StepTrace(samples, kept, on_host, tuple(points), *work, tuple(released))


@contextmanager
def gradients_released(
    trained: Mapping[str, nn.Parameter],
    memory: MemoryCounter,
    points: list[tuple[int, float]],
    released: list[str],
) -> Iterator[None]:
    """Free each gradient when it is there, and note the peak before it: how gradients are kept is up to an engine."""
    total, done = sum(each.numel() for each in trained.values()), 0

    def release(name: str, parameter: Tensor) -> None:
        nonlocal done
        points.append((memory.restart_peak(), done / total))
        released.append(name)
        done += parameter.numel()
        parameter.grad = None

    hooks = [each.register_post_accumulate_grad_hook(partial(release, name)) for name, each in trained.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def trace_vae(model: nn.Module, dtype: torch.dtype, shape: Shape, samples: int, decodes: bool) -> int:
    """Return the most bytes, weights included, that a VAE on the meta device takes for samples of a shape in px."""
    mode = new_mode()
    parameters = list(with_fake_parameters(model, mode, dtype).parameters())
    # The 3-D convolutions of video VAEs (Qwen-Image, Wan), which take an image as one frame.
    has_frames = any(each.ndim == 5 for each in parameters)
    with mode:
        images = torch.empty(samples, 3, *(shape if has_frames else shape.axes), dtype=dtype)
    vae: Any = model
    encoded = vae.encode(images)
    latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    memory = MemoryCounter()
    memory.exclude(iter([*parameters, *model.buffers(), latents, images]))
    del encoded
    with memory:
        vae.decode(latents) if decodes else vae.encode(images)
    return memory.peak + sum(each.numel() * each.element_size() for each in parameters)
