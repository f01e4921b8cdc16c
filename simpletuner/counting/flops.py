"""Count the floating-point operations of a training step on the meta device, where nothing is computed.

Counted is what torch's FlopCounterMode counts of forward and backward: 2 for each multiply-add of products,
convolutions and attention. Recomputation of activations is left out, since it is no progress of the model.
Kernels and casts of CUDA are replaced by fakes, so that a machine without a GPU counts the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, shape_wrapper

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.streams import take_streams
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.private_api.of_torch import TorchDispatchMode, tree_flatten, tree_map_only

META = torch.device("meta")

# Captions without padding have any length: rounded up to this, the shapes of a run are few.
TEXT_MULTIPLE = 32

Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape without batch axis, and dtype of the latents and of all conditioning."""


def shapes_of(latents_BCHW: Tensor, conditioning: Mapping[str, Tensor]) -> Shapes:
    tensors = {"latents": latents_BCHW, **conditioning}
    return tuple((name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items())


class FlopCounterMode(TorchDispatchMode):
    """Count all products, convolutions and attention of this thread, by the formulas of torch's own mode.

    That one registers hooks in all modules of the process, where other threads may be encoding, and asks of
    every operator what it decomposes into: nothing, since below autograd all are decomposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        outputs = func(*args, **(kwargs or {}))
        if (formula := FORMULAS.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=outputs)
        return outputs


def convolution_backward(
    output_shape: list[int], input_shape: list[int], weight_shape: list[int], *others: Any, **_: object
) -> int:
    # Each of the two gradients, of input and weight, costs as much as the convolution. torch's own formula
    # leaves `groups` out, and Sana's depthwise convolutions would count thousands of times.
    is_transposed, is_wanted = others[4], others[7]
    return conv_flop_count(input_shape, weight_shape, output_shape, is_transposed) * sum(is_wanted[:2])


FORMULAS = {**flop_registry, torch.ops.aten.convolution_backward: shape_wrapper(convolution_backward)}


def tensors_among(arguments: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments and in their lists, in a tenth of pytree's time."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_among(each)


class HostTensorsMoved(TorchFunctionMode):
    """Move CPU tensors to the meta device where they meet tensors there.

    Masks have to stay on the CPU until then: their sums are lengths, which become shapes.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: object = None) -> object:
        given = (args, kwargs or {})
        tensors = list(tensors_among([*args, *given[1].values()]))
        if any(each.is_meta for each in tensors) and not all(each.is_meta or each.ndim == 0 for each in tensors):
            if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
                given = ((args[0], args[1].nonzero(as_tuple=True)), {})  # how many are chosen is known only here
            args, kwargs = tree_map_only(Tensor, lambda each: each.to(META) if each.ndim else each, given)
        return func(*args, **(kwargs or {}))


class AutocastOfMeta(torch.autocast):
    """Autocast that takes the meta device for the CPU: Ideogram 4 leaves autocast where its input is, and
    torch knows none of the meta device."""

    def __init__(self, device_type: str, *arguments: Any, **named: Any) -> None:
        super().__init__("cpu" if device_type == META.type else device_type, *arguments, **named)


@contextmanager
def autocast_of_meta() -> Iterator[None]:
    """Let denoisers enter autocast on the meta device; for other threads nothing changes."""
    own, torch.autocast = torch.autocast, AutocastOfMeta
    try:
        yield
    finally:
        torch.autocast = own


@dataclass
class FlopCounter:
    """Count the FLOPs of one sample of a family, forward and backward, once for each shape of its inputs."""

    family: ModelFamily
    counted: dict[Shapes, int] = field(default_factory=dict)

    def count(self, latents_BCHW: Tensor, conditioning: Mapping[str, Tensor]) -> int:
        """Return the FLOPs of a micro-batch: those of one sample times its size."""
        shapes = shapes_of(latents_BCHW, conditioning)
        if shapes not in self.counted:
            self.counted[shapes] = self._count_sample(self.rounded(shapes))
        return self.counted[shapes] * len(latents_BCHW)

    def rounded(self, shapes: Shapes) -> Shapes:
        family = self.family
        if not family.has_any_text_length:
            return shapes
        length = next(shape[0] for name, shape, _ in shapes if name == "prompt_embeds")
        rounded = -(-length // TEXT_MULTIPLE) * TEXT_MULTIPLE
        rounded = max(length, min(rounded, family.max_length or rounded))
        is_text = {name for name, shape, _ in shapes if shape[:1] == (length,) and name != "latents"}
        return tuple(
            (name, (rounded, *shape[1:]) if name in is_text else shape, dtype) for name, shape, dtype in shapes
        )

    def _count_sample(self, shapes: Shapes) -> int:
        if shapes not in self.counted:
            self.counted[shapes] = count_flops(self.family, self.family.trained_on_meta, shapes)
        return self.counted[shapes]


def count_flops(family: ModelFamily, model: nn.Module, shapes: Shapes) -> int:
    """Count forward and backward of one sample; the model is left as it was.

    The inputs get gradients, too: without frozen weights the count is three times the forward pass.
    """
    inputs = {name: meta_input(shape, dtype) for name, shape, dtype in shapes}
    noised, timesteps = take_streams(inputs), torch.empty(1, device=META)
    blocks, unused = RepeatedBlocks(), family.unused_parameters()
    try:
        with FlopCounterMode() as counter, HostTensorsMoved(), autocast_of_meta(), blocks.run_once_each(model, unused):
            prediction = family.predict_streams(model, noised, timesteps, inputs)
            backward([*prediction.values(), *blocks.entered])
    finally:
        model.zero_grad()
    return counter.flops + blocks.skipped_flops


def meta_input(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return one sample's input: a leaf on the meta device, or a mask that covers all, on the CPU."""
    if not dtype.is_floating_point:
        return torch.ones(1, *shape, dtype=dtype)
    return torch.empty(1, *shape, device=META, requires_grad=True)


def backward(outputs: Iterable[object]) -> None:
    """Run the backward pass of all tensors among the outputs that have one."""
    tensors = [each for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None]
    torch.autograd.backward(tensors, [torch.empty_like(each) for each in tensors])


class RepeatedBlocks:
    """Run one of equal blocks with equal shapes, and count it for all: Flux has 57 blocks of two kinds.

    Each block runs with its backward pass, cut off from the rest of the graph; `entered` are the inputs of
    blocks, where the backward pass of what lies before them begins.
    """

    def __init__(self) -> None:
        self.entered: list[Tensor] = []
        self.skipped_flops = 0
        self.known: dict[tuple[object, ...], tuple[object, int]] = {}

    @contextmanager
    def run_once_each(self, model: nn.Module, unused: tuple[str, ...]) -> Iterator[None]:
        """Replace the forward of all blocks within, except of those with unused parameters."""
        names = recommended_blocks(model)
        blocks = [
            module
            for name, module in model.named_modules()
            if type(module).__name__ in names and not any(each.startswith(f"{name}.") for each in unused)
        ]
        for block in blocks:
            trained = tuple(each.requires_grad for each in block.parameters())
            # On the instance, where it hides the class's method. The repr has non-parameters such as strides.
            block.forward = self._counted(block.forward, block, (repr(block), trained))
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    def _counted(
        self, forward: Callable[..., object], block: nn.Module, kind: tuple[object, ...]
    ) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            flat, structure = tree_flatten((args, kwargs))
            key = (*kind, structure, *map(signature, flat))
            self.entered += [each for each in flat if isinstance(each, Tensor)]
            if key in self.known:
                outputs, flops = self.known[key]
                self.skipped_flops += flops
            else:
                with FlopCounterMode() as counter:
                    outputs = run_alone(forward, args, kwargs)
                self.known[key] = outputs, counter.flops
            return tree_map_only(Tensor, cut_off, outputs)

        return run


def run_alone(forward: Callable[..., object], args: object, kwargs: object) -> object:
    args, kwargs = tree_map_only(Tensor, cut_off, (args, kwargs))
    outputs = forward(*args, **kwargs)
    backward(tree_flatten(outputs)[0])
    return outputs


def cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def signature(value: object) -> object:
    """Return a key that is equal for equal arguments of blocks: shape, dtype and gradient of a tensor, else
    its text."""
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else repr(value)


class FusedRMSNorm(torch.autograd.Function):
    """nn.RMSNorm with the saved tensors of CUDA's fused kernel; the CPU's several operators keep more."""

    @staticmethod
    def forward(ctx: object, values: Tensor, weight: Tensor | None) -> Tensor:
        inverse = values.new_empty(*values.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(values, weight, inverse)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: object, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), None if weight is None else torch.empty_like(weight)


def use_cuda_kernels(model: nn.Module) -> None:
    def fused_rms_norm(values: Tensor, norm: nn.RMSNorm) -> object:
        autocast = torch.is_autocast_enabled(values.device.type)
        return FusedRMSNorm.apply(values.float() if autocast else values, norm.weight)

    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(fused_rms_norm, norm=module)


# Functions that autocast computes in float32 on CUDA (ATen/autocast_mode.h), but in bf16 on a CPU.
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

# Names under which Python calls them.
ALIASES = {
    "__pow__": "pow",
    "__rpow__": "pow",
    "interpolate": "upsample_bilinear2d",
    "vector_norm": "linalg_vector_norm",
}


class CudaAutocast(TorchFunctionMode):
    """Within the CPU's autocast, compute in float32 what CUDA's does: activations grow by up to a third."""

    def __torch_function__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        name = getattr(func, "__name__", "")
        if ALIASES.get(name, name) in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, in_float32, (args, kwargs))
        return func(*args, **(kwargs or {}))


def in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
