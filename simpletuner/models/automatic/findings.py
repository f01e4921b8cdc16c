"""Facts that a study found of a pipeline, and a proof confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from simpletuner.models.automatic.pipeline_run import refused, tensors_of
from simpletuner.models.automatic.scheduler import NoiseSchedule
from simpletuner.models.automatic.text import TextLayout, to_float32
from simpletuner.private_api.of_torch import TreeSpec, tree_map_only, tree_unflatten
from simpletuner.settings.values.shape import Shape


@dataclass(frozen=True)
class Layout:
    """Layout of a pipeline's noise: its shape without batch; axes of frames, rows and columns of cells."""

    shape: tuple[int, ...]
    rows: int
    columns: int
    cell: Shape
    """Frames and px that one latent cell covers."""
    frames: int | None = None
    """Axis of frames; None for a pipeline of images only."""

    def in_px(self, latents: Sequence[int]) -> Shape:
        """Return the shape in px of a sample whose latents have these axes, without batch."""
        frames = 1 if self.frames is None else (latents[self.frames] - 1) * self.cell.frames + 1
        return Shape(frames, latents[self.rows] * self.cell.height, latents[self.columns] * self.cell.width)

    def axes(self, cells: Shape) -> tuple[int, ...]:
        """Return the axes of latents, without batch, of a shape in latent cells."""
        axes = list(self.shape)
        axes[self.rows], axes[self.columns] = cells.height, cells.width
        if self.frames is not None:
            axes[self.frames] = cells.frames
        return tuple(axes)

    def first_frame(self, latents: Tensor) -> Tensor:
        """Return the first latent frame of clips, whose last axes are those of this layout."""
        assert self.frames is not None
        return latents.narrow(self.frames - len(self.shape), 0, 1)

    def axes_for(self, shape: Shape) -> tuple[int, ...]:
        return self.axes(shape.in_cells(self.cell))


@dataclass(frozen=True)
class GivenImages:
    """Images that a pipeline is given beside the caption: references, or the first frame of a clip."""

    shapes: tuple[Shape, ...]
    """Shapes in px at which they were studied."""
    inputs: tuple[str, ...]
    """Names of the denoiser's inputs that depend on them."""
    is_first_frame: bool = False
    frames: int = 1
    """Frames that the VAE is given of a first frame: 1, or as many as the clip has, grey after the first."""
    is_alone: bool = False
    """True if the latents of a whole clip do not begin with those of its first frame."""
    replaces_noise: bool = False
    """True if the first latent frame is that of the image, not of the noise."""

    @property
    def kind(self) -> str:
        return "first frame" if self.is_first_frame else "references"

    def sizes(self, shape: Shape) -> tuple[Shape, ...]:
        """Shapes in px of the images for a sample of a shape: those of the study, or that of its frames."""
        return (shape._replace(frames=1),) if self.is_first_frame else self.shapes


@dataclass(frozen=True)
class Findings:
    """Facts that were found of a pipeline, and the arguments that its calls are made with."""

    shape: Shape
    """Shape in px at which the pipeline was studied."""
    schedule: NoiseSchedule
    text: TextLayout
    layout: Layout
    arguments: dict[str, Any]
    """Arguments of each call, with guidance off."""
    latents_input: str
    """Name of the denoiser's input that holds the latents."""
    float32_inputs: frozenset[str]
    """Inputs that depend neither on latents nor on the caption: times, sizes, positions."""
    outputs: Output
    images: GivenImages | None = None
    """Images that each call is given; None for a pipeline of captions alone."""
    embeds_guidance: bool = False
    sign: float = 1.0
    """Sign of the objective's target in the input of the scheduler's `step`."""
    axes: tuple[int | None, ...] | None = None
    """Batch axes of the text's leaves; None: one call of the pipeline per sample."""
    unbatched: str = ""
    """Reason for one call per sample; empty for batches."""
    replays: bool = False
    """True if a call's operators alone, traced, are the same as the call."""
    joins: bool = False
    """True if samples whose calls are made one by one can share one call of the denoiser."""
    guidance: GuidedText | None = None
    """Text layout for guidance; None: images are sampled without."""
    unguided: str = ""
    """Reason for sampling without guidance."""
    kinds: str = ""
    """Clips, images or both, as facts say it; empty for a pipeline that makes images alone."""
    unused: tuple[str, ...] = ()
    """Parameters that no prediction depends on."""
    zero_gradients: tuple[str, ...] = ()
    """Prefixes of parameters with a gradient of zero for what was proven."""


@dataclass(frozen=True)
class Check:
    """A point that was shown of a pipeline, with the difference that was measured and the largest allowed."""

    name: str
    finding: str
    off: float | None = None
    limit: float | None = None

    @property
    def passed(self) -> bool:
        return self.off is None or self.limit is None or self.off <= self.limit


@dataclass(frozen=True)
class GuidedText:
    """The output of `encode_prompt` for a prompt and a negative prompt."""

    structure: TreeSpec
    constants: tuple[object, ...]
    positive: tuple[int, ...]
    negative: tuple[int, ...]
    """Numbers of the leaves that depend on one or the other, as many as a caption's own encoding has; or
    none that depends on a negative prompt."""
    images: tuple[int, ...] = ()
    """Numbers of the leaves that depend on given images alone, as many as a caption's own encoding has."""

    def as_caption(self, leaves: Sequence[Any], text: TextLayout) -> list[Any]:
        """Return the leaves of the negative prompt and images, in the order of a caption's own encoding."""
        own, images = iter(self.negative), iter(self.images)
        return [leaves[next(images if number in text.of_images else own)] for number in text.names]

    def build(self, positive: Sequence[Tensor], negative: Sequence[Tensor], images: Sequence[Tensor] = ()) -> Any:
        leaves = list(self.constants)
        for numbers, own in ((self.positive, positive), (self.negative, negative), (self.images, images)):
            for number, leaf in zip(numbers, own, strict=False):
                leaves[number] = leaf
        device = positive[0].device
        return tree_unflatten([to_float32(leaf, device) for leaf in leaves], self.structure)


@dataclass(frozen=True)
class Output:
    """The shape of a denoiser's output relative to its latents."""

    template: object
    """The output with a number in place of each tensor."""
    ratios: tuple[tuple[Fraction, ...], ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, output: object, latents: Sequence[Tensor], pipeline: str) -> Output:
        numbers, ratios = iter(range(100)), list[tuple[Fraction, ...]]()

        def note(tensor: Tensor) -> int:
            number = next(numbers)
            like = latents[min(number, len(latents) - 1)]
            if like.ndim != tensor.ndim:
                raise refused(
                    pipeline, f"its denoiser makes {tuple(tensor.shape)} of latents of shape {tuple(like.shape)}"
                )
            ratios.append(tuple(Fraction(a, b) for a, b in zip(tensor.shape, like.shape, strict=True)))
            return number

        return cls(tree_map_only(Tensor, note, output), tuple(ratios))

    def make(self, latents: Sequence[Tensor], fill: Callable[[Tensor], Tensor] = torch.zeros_like) -> object:
        """Return an output for latents, zeros where nothing else is said."""

        def one(number: int, like: Tensor) -> Tensor:
            ratios = self.ratios[min(number, len(self.ratios) - 1)]
            shape = [int(length * ratio) for length, ratio in zip(like.shape, ratios, strict=True)]
            return fill(like.new_empty(shape, dtype=torch.float32))

        if isinstance(self.template, tuple) and isinstance(self.template[0], list):  # a list, as long as the batch
            return ([one(0, each) for each in latents], *self.template[1:])
        return tree_map_only(int, lambda number: one(number, latents[min(number, len(latents) - 1)]), self.template)


def latents_among(given: Mapping[str, object], name: str) -> list[Tensor]:
    """Return the latents among a denoiser's inputs: one tensor, or a list of one for each sample."""
    tensors = tensors_of(given)
    return [tensor for each, tensor in tensors.items() if each == name or each.startswith(f"{name}[")]
