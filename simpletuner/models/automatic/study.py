"""Study of a pipeline by running it: its objective, how guidance is off, and what its denoiser is given.

Nothing here is believed: `proof.py` runs the pipeline's own loop with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.seams import Ended, EnteredPipeline, PipelineRun, refused, tensors_of
from simpletuner.models.automatic.text import TextLayout, all_equal, batch_axes, same, to_float32
from simpletuner.models.family.objectives import samples_by_diffusion
from simpletuner.private_api.of_torch import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from simpletuner.settings.values.shape import Shape

CAPTIONS = (
    "a red circle",
    "two large blue squares and a small green triangle below them on a bright background, in pink",
    "a photo",
    " ".join(["a small yellow star beside a large purple heart"] * 64),
)
"""Short and long ones; the last is as long as text encoders read."""

FLOW_LEVEL, DIFFUSION_TIME = 0.3, 300
"""Points at which inputs are studied."""

GUIDED = 5.0
"""A scale above which every pipeline guides."""


@dataclass(frozen=True)
class NoiseSchedule:
    """Objective that a pipeline's scheduler samples from, and the time that its denoiser gets."""

    objective: Literal["flow", "diffusion"]
    slope: float = 1.0
    offset: float = 0.0
    """Flow matching: time = slope * noise level + offset."""

    def time(self, timesteps: Tensor) -> Tensor:
        """Convert the objective's timesteps (B) to the scheduler's."""
        return timesteps if self.objective == "diffusion" else timesteps * self.slope + self.offset

    def example(self, share: float = FLOW_LEVEL) -> Tensor:
        """Return the time of one sample at this share of all noise."""
        own = torch.tensor([share]) if self.objective == "flow" else torch.tensor([int(share * 1000)])
        return self.time(own)


def study_schedule(scheduler: Any, pipeline: str) -> NoiseSchedule:
    """Find the objective and the time in a scheduler. Raises SettingsError for one that is neither."""
    config = scheduler.config
    if samples_by_diffusion(scheduler):
        return NoiseSchedule("diffusion")
    if "sigma_data" in config:
        raise refused(pipeline, f"{type(scheduler).__name__} is for EDM, which is not trained here")
    own = type(scheduler).from_config(config)
    try:
        own.set_timesteps(8, **({"mu": 1.0} if config.get("use_dynamic_shifting") else {}))
        sigmas, times = own.sigmas[:8].double(), own.timesteps[:8].double()
    except (AttributeError, TypeError, ValueError) as error:
        raise refused(pipeline, f"{type(scheduler).__name__} has no noise levels to train at: {error}") from None
    levels, count = noise_levels(own.sigmas)[:8].double(), float(config.get("num_train_timesteps", 1000))
    candidates = ((count, 0.0), (-count, count), (1.0, 0.0), (-1.0, 1.0))
    off, slope, offset = min((float((levels * a + b - times).abs().max()), a, b) for a, b in candidates)
    if off > 1.01 * abs(slope) / 1000 * (1 + (abs(slope) == 1)):
        raise refused(pipeline, f"{type(scheduler).__name__} has times that are no multiple of its noise levels")
    assert len(sigmas) == len(levels)
    return NoiseSchedule("flow", slope, offset)


def noise_levels(sigmas: Tensor) -> Tensor:
    """Return the share of noise at each sigma: some schedulers count it from 0 at pure noise (Mochi)."""
    return sigmas if sigmas[0] > sigmas[len(sigmas) // 2] else 1 - sigmas


@dataclass(frozen=True)
class Layout:
    """The noise that a pipeline draws: its shape without batch, and which axes are rows and columns of cells."""

    shape: tuple[int, ...]
    rows: int
    columns: int
    cell_px: int

    def in_px(self, latents: Sequence[int]) -> Shape:
        """Return the shape in px of an image whose latents have these axes, without batch."""
        return Shape(1, latents[self.rows] * self.cell_px, latents[self.columns] * self.cell_px)

    def axes(self, cells: Shape) -> tuple[int, ...]:
        """Return the axes of latents, without batch, of a shape in latent cells."""
        axes = list(self.shape)
        axes[self.rows], axes[self.columns] = cells.height, cells.width
        return tuple(axes)

    def axes_for(self, shape: Shape) -> tuple[int, ...]:
        return self.axes(shape.in_cells(Shape(1, self.cell_px, self.cell_px)))


@dataclass(frozen=True)
class Findings:
    """Facts that were found of a pipeline, and the arguments that its calls are made with."""

    schedule: NoiseSchedule
    text: TextLayout
    layout: Layout
    arguments: dict[str, Any]
    """Of each call: guidance is off."""
    latents_input: str
    """Name of the denoiser's input that holds the latents."""
    float32_inputs: frozenset[str]
    """Inputs that depend neither on latents nor on the caption: times, sizes, positions."""
    outputs: Output
    embeds_guidance: bool = False
    sign: float = 1.0
    """Of the objective's target in what the scheduler's `step` gets."""
    axes: tuple[int | None, ...] | None = None
    """Batch axes of the text's leaves; None: one call of the pipeline per sample."""
    unbatched: str = ""
    """Reason for which samples are not in one call."""
    guidance: GuidedText | None = None
    """None: images are sampled without guidance."""
    unguided: str = ""
    """Why they are."""
    unused: tuple[str, ...] = ()
    """Parameters that no prediction depends on."""


@dataclass(frozen=True)
class GuidedText:
    """The output of `encode_prompt` for a prompt and a negative prompt."""

    structure: TreeSpec
    constants: tuple[Any, ...]
    positive: tuple[int, ...]
    negative: tuple[int, ...]
    """Numbers of the leaves that depend on one or the other, as many as a caption's own encoding has; or none that
    depends on a negative prompt."""

    def build(self, positive: Sequence[Tensor], negative: Sequence[Tensor]) -> Any:
        leaves = list(self.constants)
        for numbers, own in ((self.positive, positive), (self.negative, negative)):
            for number, leaf in zip(numbers, own, strict=False):
                leaves[number] = leaf
        device = positive[0].device
        return tree_unflatten([to_float32(leaf, device) for leaf in leaves], self.structure)


@dataclass(frozen=True)
class Output:
    """The shape of a denoiser's output relative to its latents."""

    template: Any
    """The output with a number in place of each tensor."""
    ratios: tuple[tuple[Fraction, ...], ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, output: Any, latents: Sequence[Tensor], pipeline: str) -> Output:
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

    def make(self, latents: Sequence[Tensor], fill: Callable[[Tensor], Tensor] = torch.zeros_like) -> Any:
        """Return an output for latents, zeros where nothing else is said."""

        def one(number: int, like: Tensor) -> Tensor:
            ratios = self.ratios[min(number, len(self.ratios) - 1)]
            shape = [int(length * ratio) for length, ratio in zip(like.shape, ratios, strict=True)]
            return fill(like.new_empty(shape, dtype=torch.float32))

        if isinstance(self.template, tuple) and isinstance(self.template[0], list):  # a list, as long as the batch
            return ([one(0, each) for each in latents], *self.template[1:])
        return tree_map_only(int, lambda number: one(number, latents[min(number, len(latents) - 1)]), self.template)


def latents_among(given: dict[str, Any], name: str) -> list[Tensor]:
    """Return the latents among a denoiser's inputs: one tensor, or a list of one for each sample."""
    tensors = tensors_of(given)
    return [tensor for each, tensor in tensors.items() if each == name or each.startswith(f"{name}[")]


@dataclass
class Study:
    """Runs of one pipeline with all its components, at one shape in px."""

    entered: EnteredPipeline
    module: Callable[..., Any]
    """The denoiser, with weights."""
    shape: Shape
    guidance: float = 1.0
    """Embedded guidance scale to train with, where a denoiser has one."""
    given: dict[str, Any] = field(default_factory=dict)
    """Further arguments of each call."""
    encoded: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.entered.cls.__name__

    def refused(self, why: str) -> SettingsError:
        return refused(self.name, why)

    def find(self) -> Findings:
        """Raises SettingsError with the first reason why the pipeline cannot be trained."""
        schedule = study_schedule(self.entered.real_scheduler, self.name)
        reasons: list[str] = []
        # Guidance is off at 1 in most pipelines, at 0 in some (Z-Image), and others have no such argument.
        for scale in (1.0, 0.0, None):
            off = {} if scale is None else {"guidance_scale": scale, "true_cfg_scale": scale}
            arguments = {name: value for name, value in (self.given | off).items() if name in self.entered.parameters}
            try:
                found = self.find_with(schedule, arguments)
            except SettingsError as error:
                reasons.append(error.message)
                continue
            return self.find_guidance(self.find_batches(self.find_embedded_guidance(found)))
        raise SettingsError(reasons[0], self.refused("").hint)

    def find_with(self, schedule: NoiseSchedule, arguments: dict[str, Any]) -> Findings:
        """Study the pipeline with arguments by which guidance may be off."""
        self.encoded = [encode(self.entered, caption, self.shape, arguments) for caption in CAPTIONS]
        text = TextLayout.of(self.encoded, self.name)
        layout = self.find_layout(arguments)
        noise = random(layout.shape, 0)
        first, time = self.encoded[0], schedule.example()
        output: list[Any] = []

        def predict(given: dict[str, Any]) -> Any:
            output.append(self.module(**given))
            return output[-1]

        entry = self.run(first, noise, time, arguments, denoise=predict)
        if len(entry.calls) != 1:
            raise self.refused(f"it calls its denoiser {len(entry.calls)} times in one step")
        changed = self.run(first, noise + 1, time, arguments).calls[0]
        others = [self.run(each, noise, time, arguments).calls[0] for each in self.encoded[1:]]
        name = self.find_latents(tensors_of(entry.calls[0]), tensors_of(changed), noise)
        given = tensors_of(entry.calls[0])
        fixed = {
            each.partition("[")[0]
            for each, tensor in given.items()
            if tensor.is_floating_point()
            and all(is_same(tensor, tensors_of(other).get(each)) for other in (changed, *others))
        }
        outputs = Output.of(output[0], latents_among(entry.calls[0], name), self.name)
        return Findings(schedule, text, layout, arguments, name, frozenset(fixed), outputs)

    def run(
        self, text: Any, noise: Tensor, time: Tensor, arguments: dict[str, Any], denoise: Any = None, count: int = 1
    ) -> PipelineRun:
        """Make one prediction; without `denoise` its inputs alone are recorded."""
        entry = PipelineRun(text=text, noise=noise.to(self.entered.device), time=time.to(self.entered.device))
        entry.denoise = denoise or stop
        with torch.no_grad():
            self.entered.run(entry, ["x"] * count, self.shape, **arguments)
        if not entry.calls:
            raise self.refused("it never calls its denoiser")
        if not entry.drawn:
            raise self.refused("it draws no noise by randn_tensor, so it could not be given noised latents")
        return entry

    def find_latents(self, given: dict[str, Tensor], changed: dict[str, Tensor], noise: Tensor) -> str:
        names = [name for name, tensor in given.items() if not is_same(tensor, changed.get(name))]
        kinds = {name.partition("[")[0] for name in names}
        if len(kinds) != 1:
            raise self.refused(f"{len(kinds)} inputs of its denoiser depend on the latents")
        count = sum(int((given[name] != changed[name]).sum()) for name in names)
        if count != noise.numel():
            raise self.refused(f"its denoiser is given {count} elements of latents, of which there are {noise.numel()}")
        return kinds.pop()

    def find_layout(self, arguments: dict[str, Any]) -> Layout:
        """Find the axes of the noise by drawing it at three sizes, and that the pipeline keeps to the sizes."""
        (frames, height, width), text = self.shape, self.encoded[0]
        shapes = (self.shape, Shape(frames, height, width * 2), Shape(frames, height * 2, width))
        square, wide, high = (noise_shape(self.entered, text, shape, arguments) for shape in shapes)
        columns, rows = changed_axes(square, wide), changed_axes(square, high)
        if len(columns) != 1 or len(rows) != 1 or wide[columns[0]] != 2 * square[columns[0]]:
            raise self.refused(
                f"it does not keep to the size it is asked for: it draws noise of shape {square} for {width}x{height} "
                f"px, and {wide} for {width * 2}x{height} px"
            )
        cell_px = width // square[columns[0]]
        if cell_px * square[columns[0]] != width or cell_px * square[rows[0]] != height:
            raise self.refused(f"it does not keep to the size it is asked for, {width}x{height} px")
        if square[0] != 1:
            raise self.refused(f"it draws noise of shape {square}, whose first axis is not the batch")
        return Layout(square[1:], rows[0] - 1, columns[0] - 1, cell_px)

    def find_embedded_guidance(self, found: Findings) -> Findings:
        """Take the setting for the guidance scale where it is an input, and the denoiser is still called once."""
        noise, time = random(found.layout.shape, 0), found.schedule.example()
        if "guidance_scale" not in self.entered.parameters:
            return found
        arguments = found.arguments | {"guidance_scale": self.guidance}
        plain, scaled = (
            tensors_of(self.run(None, noise, time, found.arguments | {"guidance_scale": scale}).calls[0])
            for scale in (found.arguments.get("guidance_scale", 1.0), 5.0)
        )
        differ = [name for name, tensor in plain.items() if not is_same(tensor, scaled.get(name))]
        is_input = bool(differ) and all(plain[name].shape == scaled[name].shape for name in differ if name in scaled)
        return replace(found, arguments=arguments, embeds_guidance=True) if is_input else found

    def find_batches(self, found: Findings) -> Findings:
        arguments, texts = found.arguments, [CAPTIONS[0]]
        one = encode(self.entered, texts, self.shape, arguments)
        axes, why = batch_axes(one, encode(self.entered, texts * 2, self.shape, arguments))
        return replace(found, axes=tuple(axes) if axes is not None else None, unbatched=why)

    def find_guidance(self, found: Findings) -> Findings:
        """Find which part of a guided run's text is of the prompt, and which of the negative prompt."""
        count, prompt, negative = len(found.text.names), CAPTIONS[0], CAPTIONS[2]
        own, other_prompt, other_negative = (
            tree_flatten(encode_guided(self.entered, *both, self.shape, found))
            for both in ((prompt, negative), (CAPTIONS[1], negative), (prompt, CAPTIONS[1]))
        )
        if not own[1] == other_prompt[1] == other_negative[1]:
            return replace(found, unguided="its text has no fixed structure")
        changed = [
            {number for number, (a, b) in enumerate(zip(own[0], other[0], strict=True)) if not all_equal((a, b))}
            for other in (other_prompt, other_negative)
        ]
        positive, negated = (tuple(sorted(each)) for each in changed)
        # A pipeline without negative prompts (FLUX.2 klein) guides away from a text of its own.
        expected = count if "negative_prompt" in self.entered.parameters else 0
        if len(positive) != count or len(negated) != expected or {*positive} & {*negated}:
            return replace(found, unguided="its text for guidance is not that of two captions")
        return replace(found, guidance=GuidedText(own[1], tuple(own[0]), positive, negated))


def stop(given: dict[str, Any]) -> Any:
    raise Ended


def encode(entered: EnteredPipeline, captions: str | list[str], shape: Shape, arguments: dict[str, Any]) -> list[Any]:
    """Return what each call of encode_prompt returns for captions."""
    entry = PipelineRun(stop_at_noise=True, time=torch.zeros(1, device=entered.device), denoise=stop)
    with torch.no_grad():
        entered.run(entry, [captions] if isinstance(captions, str) else captions, shape, **arguments)
    if not entry.encoded:
        raise refused(entered.cls.__name__, "it draws noise before it calls encode_prompt, or never calls it")
    return entry.encoded


def encode_guided(
    entered: EnteredPipeline, prompt: str, negative: str | None, shape: Shape, found: Findings
) -> list[Any]:
    """Return what each call of encode_prompt returns for a prompt and a negative one, with guidance on."""
    entry = PipelineRun(stop_at_noise=True, time=torch.zeros(1, device=entered.device), denoise=stop)
    given = {} if negative is None else {"negative_prompt": [negative]}
    with torch.no_grad():
        entered.run(entry, [prompt], shape, True, **guided_arguments(found, GUIDED), **given)
    return entry.encoded


def guided_arguments(found: Findings, scale: float) -> dict[str, Any]:
    """Return the arguments of a run with guidance, whose scale is 1 for none, as in most pipelines."""
    scale -= found.arguments.get("guidance_scale", 1.0) == 0  # Krea 2 and Z-Image count from 0
    return found.arguments | {"guidance_scale": scale, "true_cfg_scale": scale}


def noise_shape(entered: EnteredPipeline, text: Any, shape: Shape, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the noise that a pipeline draws for an image of a shape in px."""
    entry = PipelineRun(text=text, stop_at_noise=True, time=torch.zeros(1, device=entered.device), denoise=stop)
    with torch.no_grad():
        entered.run(entry, ["x"], shape, **arguments)
    if not entry.drawn:
        raise refused(entered.cls.__name__, "it draws no noise by randn_tensor, so it cannot be given noised latents")
    return entry.drawn[0]


def random(shape: Sequence[int], seed: int, count: int = 1) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def changed_axes(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]


def is_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and same(one, other)
