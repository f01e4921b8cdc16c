"""Images that were asked for while a run trains (`sample_requests.py`), sampled between two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import safetensors.torch
import torch
from PIL.Image import Image, fromarray
from safetensors import SafetensorError
from torch import Tensor, nn

from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.errors import reason_of_os
from simpletuner.models.catalog.support import unfit_shapes
from simpletuner.models.family.adapter import ADAPTER, adapted_layers
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.gpu import return_memory
from simpletuner.preparation.plan import samples_by_shape
from simpletuner.preparation.prepare import Prepared
from simpletuner.preparation.sampled_prompts import Images, SampledPrompt
from simpletuner.runs.images import write_sample
from simpletuner.session import Session
from simpletuner.settings.values.shape import Shape
from simpletuner.system.numbers import count_noun
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.validation.sample_requests import (
    IN_METADATA,
    SAMPLES,
    SampleAnswer,
    SampleRequest,
    answer,
    left_over,
    parse_request,
    take,
    waiting,
)
from simpletuner.training.validation.validator import PlannedImage, Validator, open_validator

TIMES_AS_LARGE = 4
"""Pixels of all frames in a request, as a multiple of the largest that the run trains on or samples."""
MOST_TOKENS = 4096


@dataclass(frozen=True)
class RequestedSamples:
    """Answers requests on all ranks, which sample the same image: the first one writes it."""

    session: Session
    family: ModelFamily
    state: TrainingState
    prepared: Prepared

    @cached_property
    def validator(self) -> Validator:
        # Made at the first request: it holds a VAE, in host memory.
        return open_validator(self.session, self.family, self.state, self.prepared, None)

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        """Answer the request that waits longest, if there is one. Collective; no request ends the run."""
        world, output = self.session.world, self.session.settings.training.output_dir
        name, content, found = "", b"", SampleAnswer(step=step, refused="the run was stopped", hint="ask again")
        if world.is_first:
            for killed in left_over(output):
                self.answer(killed, replace(found, refused="the run ended while it answered"))
            if names := waiting(output):
                name = names[0]
                try:
                    content = take(output, name)
                    self.check(*parse(content))
                except ValueError as error:
                    content, found = b"", replace(found, refused=str(error), hint=HINT)
        try:
            if content := world.share_bytes(content):
                found = self.sample(name, step, *parse(content), advance)
        finally:
            if world.is_first and name:
                self.answer(name, found)

    def answer(self, name: str, found: SampleAnswer) -> None:
        # A disk that is full by now is said, and training goes on.
        try:
            answer(self.session.settings.training.output_dir, name, found)
        except OSError as error:
            self.session.report.warn(f"cannot answer a request for an image: {reason_of_os(error)}")

    def check(self, request: SampleRequest, tensors: Mapping[str, Conditioning], references: Images) -> None:
        """Raise ValueError for what the denoiser cannot take, which would fail within a collective."""
        settings, family = self.session.settings, self.family
        if "base" in request.weights and not family.adapter:
            raise ValueError("a run of all weights has no base model at hand: sample it after the run")
        if "ema" in request.weights and self.state.ema is None:
            raise ValueError("the run keeps no EMA")
        if request.strength != 1 and not family.adapter:
            raise ValueError("a strength is for a LoRA")
        check_references(family, len(references))
        shape = Shape(request.frames, request.height, request.width)
        for own in (shape, *(Shape(1, each.height, each.width) for each in references)):
            for mistake in unfit_shapes("the size", str(own), "validation_resolution", settings.model):
                raise ValueError(mistake.message)
        family.check_proven(shape, len(references))
        shapes = [each.target for each in samples_by_shape(self.prepared.plan)]
        most = max(each.frames * each.area for each in [*shapes, *(each.shape for each in self.prepared.validation)])
        asked = [shape.frames * shape.area, *(each.width * each.height for each in references)]
        if max(asked) > TIMES_AS_LARGE * most:
            raise ValueError(f"{shape} has more than {TIMES_AS_LARGE} times the pixels that the run trains on")
        if shape.frames > 1 and not any(each.frames > 1 for each in shapes):
            raise ValueError("the run trains on images alone: sample a clip after the run")
        expected = self.prepared.reader.no_caption(self.prepared.plan.samples[0])
        for sign, own in tensors.items():
            check_as(sign, own, expected, family.has_any_text_length)

    def sample(
        self,
        name: str,
        step: int,
        request: SampleRequest,
        tensors: Mapping[str, Conditioning],
        references: Images,
        advance: Callable[[int], None],
    ) -> SampleAnswer:
        """Sample with each set of weights. Collective; lack of memory or disk is an answer."""
        output = self.session.settings.training.output_dir
        validator = replace(self.validator, images=[planned(request, tensors, references)])
        images, refused = list[str](), ""
        try:
            for weights in request.weights:
                with scaled(self.state.engine.module, request.strength):
                    for each, pixels, sound in validator.pixels(weights, advance):
                        path = output / SAMPLES / f"{name}-{weights}.png"
                        path.parent.mkdir(exist_ok=True)
                        write_sample(path, pixels, each.info(weights, step), sound)
                        images.append(f"{SAMPLES}/{path.name}")
        except torch.OutOfMemoryError:
            return_memory(self.session.world.device)
            refused = "the GPU has too little memory for this size beside the training"
        except OSError as error:
            refused = f"cannot write the image: {reason_of_os(error)}"
        if refused := max(self.session.world.gather_texts(refused)):
            return SampleAnswer(step=step, refused=refused, hint="ask for a smaller --size, or after the run")
        return SampleAnswer(tuple(images), step)


HINT = "`simpletuner sample --help` says what is taken"


def check_references(family: ModelFamily, count: int) -> None:
    """Raise ValueError for too many references, and for none where the pipeline samples from some."""
    least, most = family.images_of_sample
    if count > most:
        takes = f"at most {most}" if most else "none"
        raise ValueError(f"{count_noun(count, 'reference image')}, and {family.pipeline_name} takes {takes}")
    if count < least:
        raise ValueError(f"{family.pipeline_name} samples from an image, and none is given")


def check_as(sign: str, tensors: Conditioning, expected: Conditioning, is_of_any_length: bool) -> None:
    """Raise ValueError unless tensors match others by name, and by size but for one count of tokens."""
    if tensors.keys() != expected.keys():
        raise ValueError(f"{sign} has {', '.join(tensors) or 'nothing'}, and this model takes {', '.join(expected)}")
    lengths = set[int]()
    for name, each in tensors.items():
        own, other = tuple(each.shape), tuple(expected[name].shape)
        differing = [place for place, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]]
        is_vector = each.is_floating_point() and differing == [each.ndim - 1] and "mask" not in name
        is_fit = len(own) == len(other) and each.is_floating_point() == expected[name].is_floating_point()
        if not is_fit or len(differing) > is_of_any_length or is_vector:
            raise ValueError(f"{sign} has {name} of {list(own)}, which is not of this model")
        lengths |= {own[place] for place in differing}
    if len(lengths) > 1 or not all(0 < each <= MOST_TOKENS for each in lengths):
        raise ValueError(f"{sign} has texts of {sorted(lengths)} tokens")


def parse(content: bytes) -> tuple[SampleRequest, dict[str, Conditioning], Images]:
    """Return a request, its encoded prompts, `positive` and `negative`, and its references.

    Raises ValueError for anything else.
    """
    try:
        tensors = safetensors.torch.load(content)
        length = int.from_bytes(content[:8], "little")
        metadata = safetensors_metadata(content[8 : 8 + length])
    except (SafetensorError, ValueError, RecursionError, KeyError) as error:
        raise ValueError(f"the request is no safetensors file: {str(error).splitlines()[0]}") from None
    found: dict[str, Conditioning] = {"positive": {}, "negative": {}, REFERENCE: {}}
    for name, tensor in tensors.items():
        sign, _, own = name.partition(".")
        if sign not in found:
            raise ValueError(f"the request has a tensor {name[:60]}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{name[:60]} has NaN or infinite values")
        found[sign][own] = tensor
    references = found.pop(REFERENCE)
    return parse_request(metadata), found, tuple(image_of(references[name]) for name in sorted(references, key=int_of))


REFERENCE = "reference"
"""First part of the names of references in a request: `reference.0` and on, uint8 (height, width, 3)."""


def int_of(name: str) -> int:
    return int(name) if name.isdecimal() and len(name) < 3 else -1


def image_of(pixels: Tensor) -> Image:
    """Raise ValueError for what are no pixels."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.numel():
        raise ValueError(f"a reference is no image: {pixels.dtype} of {list(pixels.shape)}")
    return fromarray(pixels.numpy())


def safetensors_metadata(header: bytes) -> str:
    text = json.loads(header).get("__metadata__", {}).get(IN_METADATA, "")
    if not isinstance(text, str):
        raise ValueError("its metadata are no text")
    return text


def planned(request: SampleRequest, tensors: Mapping[str, Conditioning], references: Images = ()) -> PlannedImage:
    shape = Shape(request.frames, request.height, request.width)
    prompt = SampledPrompt(
        0, "0", ValidationPrompt(prompt=request.prompt), request.negative_prompt, shape, references, **tensors
    )
    sampling = SamplingParams(shape, request.steps, request.guidance, request.seed, request.fps, references)
    return PlannedImage(prompt, sampling)


@contextmanager
def scaled(model: nn.Module, strength: float) -> Iterator[None]:
    """Scale a LoRA within the block."""
    layers = [layer for layer in adapted_layers(model) if hasattr(layer, "scaling")] if strength != 1 else []
    before = [layer.scaling[ADAPTER] for layer in layers]
    for layer, scaling in zip(layers, before, strict=True):
        layer.scaling[ADAPTER] = scaling * strength
    try:
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling[ADAPTER] = scaling
