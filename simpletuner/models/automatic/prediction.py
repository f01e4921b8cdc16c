"""Predictions, VAE latents and sampled images by a studied pipeline.

For guidance, the embeddings of the prompt and of the negative prompt are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.findings import Findings, GuidedText, latents_among
from simpletuner.models.automatic.hooks import HookedPipeline, image_argument
from simpletuner.models.automatic.pipeline_run import PipelineRun, StopCall, refused
from simpletuner.models.automatic.replay import CallReplay, Denoise, NotTraced, form_of
from simpletuner.models.automatic.text import LENGTHS, all_equal, collate_texts
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.private_api.of_torch import tree_flatten
from simpletuner.settings.values.shape import Shape

# Base of element indices in a pipeline: two numbers below it survive float32 and scales.
DIGIT = 1024


class Stepped(tuple[Tensor]):
    """Output of a scheduler's `step`, as a tuple and by its name."""

    @property
    def prev_sample(self) -> Tensor:
        return self[0]


@dataclass(frozen=True)
class VaeMap:
    """Latents for the VAE: element k is `scale[k] * denoiser's[where[k]] + shift[k]`."""

    shape: tuple[int, ...]
    """Shape of the VAE's input, without batch."""
    where: Tensor
    scale: Tensor
    shift: Tensor

    def apply(self, latents: Tensor) -> Tensor:
        """Convert denoiser latents (B, ...) to the VAE's, float32."""
        flat = latents.flatten(1).double()
        flat = (flat if self.is_same_order else flat[:, self.where]) * self.scale + self.shift
        return flat.view(-1, *self.shape).float()

    @cached_property
    def is_same_order(self) -> bool:
        return torch.equal(self.where, torch.arange(len(self.where), device=self.where.device))

    def of_first_frame(self, axes: tuple[int, ...], frames: int) -> VaeMap:
        """Return the map of one latent frame alone, as clips with latents of these axes have it first."""
        numbers = torch.arange(math.prod(axes), device=self.where.device).view(axes).narrow(frames, 0, 1).flatten()
        place = torch.empty(math.prod(axes), dtype=torch.long, device=numbers.device)
        place[numbers] = torch.arange(len(numbers), device=numbers.device)
        where, scale, shift = (each.view(self.shape)[:, :1] for each in (self.where, self.scale, self.shift))
        return VaeMap(tuple(where.shape), place[where.flatten()], scale.flatten(), shift.flatten())


@dataclass(frozen=True)
class PipelineCall:
    """Arguments of one call of a pipeline: noised latents, times, latents of images, leaves of texts."""

    tensors: Sequence[Tensor]
    images: int
    """Number of images among the tensors, from the third on."""
    leaves: Sequence[Any]
    """Leaves of texts that are the same for all captions, None for the others."""
    together: bool = False
    """True for samples that share a denoiser call, in the tensors' first axis, before those of a call."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.together, self.images, *map(form_of, self.tensors)


# Shapes whose traces a predictor keeps: of texts of any length there may be thousands.
MOST_REPLAYS = 256


@dataclass
class Predictor:
    """Predictions by one pipeline on one device. Latents are in the shape of the noise that it draws."""

    hooked: HookedPipeline
    found: Findings
    images: dict[Shape, Image.Image] = field(default_factory=dict)
    orders: dict[tuple[int, ...], tuple[Tensor | None, Tensor, bool]] = field(default_factory=dict)
    maps: dict[tuple[int, ...], VaeMap] = field(default_factory=dict)
    first_maps: dict[tuple[int, ...], VaeMap] = field(default_factory=dict)
    replays: dict[tuple[object, ...], CallReplay | None] = field(default_factory=dict)

    def predict(
        self,
        denoise: Denoise,
        noised: Tensor,
        timesteps: Tensor,
        text: Conditioning,
        given: Sequence[Tensor] = (),
    ) -> Tensor:
        """Predict the target for noised latents (B, ...), float32; `text` is what was recorded of captions.

        `given` are latents (B, ...) of references or a first frame, as the denoiser sees samples'.
        """
        found, axes, count = self.found, tuple(noised.shape[1:]), len(noised)
        lengths = text[LENGTHS].tolist()
        if found.joins and count > 1 and lengths.count(lengths[0]) == count:
            noises, times, *images = (each[:, None] for each in (noised, timesteps, *given))
            call = self.call_of(noises, times, found.text.leaves(text, None), images, together=True)
            if replay := self.replay(call):
                return self.target(replay.predict(denoise, call.tensors), axes)
        texts = [found.text.leaves(text, sample) for sample in range(count)]
        if count == 1 or found.axes is not None:
            leaves = texts[0] if found.axes is None else collate_texts(found.axes, texts)
            return self.predict_by(denoise, [self.call_of(noised, timesteps, leaves, given)])
        parts = zip(*(each.split(1) for each in given), strict=True) if given else [()] * count
        each = zip(noised.split(1), timesteps.split(1), texts, parts, strict=True)
        return self.predict_by(denoise, [self.call_of(*one) for one in each])

    def call_of(
        self,
        noised: Tensor,
        timesteps: Tensor,
        leaves: Sequence[Any],
        given: Sequence[Tensor],
        together: bool = False,
    ) -> PipelineCall:
        time = self.found.schedule.time(timesteps).to(noised.device)
        names = self.found.text.names
        tensors = [noised, time, *given, *(leaves[number] for number in names)]
        others = [None if number in names else each for number, each in enumerate(leaves)]
        return PipelineCall(tensors, len(given), others, together)

    def predict_by(self, denoise: Denoise, calls: Sequence[PipelineCall]) -> Tensor:
        axes = tuple(calls[0].tensors[0].shape[1:])
        replays = [self.replay(each) for each in calls] if self.found.replays else [None] * len(calls)
        each = [self.replayed(call, replay, denoise) for call, replay in zip(calls, replays, strict=True)]
        return self.target(torch.cat(each) if len(each) > 1 else each[0], axes)

    def target(self, prediction: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return the objective's target (B, ...) that a scheduler's `step` would get as this prediction."""
        target = self.from_step(prediction, axes)
        return target if self.found.sign > 0 else -target

    def replayed(self, call: PipelineCall, replay: CallReplay | None, denoise: Denoise) -> Tensor:
        if replay is not None:
            return replay.predict(denoise, call.tensors)
        prediction = self.run_call(call, call.tensors, denoise)
        if prediction is None:
            raise self.no_step()
        return prediction

    def replay(self, call: PipelineCall) -> CallReplay | None:
        """Return the trace of calls of these shapes, None if there is none.

        It is made before the first of them, so that a run which goes on from a checkpoint computes a step as one that
        began earlier does: samples that share a call of the denoiser differ in the last bits from each alone.
        """
        key = call.key
        if key not in self.replays:
            if len(self.replays) >= MOST_REPLAYS:
                del self.replays[next(iter(self.replays))]
            self.replays[key] = None
            one = [each[0] for each in call.tensors] if call.together else call.tensors
            with torch.no_grad():  # images are prepared, and orders found, which a trace cannot
                self.run_call(call, one, self.blank)
            own = replace(call, tensors=[])
            with suppress(NotTraced):
                self.replays[key] = CallReplay(
                    lambda given, denoise: self.run_call(own, given, denoise), call.tensors, call.together
                )
        return self.replays[key]

    def run_call(self, call: PipelineCall, given: Sequence[Tensor], denoise: Denoise) -> Tensor | None:
        """Return what the scheduler's `step` gets as the prediction; None if `denoise` ended the call."""
        found, (noised, time, *others) = self.found, given
        images, leaves = others[: call.images], list(call.leaves)
        for number, each in zip(found.text.names, others[call.images :], strict=True):
            leaves[number] = each
        run = PipelineRun(text=found.text.build(leaves), noise=noised, time=time, denoise=denoise)
        shape, axes = found.layout.in_px(noised.shape[1:]), tuple(noised.shape[1:])
        run.latents = [self.vae_latents(each.float(), axes) for each in images]
        sizes = found.images.sizes(shape) if found.images and found.images.is_first_frame else None
        sizes = sizes or [found.layout.in_px(each.shape[1:]) for each in images]
        placeholders = self.placeholders(sizes[: len(images)])
        self.hooked.run(run, ["x"] * len(noised), shape, **found.arguments, **placeholders)
        if run.handed is None:
            return None
        prediction, sample = run.handed
        if prediction.shape != sample.shape or len(run.calls) != 1:
            raise refused(
                self.hooked.cls.__name__,
                f"its scheduler gets a prediction {tuple(prediction.shape)} for latents {tuple(sample.shape)}",
            )
        return prediction

    def vae_latents(self, given: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Convert latents (B, ...) of a given image to the VAE's own; `axes` are those of sample latents."""
        frames = self.found.layout.frames
        if given.ndim != len(axes) + 1 or tuple(given.shape[1:]) == axes or frames is None:
            return self.to_vae(given)
        if axes not in self.first_maps:
            self.first_maps[axes] = self.vae_map(self.found.layout.in_px(axes)).of_first_frame(axes, frames)
        return self.first_maps[axes].apply(given)

    def placeholders(self, sizes: Sequence[Shape]) -> dict[str, Any]:
        """Argument of a call for images of these shapes in px, whose latents are replayed."""
        for each in sizes:
            if each not in self.images:
                self.images[each] = Image.new("RGB", each.size)
        return image_argument([self.images[each] for each in sizes])

    def arguments(self, shape: Shape) -> dict[str, Any]:
        """Arguments of a call for a sample of a shape in px whose images do not matter."""
        found = self.found
        return found.arguments | (self.placeholders(found.images.sizes(shape)) if found.images else {})

    def from_step(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reorder what the scheduler's `step` gets (B, ...) as the noise is drawn; a first frame that it does
        not get is zero, and one that is not of the noise means nothing.
        """
        taken, where, is_same = self.order(shape, values.device)
        if is_same:
            return values.reshape(-1, *shape)
        flat, count = values.reshape(len(values), -1), math.prod(shape)
        flat = flat if taken is None else flat[:, taken]
        empty = flat.new_zeros if count > flat.shape[1] else flat.new_empty
        return empty(len(flat), count).index_copy(1, where, flat).view(-1, *shape)

    def to_step(self, latents: Tensor, like: Tensor) -> Tensor:
        """Reorder latents as the scheduler's `step` gets them; a given first frame is that of `like`."""
        taken, where, _ = self.order(tuple(latents.shape[1:]), like.device)
        values = latents.flatten(1).to(like.device)[:, where]
        if taken is None:
            return values.view(like.shape)
        return like.flatten(1).to(values.dtype).index_copy(1, taken, values).view(like.shape)

    def order(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor, bool]:
        """Return places in the noise of the elements that the scheduler's `step` gets; before them which of
        these are of the noise, None for all; and whether each is in its own place.
        """
        if shape not in self.orders:
            low, high = (self._stepped(noise) for noise in digits(shape, device))
            taken = None
            if self.found.images is not None and self.found.images.replaces_noise:
                changed = self._stepped(torch.ones(1, *shape, device=device)) != self._stepped(
                    torch.zeros(1, *shape, device=device)
                )
                taken = None if changed.all() else changed.nonzero().flatten()
            where = places_of(*(each if taken is None else each[taken] for each in (low, high)))
            own = torch.arange(len(low), device=device) if taken is None else taken
            is_same = len(low) == math.prod(shape) and torch.equal(where, own)
            self.orders[shape] = taken, self._checked(where, shape), is_same
        taken, where, is_same = self.orders[shape]
        return None if taken is None else taken.to(device), where.to(device), is_same

    def _stepped(self, noise: Tensor) -> Tensor:
        """Return the latents that the scheduler's `step` gets for noise (1, ...), flat."""
        handed = self._blank(noise).handed
        assert handed is not None
        return handed[1].flatten()

    def vae_map(self, shape: Shape) -> VaeMap:
        """Map from latents to the VAE's input, for an image of a shape in px."""
        axes, device = self.found.layout.axes_for(shape), self.hooked.device
        if axes not in self.maps:
            zeros, ones = torch.zeros(1, *axes, device=device), torch.ones(1, *axes, device=device)
            shift, unit, low, high = (self.for_vae(noise) for noise in (zeros, ones, *digits(axes, device)))
            scale = unit - shift
            where = places_of(*((each - shift) / scale for each in (low, high)))
            if self.found.images is not None and self.found.images.replaces_noise:
                self._fill_first_frame(where, scale, shift, axes)
            where = self._checked(where.flatten(), axes)
            if len(where) != math.prod(axes):
                raise refused(self.hooked.cls.__name__, f"its VAE is given {len(where)} elements of latents, not all")
            self.maps[axes] = VaeMap(tuple(shift.shape[1:]), where, scale.flatten(), shift.flatten())
        return self.maps[axes]

    def _fill_first_frame(self, where: Tensor, scale: Tensor, shift: Tensor, axes: tuple[int, ...]) -> None:
        """Write the map of the second latent frame (1, C, F, H, W) into the first, which is no noise."""
        frames = self.found.layout.frames
        if frames is None or axes[frames] < 2 or where.ndim != 5:
            raise refused(self.hooked.cls.__name__, "a first frame has none after it to tell its latents by")
        for each in (where, scale, shift):
            each[:, :, 0] = each[:, :, 1]
        where[:, :, 0] -= math.prod(axes[frames + 1 :])

    @torch.no_grad()
    def for_vae(self, latents: Tensor) -> Tensor:
        """Input of `vae.decode` for the latents (1, ...) at the end of a pipeline's loop."""
        seen: list[Tensor] = []
        run = self._blank(latents, lambda _, sample: Stepped((sample,)), capture(seen))
        if not seen or run.handed is None:
            raise refused(self.hooked.cls.__name__, "it does not decode by `vae.decode`")
        return seen[0].double()

    def from_vae(self, latents: Tensor, shape: Shape) -> Tensor:
        """Convert VAE latents (B, ...) to denoiser latents, float32."""
        known = self.vae_map(shape)
        flat = (latents.flatten(1).double() - known.shift) / known.scale
        axes = self.found.layout.axes_for(shape)
        return flat.new_empty(flat.shape).index_copy(1, known.where, flat).view(-1, *axes).float()

    def to_vae(self, latents: Tensor) -> Tensor:
        """Convert denoiser latents (B, ...) to VAE latents, float32."""
        return self.vae_map(self.found.layout.in_px(latents.shape[1:])).apply(latents)

    def blank(self, given: Mapping[str, object]) -> Any:
        """Return an output of the denoiser that is zero."""
        return self.found.outputs.make(latents_among(given, self.found.latents_input))

    @torch.no_grad()
    def _blank(self, noise: Tensor, at_step: object = None, decode: object = None) -> PipelineRun:
        found, device = self.found, self.hooked.device
        time, text = found.schedule.example().to(device), found.text.example(device)
        run = PipelineRun(text=text, noise=noise, time=time, denoise=self.blank, at_step=at_step, decode=decode)
        output = {"output_type": "latent" if decode is None else "pt"}
        shape = found.layout.in_px(noise.shape[1:])
        self.hooked.run(run, ["x"], shape, **self.arguments(shape), **output)
        self._handed(run)
        return run

    def _handed(self, run: PipelineRun) -> tuple[Tensor, Tensor]:
        if run.handed is None:
            raise self.no_step()
        return run.handed

    def no_step(self) -> SettingsError:
        return refused(self.hooked.cls.__name__, "it never calls its scheduler's `step`")

    def _checked(self, where: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return places (N) in latents of a shape, if they are all of them once, but for a given frame."""
        count, (images, frames) = math.prod(shape), (self.found.images, self.found.layout.frames)
        wanted = torch.arange(count, device=where.device).view(shape)
        if len(where) < count and images is not None and images.replaces_noise and frames is not None:
            wanted = wanted.narrow(frames, 1, shape[frames] - 1)
        if not torch.equal(where.sort().values, wanted.flatten().sort().values):
            raise refused(
                self.hooked.cls.__name__, f"of {count} elements of latents {len(where)} come out, or are mixed"
            )
        return where


def places_of(low: Tensor, high: Tensor) -> Tensor:
    # A digit that is not finite becomes any integer.
    return (low.double().round() + DIGIT * high.double().round()).long()


def digits(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of all elements as two digits, (1, ...) each."""
    index = torch.arange(torch.Size(shape).numel(), device=device).view(1, *shape)
    return (index % DIGIT).float(), (index // DIGIT).float()


def capture(seen: list[Tensor]) -> Callable[[Tensor], object]:
    def decode(latents: Tensor) -> Any:
        seen.append(latents)
        raise StopCall

    return decode


GUIDED = 5.0
"""A scale above which every pipeline guides."""


def guided_arguments(found: Findings, scale: float) -> dict[str, Any]:
    """Return the arguments of a run with guidance, whose scale is 1 for none, as in most pipelines."""
    scale -= found.arguments.get("guidance_scale", 1.0) == 0  # Krea 2 and Z-Image count from 0
    return found.arguments | {"guidance_scale": scale, "true_cfg_scale": scale}


def encode_guided(
    hooked: HookedPipeline,
    prompt: str,
    negative: str | None,
    shape: Shape,
    found: Findings,
    images: Sequence[Image.Image] = (),
) -> Any:
    """Leaves of the text for a prompt and a negative one, with guidance on, and their structure."""
    given = image_argument(images) | ({} if negative is None else {"negative_prompt": [negative]})
    return tree_flatten(hooked.encode([prompt], shape, guided=True, **guided_arguments(found, GUIDED), **given))


def find_guided_text(
    hooked: HookedPipeline,
    shape: Shape,
    found: Findings,
    captions: Sequence[str],
    images: Sequence[Sequence[Image.Image]] = ((), ()),
) -> Findings:
    """Find, by three captions and others of the given images, the embeddings of a guided run: those of the
    prompt, of the negative prompt, and of the images alone.
    """
    text = found.text
    prompt, other, negative = captions
    pairs = ((prompt, negative), (other, negative), (prompt, other))
    own, *others = (encode_guided(hooked, *both, shape, found, images[0]) for both in pairs)
    others += [encode_guided(hooked, prompt, negative, shape, found, images[1])] if images[1] else []
    if any(each[1] != own[1] for each in others):
        return replace(found, unguided="its text has no fixed structure")
    changed = [
        {number for number, (a, b) in enumerate(zip(own[0], other[0], strict=True)) if not all_equal((a, b))}
        for other in others
    ]
    positive, negated = (tuple(sorted(each)) for each in changed[:2])
    seen = tuple(sorted(changed[2] - {*positive, *negated})) if images[1] else ()
    count = len(text.names) - len(text.of_images)
    # A pipeline without negative prompts (FLUX.2 klein) guides away from a text of its own.
    expected = count if "negative_prompt" in hooked.parameters else 0
    is_other = len(seen) != len(text.of_images)
    if len(positive) != count or len(negated) != expected or {*positive} & {*negated} or is_other:
        return replace(found, unguided="its text for guidance is not that of two captions")
    return replace(found, guidance=GuidedText(own[1], tuple(own[0]), positive, negated, seen))


def encode_no_caption(
    hooked: HookedPipeline,
    guidance: GuidedText,
    shape: Shape,
    found: Findings,
    images: Sequence[Image.Image] = (),
) -> list[Tensor]:
    """Text of no negative prompt where a pipeline takes zeros for it (SDXL), else of an empty one.

    Its leaves are those of a caption, in their order.
    """
    chosen: list[Tensor] = []
    for negative in (None, ""):
        leaves, structure = encode_guided(hooked, "a photo", negative, shape, found, images)
        given = guidance.as_caption(leaves, found.text) if structure == guidance.structure else []
        # Blocks of SD3 return None for no negative prompt.
        chosen = given if all(isinstance(leaf, Tensor) for leaf in given) else []
        if negative is None and chosen and not any(leaf.any() for leaf in chosen if leaf.is_floating_point()):
            break
    return chosen
