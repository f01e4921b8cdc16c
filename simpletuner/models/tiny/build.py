"""Build the pipeline of a family's flavour `tiny`, as described by its preset.

Every width divides by 4, so that the models shard over 4 ranks. Adjustments, named by a preset, make random
weights behave like trained ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.preset import Tiny
from simpletuner.models.catalog.registry import import_object, preset_of
from simpletuner.models.family.base import family_class
from simpletuner.models.folder.diffusers_io import choose_accelerator
from simpletuner.models.tiny.encoders import ENCODERS, build_encoder, load_vae, load_video_vae
from simpletuner.settings.declared.sections import Model

if TYPE_CHECKING:
    from diffusers import AuraFlowPipeline, Flux2KleinPipeline, LTX2Pipeline, LTXConditionPipeline, ZImagePipeline

SEED = 0


def build_tiny(model: Model, folder: Path) -> None:
    """Write a family's tiny pipeline, always with the same weights. Raises SettingsError without one."""
    choose_accelerator()
    if (preset := preset_of(model)) is not None and preset.tiny is not None:
        pipeline = build_preset(preset.tiny)
    else:
        pipeline = build_own(model)
    save(pipeline, folder)


def build_own(model: Model) -> Any:
    """Call the function that a user's own family names."""
    family = family_class(model)
    if not family.tiny_pipeline:
        raise SettingsError("this model_family has no flavour `tiny`", "set --pretrained_model_name_or_path")
    build = import_object(
        family.tiny_pipeline, f"{family.__name__}.tiny_pipeline = {family.tiny_pipeline}", "package.module:function"
    )
    with fixed_seed():
        return build()


def build_preset(tiny: Tiny, **changes: Mapping[str, object]) -> Any:
    """Build a pipeline; `changes` replace entries of components' configs, by component."""
    import diffusers

    cls = getattr(diffusers, tiny.pipeline)
    with fixed_seed():
        components: dict[str, Any] = {}
        for name in tiny.components:
            components |= build_component(name, {**tiny.component(name), **changes.get(name, {})})
        pipeline = assemble(cls, components, tiny.options)
        if tiny.adjust:
            import_object(tiny.adjust, f"adjust = {tiny.adjust}", "package.module:function")(pipeline)
    return pipeline


def assemble(cls: Any, components: dict[str, Any], options: Mapping[str, object]) -> object:
    """Return a pipeline of components; a processor of chats is its tokenizer, too, where it has both."""
    is_modular = hasattr(cls, "update_components")
    names = cls().component_names if is_modular else [*inspect.signature(cls.__init__).parameters]
    if "processor" in names and hasattr(components.get("tokenizer"), "tokenizer"):
        components["processor"] = processor = components.pop("tokenizer")
        components |= {"tokenizer": processor.tokenizer} if "tokenizer" in names else {}
    if not is_modular:
        return cls(**dict.fromkeys(set(names) & {*cls._optional_components}) | components, **options)
    pipeline = cls()
    pipeline.update_components(**components)
    return pipeline


def save(pipeline: Any, folder: Path) -> None:
    # A modular index would name its repository's components otherwise.
    is_modular = hasattr(pipeline, "update_components")
    pipeline.save_pretrained(str(folder), **{"overwrite_modular_index": True} if is_modular else {})


def build_component(name: str, described: Mapping[str, object]) -> dict[str, object]:
    """Return a component by its name; a text encoder comes with its tokenizer."""
    import diffusers

    if trained := described.get("pretrained"):
        return {name: {"vae": load_vae, "video_vae": load_video_vae}[trained]()}
    if kind := described.pop("encoder", ""):
        tokenizer, encoder = build_encoder(kind, **described)
        return {name: encoder, name.replace("text_encoder", "tokenizer"): tokenizer}
    if kind := described.pop("tokenizer", ""):
        return {name: ENCODERS[kind][0]()}
    return {name: attrgetter(described.pop("class_name"))(diffusers)(**described)}


@contextmanager
def fixed_seed() -> Iterator[None]:
    # Afterwards the caller's sequence continues.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def strengthen_text(pipeline: AuraFlowPipeline) -> None:
    # With the random weights as they are the gates are so small that text changes nothing.
    pipeline.transformer.time_step_proj.linear_2.weight.data.mul_(20)


def fill_padding(pipeline: ZImagePipeline) -> None:
    for padding in (pipeline.transformer.x_pad_token, pipeline.transformer.cap_pad_token):
        padding.data.normal_(std=0.3)  # the norm of zeros has gradients in the hundreds


def set_latent_statistics(pipeline: LTXConditionPipeline | LTX2Pipeline) -> None:
    channels = pipeline.vae.config.latent_channels
    pipeline.vae.register_buffer("latents_mean", torch.linspace(-0.1, 0.1, channels))
    pipeline.vae.register_buffer("latents_std", torch.linspace(0.25, 0.35, channels))
    if hasattr(pipeline, "audio_vae"):
        width = len(pipeline.audio_vae.latents_mean)
        pipeline.audio_vae.latents_mean.copy_(torch.linspace(-0.1, 0.1, width))
        pipeline.audio_vae.latents_std.copy_(torch.linspace(0.9, 1.1, width))


def use_patch_statistics(pipeline: Flux2KleinPipeline) -> None:
    """Make the package's VAE one of FLUX.2, with statistics of 2x2 patches instead of a scaling factor."""
    from diffusers import AutoencoderKLFlux2

    trained = load_vae()
    vae = AutoencoderKLFlux2(**AutoencoderKLFlux2.extract_init_dict(dict(trained.config))[0])
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.fill_(trained.config.scaling_factor**-2)
    vae.load_state_dict(trained.state_dict() | vae.bn.state_dict(prefix="bn."))
    pipeline.register_modules(vae=vae)
