"""What a model family is: a few answers of its own (Traits), and all that is the same for every pipeline of diffusers.

Exactly these questions, because nothing else in the program may depend on a family: which pipeline encodes text and
draws, what the denoiser is trained towards, what it is shown, and what it is told besides latents, text and time.
`docs/families.md` shows how to add one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Geometry, Size
from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.diffusers_io import (
    TEXT_PARTS,
    build_on_meta,
    class_named,
    class_of_diffusers,
    inputs_cast,
    refuse_second_denoiser,
    require_packages,
)
from simpletuner.models.malformed import CHECK_COPY, read_config, read_json, reason
from simpletuner.models.objectives import Objective, exactly
from simpletuner.models.vae import Vae
from simpletuner.settings.sections import Settings

Conditioning = dict[str, Tensor]
"""What a denoiser is given besides latents and time, under the names that its pipeline uses (`prompt_embeds`, ...);
the first axis is the batch. Texts of different lengths are padded with zeros, so a mask must be among them."""


@dataclass(frozen=True)
class SamplingParams:
    """How one picture is drawn: size in px, number of denoising steps, guidance scale, seed."""

    size: Size
    steps: int
    guidance: float
    seed: int

    def arguments(self) -> dict[str, Any]:
        """Return what every pipeline of diffusers is told; it answers with latents."""
        return {
            "width": self.size[0],
            "height": self.size[1],
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "generator": torch.Generator().manual_seed(self.seed),
            "output_type": "latent",
        }


def with_guidance(positive: Conditioning, negative: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what a pipeline with a guidance scale and negative prompts is told."""
    embedded = {f"negative_{name}": value for name, value in negative.items()}
    if negative:
        embedded["negative_prompt"] = None  # some pipelines have one by default, and refuse it beside embeddings
    return {**positive, **embedded, **sampling.arguments()}


def of_one_frame(positive: Conditioning, negative: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what a pipeline is told that draws films: guidance as usual, and one frame."""
    return with_guidance(positive, negative, sampling) | {"num_frames": 1}


def without_negative(positive: Conditioning, _: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what a pipeline is told whose guidance is embedded."""
    return {**positive, **sampling.arguments()}


def empty_caption(_: Family, empty: Conditioning) -> Conditioning:
    """Return the empty caption's encoding: it stands for `no caption`."""
    return empty


def nothing_told(_: Family, __: Geometry) -> Conditioning:
    """Return no conditioning."""
    return {}


def none_idle(_: Family) -> tuple[str, ...]:
    """Return that every weight counts."""
    return ()


def latents_as_drawn(latents: Tensor, _: Size) -> Tensor:
    """Return latents that a pipeline answers as BCHW already."""
    return latents


@dataclass(frozen=True)
class Traits:
    """What differs from family to family. Functions are given the opened Family first.

    `pipelines` are diffusers' classes for it; the one that a folder names is taken, else the first.
    """

    pipelines: tuple[str, ...]
    objective: Callable[[Family], Objective]
    encode: Callable[[Family, Any, list[str]], Conditioning]
    """(family, pipeline with text encoders only, captions) -> what each caption gives, by `encode_prompt`."""
    predict: Callable[[Family, nn.Module, Tensor, Tensor, Conditioning], Tensor]
    """(family, denoiser, noisy BCHW, timesteps B, conditioning) -> the answer as BCHW, the denoiser being called just
    as the pipeline calls it. Noisy latents set the dtype; timesteps are those of the objective."""
    build_tiny: Callable[[], Any] | None = None
    """() -> a complete pipeline in miniature, with random weights, for the flavour `tiny`."""
    denoiser_name: str = "transformer"
    """The denoiser in the pipeline, and its folder: `unet` or `transformer`."""
    max_length: Callable[[Family], int] | None = None
    """Longest prompt in tokens, where the user may choose it."""
    unconditional: Callable[[Family, Conditioning], Conditioning] = empty_caption
    """(family, the empty caption's encoding) -> what stands for `no caption`."""
    picture_conditioning: Callable[[Family, Geometry], Conditioning] = nothing_told
    """What the denoiser is told about one picture's size and crop; no batch axis."""
    draw_arguments: Callable[[Conditioning, Conditioning, SamplingParams], dict[str, Any]] = with_guidance
    """(positive, negative, sampling) -> keyword arguments of the pipeline."""
    drawn_latents: Callable[[Tensor, Size], Tensor] = latents_as_drawn
    """(what the pipeline answers, latents' (height, width)) -> latents BCHW as the VAE made them."""
    idle: Callable[[Family], tuple[str, ...]] = none_idle
    """How the names of weights begin that no answer depends on: they get no gradient, so they stay as published."""
    level_in_bf16: Callable[[Tensor], Tensor] = exactly
    """noise levels -> those that a flow's denoiser reads from them where it casts its time to bf16."""
    draws_for_vae: bool = False
    """Whether the pipeline answers latents as its VAE decodes them, not as its denoiser sees them."""
    siblings: tuple[Traits, ...] = ()
    """The traits of the family's other pipelines, taken where a folder names one of those."""

    def of(self, pipeline: str) -> Traits:
        """Return the traits of one of the family's pipelines; these for a class that none of them names."""
        return next((each for each in self.siblings if pipeline in each.pipelines), self)


class TextEncoder:
    """Captions to tensors, by the pipeline's own `encode_prompt`."""

    def __init__(self, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        self.family = family
        self.pipeline = family.pipeline(vae=None, dtype=dtype, with_text=True).to(device)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Conditioning:
        """Return what each caption gives, on the CPU; the first axis is the caption.

        Raises EnvironmentFault for what a tokenizer's damaged numbers lead to, such as a length of 1e20 tokens.
        """
        try:
            encoded = self.family.traits.encode(self.family, self.pipeline, list(captions))
        except (ArithmeticError, LookupError, ValueError) as error:
            why = f"the text encoders of {self.family.folder} cannot encode: {reason(error)}"
            raise EnvironmentNotReady(why, CHECK_COPY) from error
        return {name: value.cpu() for name, value in encoded.items()}


class Family:
    """A model family, opened from one pipeline folder in diffusers format."""

    def __init__(self, traits: Traits, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.index = read_json(folder / "model_index.json")
        refuse_second_denoiser(folder, self.index, traits.denoiser_name)
        self.traits = traits.of(self.index.get("_class_name", ""))
        self.config = read_config(folder / traits.denoiser_name / "config.json")
        self.vae_config = read_config(folder / "vae" / "config.json")
        self.scheduler_config = read_json(folder / "scheduler" / "scheduler_config.json")
        """The scheduler as it draws and is exported; a prediction type that the settings override is in it."""
        if settings.model.prediction_type:
            self.scheduler_config["prediction_type"] = settings.model.prediction_type
        chosen = settings.data.tokenizer_max_length
        longest = self.traits.max_length
        self.max_length = (chosen or longest(self)) if longest else None

    @property
    def denoiser_name(self) -> str:
        """Name of the denoiser in the pipeline, and of its folder."""
        return self.traits.denoiser_name

    def denoiser(self) -> nn.Module:
        """Return the denoiser as its config.json has it, parameters on the meta device; idle ones are not trained."""
        model, idle = build_on_meta(self.config), self.traits.idle(self)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(idle))
        return model

    def exported_config(self) -> dict[str, Any]:
        """Return the denoiser's config as diffusers writes it into config.json: complete, with its own class."""
        return json.loads(self.denoiser().to_json_string())

    def objective(self) -> Objective:
        """Return what the denoiser is trained towards, as its scheduler and the settings say."""
        return self.traits.objective(self)

    def scheduler(self) -> Any:
        """Return the scheduler with which the pipeline draws."""
        return class_named(self.index, "scheduler", self.folder).from_config(self.scheduler_config)

    def vae(self, device: torch.device) -> Vae:
        """Load the VAE."""
        return Vae(self.folder / "vae", device, self.settings.model.vae_dtype)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """Load tokenizers and text encoders."""
        return TextEncoder(self, device, dtype)

    def unconditional(self, empty: Conditioning) -> Conditioning:
        """Return what stands for `no caption`, given the encoding of the empty one."""
        return self.traits.unconditional(self, empty)

    def picture_conditioning(self, geometry: Geometry) -> Conditioning:
        """Return what the denoiser is told about one picture's size and crop; no batch axis."""
        return self.traits.picture_conditioning(self, geometry)

    def predict(self, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the denoiser as its pipeline does and return its answer as BCHW; noisy_BCHW sets the dtype."""
        return self.traits.predict(self, model, noisy_BCHW, timesteps_B, conditioning)

    def draw(
        self, model: nn.Module, vae: Vae, sampling: SamplingParams, positive: Conditioning, negative: Conditioning
    ) -> Tensor:
        """Return the latents (1CHW) of one picture, drawn by diffusers' own pipeline and its own scheduler."""
        pipeline = self.pipeline(vae=vae.model, model=model)
        pipeline.set_progress_bar_config(disable=True)
        arguments = self.traits.draw_arguments(positive, negative, sampling)
        with inputs_cast(model, positive["prompt_embeds"].dtype):
            drawn = pipeline(**arguments)[0]
        drawn = vae.normalised(drawn) if self.traits.draws_for_vae else drawn
        size = (sampling.size[1] // vae.downscale, sampling.size[0] // vae.downscale)
        return self.traits.drawn_latents(drawn, size)

    def pipeline(
        self,
        vae: nn.Module | None,
        model: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
        with_text: bool = False,
    ) -> Any:
        """Return diffusers' pipeline with this denoiser and VAE, with or without its text encoders."""
        named = self.index.get("_class_name")
        cls = class_of_diffusers(named if named in self.traits.pipelines else self.traits.pipelines[0])
        parts: dict[str, Any] = {name: None for name, value in self.index.items() if isinstance(value, list)}
        if with_text:  # what is not mentioned is loaded
            parts = {name: None for name in parts if not name.startswith(TEXT_PARTS)}
            require_packages(self.index[name] for name in self.index if name.startswith(TEXT_PARTS))
        parts |= {"vae": vae, self.denoiser_name: model, "scheduler": self.scheduler()}
        variant = self.settings.model.variant
        return cls.from_pretrained(self.folder, dtype=dtype, use_safetensors=True, variant=variant, **parts)
