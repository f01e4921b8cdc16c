"""A pipeline folder in diffusers format, and its objects: denoiser, VAE, scheduler, pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from simpletuner.models.family.vae import Vae, cell_of
from simpletuner.models.folder.diffusers_io import (
    ENCODING_PARTS,
    build_on_meta,
    component_class,
    diffusers_class,
    refuse_second_denoiser,
    require_packages,
)
from simpletuner.models.folder.malformed import read_config, read_json
from simpletuner.models.folder.weights import is_null, read_index
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class PipelineFolder:
    """A pipeline folder; `config` is the denoiser's config.json, `index` the pipeline's model_index.json."""

    pipelines: ClassVar[tuple[str, ...]] = ()
    """Pipeline classes of diffusers; a folder that names none of them is opened as the first."""

    denoiser_name: ClassVar[str] = "transformer"
    """Denoiser's component in the pipeline, which is also the name of its folder: `transformer` or `unet`."""

    tiny_pipeline: ClassVar[str] = ""
    """Import path, `package.module:function`, of what builds a small pipeline with random weights, for the
    flavour `tiny`; a built-in family has a table `[tiny]` in its preset."""

    other_denoiser: str = ""
    """Component that denoises the rest of the noise levels, if the pipeline has two: it is kept as it is."""

    @classmethod
    def variants(cls) -> tuple[type[Self], ...]:
        """Further classes of this family, for pipelines called differently (FLUX.2: klein and dev)."""
        return ()

    @classmethod
    def opens(cls, pipeline: DiffusionPipeline) -> bool:
        return any(pipeline in each.pipelines for each in (cls, *cls.variants()))

    @classmethod
    def denoiser_in(cls, folder: Path) -> str:
        return cls.denoiser_name

    @classmethod
    def open(cls, folder: Path, settings: Settings) -> Self:
        """Open a pipeline folder with the class, of this family, whose pipeline model_index.json names."""
        named = read_index(folder).get("_class_name")
        variant = next((each for each in cls.variants() if named in each.pipelines), cls)
        return variant(folder, settings)

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.index = read_index(folder)
        self.choose_denoiser()
        self.config = read_config(folder / self.denoiser_name / "config.json")
        self.vae_config = read_config(folder / "vae" / "config.json")
        # Both sampling and export use this config, so it must have the settings' prediction type.
        self.scheduler_config = self.published_scheduler_config()
        if settings.model.prediction_type:
            self.scheduler_config["prediction_type"] = settings.model.prediction_type

    def choose_denoiser(self) -> None:
        """Choose the denoiser to train. Raises SettingsError for two, if only one of them may be trained."""
        refuse_second_denoiser(self.folder, self.index, self.denoiser_name)

    def unused_parameters(self) -> tuple[str, ...]:
        """Prefixes of parameters without an effect on predictions: no gradient, values as published."""
        return ()

    def zero_gradients(self) -> tuple[str, ...]:
        """Prefixes of trained parameters that only some samples depend on: gradients of zero are healthy."""
        return ()

    def optional_encoders(self) -> tuple[str, ...]:
        """Text encoders without which the pipeline samples, where a folder has none."""
        return ()

    @cached_property
    def cell(self) -> Shape:
        """Frames and px that one latent cell covers."""
        return cell_of(self.vae_config)

    def denoiser(self, include_buffers: bool = False) -> nn.Module:
        """Build the denoiser with parameters (and buffers) on the meta device, unused parameters frozen."""
        model, unused = build_on_meta(self.config, include_buffers), self.unused_parameters()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(unused))
        return model

    @cached_property
    def meta_denoiser(self) -> nn.Module:
        """Denoiser without memory, buffers included, for names, shapes and classes. Not to be modified."""
        return self.denoiser(include_buffers=True)

    def published_scheduler_config(self) -> dict[str, object]:
        return read_json(self.folder / "scheduler" / "scheduler_config.json")

    def exported_config(self) -> dict[str, Any]:
        """Denoiser's config as diffusers writes it into config.json: with all defaults and its own class."""
        return json.loads(self.meta_denoiser.to_json_string())

    @property
    def pipeline_class(self) -> Any:
        return diffusers_class(self.pipeline_name)

    @property
    def pipeline_name(self) -> str:
        """The name of `pipeline_class`, whose import takes 0.3 CPU s that a step has no use for."""
        named = self.index.get("_class_name")
        return named if named in self.pipelines else self.pipelines[0]

    @property
    def image_to_video_class(self) -> Any:
        """Diffusers' class of the pipeline that is given the first frame of a clip."""
        return self.pipeline_class

    def scheduler(self) -> Any:
        return component_class(self.index, "scheduler", self.folder).from_config(self.scheduler_config)

    def vae(self, device: torch.device) -> Vae:
        return Vae(self.folder / "vae", device, self.settings.model)

    def load_pipeline(
        self,
        vae: nn.Module | None,
        model: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
        with_text: bool = False,
        others: Mapping[str, object] = MappingProxyType({}),
        cls: object = None,
    ) -> Any:
        """Assemble diffusers' pipeline from this denoiser and VAE, with or without its text encoders."""
        # `from_pretrained` loads every component that is not passed, so unwanted ones are passed as None.
        parts: dict[str, object] = {name: None for name, value in self.index.items() if isinstance(value, list)}
        if with_text:
            # A part missing in the folder is passed as None, too: diffusers asks for each by its name.
            parts = {name: None for name in parts if not name.startswith(ENCODING_PARTS) or is_null(self.index[name])}
            require_packages(self.index[name] for name in self.index if name.startswith(ENCODING_PARTS))
        parts |= {"vae": vae, self.denoiser_name: model, "scheduler": self.scheduler(), **others}
        variant = self.settings.model.variant
        return (cls or self.pipeline_class).from_pretrained(
            self.folder, dtype=dtype, use_safetensors=True, variant=variant, **parts
        )
