"""What `train` refuses or warns about before a rank is started, from the settings and the registry alone; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.models.architecture import is_path
from simpletuner.models.registry import FAMILIES, check_trainable
from simpletuner.settings import Loaded
from simpletuner.settings.rules import refuse_unsupported
from simpletuner.settings.sections import SECTION_OF, Model, Settings, setting_fields

DIFFUSION = frozenset(name for name, entry in FAMILIES.items() if entry.objective in ("epsilon", "v_prediction"))
FLOW = frozenset(name for name, entry in FAMILIES.items() if entry.objective == "flow")
FIXED_LENGTH = frozenset({"sdxl", "sd1x", "sd2x"})
"""Families whose text encoders read a fixed number of tokens."""


@dataclass(frozen=True)
class Scope:
    """The families in which a setting does something, what they have in common, and whether it harms elsewhere."""

    families: frozenset[str]
    what: str
    harms: bool = False


SCOPES = {
    "prediction_type": Scope(DIFFUSION, "diffusion", harms=True),  # the exported scheduler would draw with it
    "snr_gamma": Scope(DIFFUSION, "diffusion"),
    "flow_schedule_shift": Scope(FLOW, "flow matching"),
    "flow_sigmoid_scale": Scope(FLOW, "flow matching"),
    "flow_use_uniform_schedule": Scope(FLOW, "flow matching"),
    "flux_guidance_value": Scope(frozenset({"flux", "flux2"}), "models that embed the guidance scale"),
    "tokenizer_max_length": Scope(FLOW | DIFFUSION - FIXED_LENGTH, "text encoders of variable length"),
}
"""Where settings count that do not count everywhere."""

SINGLE_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


def check_runnable(loaded: Loaded) -> Loaded:
    """Return settings that can be run, with a warning for each that has no effect in its family.

    Raises SettingsError for what this version cannot run.
    """
    settings = loaded.settings
    check_trainable(settings.model)
    check_path(settings.model)
    refuse_unsupported(settings)
    idle = list(settings_without_effect(settings))
    if harmful := [sentence for sentence, harms in idle if harms]:
        raise SettingsError("\n  ".join(harmful), "leave it out")
    return replace(loaded, warnings=(*loaded.warnings, *(sentence for sentence, _ in idle)))


def settings_without_effect(settings: Settings) -> Iterator[tuple[str, bool]]:
    """Yield a sentence for each setting that was changed and does nothing in its family, and whether it harms.

    Of a user's own family nothing is known here; opening it checks its objective.
    """
    family = settings.model.model_family
    if family not in FAMILIES or family in (settings.model.model_families or {}):
        return
    for name, scope in SCOPES.items():
        value = value_of(settings, name)
        if family not in scope.families and value != setting_fields()[name].default:
            yield f"{name} = {value} has no effect with model_family={family}: it is for {scope.what}", scope.harms


def value_of(settings: Settings, name: str) -> Any:
    """Return the value of a setting by its name."""
    return getattr(getattr(settings, SECTION_OF[name]), name)


def check_path(model: Model) -> None:
    """Raise SettingsError for a path that is a file, or that is not there."""
    name = model.pretrained_model_name_or_path
    path = Path(name).expanduser()
    if not name or path.is_dir():
        return
    if path.is_file() and path.suffix.lower() in SINGLE_FILES:
        raise SettingsError(
            f"{name} is a single-file checkpoint, which this version does not read: it wants a pipeline's folder",
            "convert it once by the pipeline's class in diffusers and name that folder, such as "
            f"StableDiffusionXLPipeline.from_single_file({name!r}).save_pretrained({path.stem!r})",
        )
    if path.is_file() or is_path(name):
        raise SettingsError(f"{name} is no folder", "pretrained_model_name_or_path is a folder or a hub id")
