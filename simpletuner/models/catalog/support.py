"""Refusals and warnings of `train` before ranks start, from settings and presets; no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.errors import BrokenRule, SettingsError, SimpleTunerError, collect_error, join_errors
from simpletuner.models.catalog.architecture import architecture_in_folder, is_path
from simpletuner.models.catalog.preset import Preset
from simpletuner.models.catalog.registry import (
    AUTO,
    check_heads,
    check_pipeline,
    check_trainable,
    class_path_of,
    flavour_of,
    heads_of,
    preset_of,
    presets,
    published_shift,
)
from simpletuner.models.single_file.source import check_single_file, named_file
from simpletuner.settings import Loaded
from simpletuner.settings.declared.errors import broken, shorten
from simpletuner.settings.declared.sections import SECTION_OF, Model, Settings, setting_fields
from simpletuner.settings.files.raw_values import naming_places, with_places
from simpletuner.settings.values.parsed import DIFFUSERS
from simpletuner.settings.values.shape import Shape, parse_shapes

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset
    from simpletuner.data.config.validation_prompts import ValidationPrompt


@dataclass(frozen=True)
class Scope:
    """Families for which a setting has an effect, their common property, and the harm in others."""

    includes: Callable[[Preset], bool]
    what: str
    harms: bool = False


def is_diffusion(preset: Preset) -> bool:
    return preset.is_diffusion


def is_flow(preset: Preset) -> bool:
    return preset.objective == "flow"


# The settings that do not have an effect in every family.
SCOPES = {
    # Harmful: it would be exported with the scheduler of a flow, which would then sample with it.
    "prediction_type": Scope(is_diffusion, "diffusion", harms=True),
    "snr_gamma": Scope(is_diffusion, "diffusion"),
    "flow_schedule_shift": Scope(is_flow, "flow matching"),
    "flow_schedule_auto_shift": Scope(is_flow, "flow matching"),
    "flow_sigmoid_scale": Scope(is_flow, "flow matching"),
    "flow_use_uniform_schedule": Scope(is_flow, "flow matching"),
    "flux_guidance_value": Scope(lambda preset: preset.embeds_guidance, "models that embed the guidance scale"),
    "sound_loss_weight": Scope(lambda preset: preset.generates_sound, "models that generate clips with their sound"),
    "framerate": Scope(lambda preset: preset.frame_step > 0, "models that generate clips"),
    "tokenizer_max_length": Scope(lambda preset: not preset.fixed_prompt_length, "text encoders of variable length"),
}


def check_runnable(loaded: Loaded) -> Loaded:
    """Add a warning to the settings for each that has no effect in its family.

    Raises SettingsError for what this version cannot run.
    """
    check_with_model(loaded.settings, loaded.origins)
    without_effect = list(settings_without_effect(loaded))
    if harmful := [sentence for sentence, harms in without_effect if harms]:
        raise SettingsError("\n  ".join(harmful), "leave it out")
    return replace(loaded, warnings=(*loaded.warnings, *(sentence for sentence, _ in without_effect)))


def check_with_model(settings: Settings, origins: Mapping[str, object]) -> None:
    with naming_places(origins, "model_family", "model_flavour"):
        check_trainable(settings.model)  # alone: with another model the rest may be no mistakes
    errors: list[SimpleTunerError] = []
    for check, names in CHECKS.items():
        with collect_error(errors), naming_places(origins, *names):
            check(settings)
    if mistakes := [with_places(mistake, origins) for rule in MODEL_RULES for mistake in rule(settings)]:
        errors.append(SettingsError(mistakes=mistakes))
    if errors:
        raise join_errors(errors)


def lora_can_be_loaded(settings: Settings) -> Iterator[BrokenRule]:
    model = settings.model
    preset = preset_of(model)
    if model.model_type == "lora" and preset and not preset.loads_lora:
        able = [name for name, each in presets().items() if each.loads_lora and each.family_class]
        message = f"model_type=lora: diffusers' pipeline of {model.model_family} cannot load a LoRA"
        hint = f"set model_type=full, or take another family: {', '.join(able)}"
        yield broken(message, "model_type", "model_family", hint=hint)


def lora_format_is_of_the_family(settings: Settings) -> Iterator[BrokenRule]:
    model = settings.model
    preset = preset_of(model)
    known = [DIFFUSERS, *(preset.lora_formats if preset else ())]
    if model.model_type == "lora" and (unknown := set(settings.lora.export_format.split(",")) - {*known}):
        message = f"export_format={','.join(sorted(unknown))} is not for model_family={model.model_family}"
        hint = f"leave it out, or set export_format={','.join(known)}"
        yield broken(message, "export_format", "model_family", hint=hint)


def lora_files_are_there(settings: Settings) -> Iterator[BrokenRule]:
    fetches = "; `hf download` fetches published ones"
    for path in settings.lora.assistant_lora:
        if not path.exists():
            message, hint = f"assistant_lora = {path}: there is no such file or folder", "name a .safetensors file"
            yield broken(message, "assistant_lora", hint=hint + fetches)
    if (start := settings.lora.lora_init) is not None and not start.exists():
        hint = f"name a pytorch_lora_weights.safetensors or its folder{fetches}"
        yield broken(f"lora_init = {start}: there is no such file or folder", "lora_init", hint=hint)


def check_context_parallel(settings: Settings) -> None:
    """Raise SettingsError for a denoiser that cannot be split, or not over so many ranks.

    What only the model's own config can tell is found by `check_engine`, before anything is encoded.
    """
    model, parallel = settings.model, settings.parallel
    preset = preset_of(model)
    if parallel.context_parallel_size == 1 or preset is None:
        return
    if preset.unsplittable:
        splittable = [name for name, each in presets().items() if each.heads]
        raise SettingsError(
            f"{model.model_family} cannot be split by context_parallel_size: {preset.unsplittable}",
            f"leave it out, or train one of {', '.join(splittable)}",
        )
    if (folder := Path(model.pretrained_model_name_or_path).expanduser()).is_dir() and folder.name:
        config = architecture_in_folder(folder).config
    elif (flavour := flavour_of(model)) and not model.pretrained_model_name_or_path:
        config = flavour.architecture.config
    else:
        return
    check_heads(model.model_family, heads_of(preset, config), parallel)


def check_base(settings: Settings) -> None:
    """Raise SettingsError for a base model that is not there, or is none of the family."""
    check_path(settings.model)
    check_folder(settings.model)


def buckets_fit_the_family(settings: Settings) -> Iterator[BrokenRule]:
    family = settings.model.model_family
    alignment = settings.data.aspect_bucket_alignment
    multiple = image_multiple(settings.model)
    if alignment % multiple:
        message = (
            f"aspect_bucket_alignment = {alignment}: with model_family={family} both sides of an image must be "
            f"multiples of {multiple} px"
        )
        hint = f"set aspect_bucket_alignment={max(1, round(alignment / multiple)) * multiple}"
        yield broken(message, "aspect_bucket_alignment", hint=hint)


def validation_fits_the_family(settings: Settings) -> Iterator[BrokenRule]:
    size, frames = settings.validation.validation_resolution, settings.validation.validation_num_video_frames
    yield from unfit_shapes("validation_resolution", size, "validation_resolution", settings.model)
    if frames is not None:
        name = "validation_num_video_frames"
        yield from unfit_frames(name, str(frames), frames, name, settings.model)


def check_clips(settings: Settings, datasets: Iterable[ImageDataset]) -> Shape:
    """Return the bucket alignment: side in px and frame step (1 for image families, or without a family).

    Raises SettingsError for videos and a family that cannot train them.
    """
    side_px = settings.data.aspect_bucket_alignment
    if videos := next((dataset for dataset in datasets if dataset.clips), None):
        check_trains_clips(settings.model, videos.id)
    return Shape(frame_step(settings.model) or 1, side_px, side_px)


def check_trains_clips(model: Model, dataset: str) -> None:
    """Raise SettingsError for a dataset of videos, and a family that cannot train them."""
    if model.model_family != AUTO and class_path_of(model) and not frame_step(model):
        able = [name for name, preset in presets().items() if preset.frame_step]
        raise SettingsError(
            f"dataset `{dataset}` has videos, and model_family={model.model_family} trains on images alone",
            f"take a family that trains on clips: {', '.join(able)}",
        )


def frame_step(model: Model) -> int:
    """Frame step of clips; 0 for image families, and for one without a preset."""
    preset = preset_of(model)
    return preset.frame_step if preset else 0


def trains_sound(settings: Settings) -> bool:
    preset = preset_of(settings.model)
    return settings.objective.sound_loss_weight > 0 and preset is not None and preset.generates_sound


def reads_json(model: Model) -> bool:
    """True if the model's captions are checked for being JSON."""
    preset = preset_of(model)
    return preset is not None and preset.json_captions


def clip_fps(model: Model) -> float:
    """Return the frames per second of a model's clips, 0 where they are not known."""
    preset, flavour = preset_of(model), flavour_of(model)
    return ((flavour.fps if flavour else 0) or preset.fps) if preset else 0


def check_prompt_sizes(settings: Settings, prompts: Iterable[ValidationPrompt]) -> None:
    """Raise SettingsError for sizes in a file of prompts that the family cannot sample."""
    if settings.model.model_family and class_path_of(settings.model) is None:
        return  # an unknown family, which is said elsewhere
    named = ((f"resolution of the prompt {shorten(each.prompt)}", each.resolution) for each in prompts)
    if found := [rule for each in named for rule in unfit_shapes(*each, "validation_prompt_file", settings.model)]:
        raise SettingsError(mistakes=found)


def unfit_shapes(name: str, text: str, setting: str, model: Model) -> Iterator[BrokenRule]:
    """Yield mistakes in shapes of validation images or clips, which the family cannot sample."""
    multiple = image_multiple(model)
    if any(side % multiple for shape in parse_shapes(text) for side in shape.size):

        def nearest(found: re.Match[str]) -> str:
            return str(max(1, round(int(found[0]) / multiple)) * multiple)

        needed = f"all sides must be multiples of {multiple} px with model_family={model.model_family}"
        hint = f"the nearest is {re.sub(r'(?<![@0-9])[0-9]+', nearest, text)}"
        yield broken(f"{name} = {text}: {needed}", setting, hint=hint)
        return
    for shape in parse_shapes(text):
        yield from unfit_frames(name, str(shape), shape.frames, setting, model)


def unfit_frames(name: str, value: str, frames: int, setting: str, model: Model) -> Iterator[BrokenRule]:
    """Yield a mistake for a frame count that the VAE cannot decode; `auto` is proven later."""
    if frames == 1 or model.model_family in ("", AUTO):
        return
    if not (step := frame_step(model)):
        needed, hint = f"model_family={model.model_family} generates images alone", "leave the frames out"
    elif (frames - 1) % step:
        needed = f"frames must be a multiple of {step} and one more with model_family={model.model_family}"
        hint = f"the nearest is {max(1, round((frames - 1) / step)) * step + 1}"
    else:
        return
    yield broken(f"{name} = {value}: {needed}", setting, hint=hint)


def image_multiple(model: Model) -> int:
    """Alignment of image sides, in px."""
    preset = preset_of(model)
    # Of a user's own family only what its VAE does is known, which makes 1 of 8 px in all that are published.
    return preset.image_multiple if preset else 8


CHECKS: dict[Callable[[Settings], None], tuple[str, ...]] = {
    check_context_parallel: ("model_family", "model_flavour", "context_parallel_size"),
    check_base: ("pretrained_model_name_or_path", "single_file_config"),
}
"""Checks that opening the model makes, too, each with the settings whose places its sentence names."""


def sound_is_trained_by_a_class(settings: Settings) -> Iterator[BrokenRule]:
    if settings.model.model_family == AUTO and settings.objective.sound_loss_weight:
        able = " or ".join(name for name, each in presets().items() if each.generates_sound)
        message = "sound_loss_weight: model_family=auto trains the video of clips alone"
        hint = f"leave it out, or set model_family={able} for a pipeline of it"
        yield broken(message, "sound_loss_weight", "model_family", hint=hint)


MODEL_RULES = (
    sound_is_trained_by_a_class,
    lora_can_be_loaded,
    lora_format_is_of_the_family,
    lora_files_are_there,
    buckets_fit_the_family,
    validation_fits_the_family,
)


def settings_without_effect(loaded: Loaded) -> Iterator[tuple[str, bool]]:
    """Yield a sentence for each changed setting without an effect in its family, and its harm if any."""
    settings, family = loaded.settings, loaded.settings.model.model_family
    preset = preset_of(settings.model)
    # Of a user's own family nothing is known before it is imported; opening it checks its objective.
    if preset is None:
        return
    for name, scope in SCOPES.items():
        value = getattr(getattr(settings, SECTION_OF[name]), name)
        if not scope.includes(preset) and value != setting_fields()[name].default:
            message = f"{name} = {value} has no effect with model_family={family}: it is for {scope.what}"
            yield str(with_places(broken(message, name), loaded.origins)), scope.harms


def family_defaults(settings: Settings) -> dict[str, tuple[object, str]]:
    """Values that the family gives to empty settings, each with the reason in words."""
    shift = published_shift(settings.model)
    if settings.objective.flow_schedule_shift is not None or settings.objective.flow_schedule_auto_shift or not shift:
        return {}
    name = f"{settings.model.model_family} {settings.model.model_flavour}".strip()
    preset = preset_of(settings.model)
    clips = "; clips: that of their own tokens" if preset and preset.clip_shift else ""
    return {"flow_schedule_shift": (shift, f"that of {name}'s published scheduler at 1024 px{clips}")}


def check_path(model: Model) -> None:
    """Raise SettingsError for a missing path, and for an unreadable file."""
    name = model.pretrained_model_name_or_path
    path = Path(name).expanduser()
    if not name or path.is_dir():
        return
    if named_file(model) is not None:
        check_single_file(model)
    elif path.is_file() or is_path(name):
        raise SettingsError(
            f"{name} is no folder"
            if path.is_file()
            else f"{name} is no folder and no file: there is nothing of that name",
            "the base model is a folder, a .safetensors file or a hub id",
        )


def check_folder(model: Model) -> None:
    """Raise what `load_family` would raise for a folder without a readable index, or of another family.

    Of a user's own family only its class knows which pipelines it opens.
    """
    folder = Path(model.pretrained_model_name_or_path).expanduser()
    preset = preset_of(model)
    if not model.pretrained_model_name_or_path or not folder.is_dir() or preset is None:
        return
    from simpletuner.models.folder.weights import read_index

    check_pipeline(folder, read_index(folder).get("_class_name"), model.model_family)
