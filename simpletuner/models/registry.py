"""Which model families there are, by name only: no torch here, so that help and mistakes are answered at once.

What is published of a family (its flavours, their architectures) is in `presets/<family>.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.errors import SettingsError
from simpletuner.settings.errors import nearest
from simpletuner.settings.sections import Model
from simpletuner.system.importing import import_named

if TYPE_CHECKING:
    from simpletuner.models.family import Traits

TINY = "tiny"
ENTRY_POINTS = "simpletuner.families"
"""Where installed packages register families: name = "package.module:TRAITS"."""

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Entry:
    """One family: where its Traits are (empty: its blocks can be detected, but it cannot be trained), what it learns
    to predict, and which text encoders it needs."""

    traits: str
    objective: str
    text_encoders: str


# fmt: off
FAMILIES: dict[str, Entry] = {
    "sdxl": Entry("simpletuner.models.families.sdxl:SDXL", "epsilon", "CLIP-L, CLIP-G"),
    "sd1x": Entry("simpletuner.models.families.stable_diffusion:SD1X", "epsilon", "CLIP-L"),
    "sd2x": Entry("simpletuner.models.families.stable_diffusion:SD2X", "v_prediction", "OpenCLIP-H"),
    "sd3": Entry("simpletuner.models.families.sd3:SD3", "flow", "CLIP-L, CLIP-G, T5-XXL"),
    "kolors": Entry("", "epsilon", "ChatGLM3-6B"),
    "flux": Entry("simpletuner.models.families.flux:FLUX", "flow", "CLIP-L, T5-XXL"),
    "flux2": Entry("simpletuner.models.families.flux2:FLUX2", "flow", "Qwen3 or Mistral-3"),
    "chroma": Entry("simpletuner.models.families.chroma:CHROMA", "flow", "T5-XXL"),
    "pixart_sigma": Entry("simpletuner.models.families.pixart_sigma:PIXART_SIGMA", "epsilon", "T5-XXL"),
    "sana": Entry("simpletuner.models.families.sana:SANA", "flow", "Gemma-2-2B"),
    "auraflow": Entry("simpletuner.models.families.auraflow:AURAFLOW", "flow", "Pile-T5-XL"),
    "lumina2": Entry("simpletuner.models.families.lumina2:LUMINA2", "flow", "Gemma-2-2B"),
    "qwen_image": Entry("simpletuner.models.families.qwen_image:QWEN", "flow", "Qwen2.5-VL-7B"),
    "z_image": Entry("simpletuner.models.families.z_image:Z_IMAGE", "flow", "Qwen3-4B"),
    "hidream": Entry("", "flow", "CLIP-L, CLIP-G, T5-XXL, Llama-3.1-8B"),
    "wan": Entry("simpletuner.models.families.wan:WAN", "flow", "UMT5-XXL"),
    "ltxvideo": Entry("simpletuner.models.families.ltxvideo:LTXVIDEO", "flow", "T5-XXL"),
    "hunyuanvideo": Entry("", "flow", "Qwen2.5-VL-7B, ByT5"),
    "cosmos": Entry("", "edm", "T5-11B"),
}
# fmt: on


@dataclass(frozen=True)
class Architecture:
    """A denoiser as published: diffusers' class and config, its parameters as the published files hold them."""

    class_name: str
    parameters: int | None = None
    source: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Flavour:
    """One published checkpoint: hub id, architecture, and, if it cannot be trained, why."""

    hub: str
    architecture: Architecture
    untrainable: str = ""


@cache
def flavours_of(family: str) -> Mapping[str, Flavour]:
    """Return a family's published flavours, the default first; none for a user's own family."""
    path = PRESETS / f"{family}.toml"
    if family not in FAMILIES or not path.exists():
        return {}
    preset = tomllib.loads(path.read_text(encoding="utf-8"))
    architectures = {name: Architecture(**values) for name, values in preset["architectures"].items()}
    return {
        name: Flavour(**values | {"architecture": architectures[values["architecture"]]})
        for name, values in preset["flavours"].items()
    }


def check_model(model: Model) -> None:
    """Raise SettingsError for a family or flavour that is not known, with the nearest one."""
    names = [*FAMILIES, *(model.model_families or {})]
    if path_of_traits(model) is None:
        raise SettingsError(
            f"Unknown model_family '{model.model_family}'{nearest(model.model_family, names)}",
            "`simpletuner models` lists all families; your own goes into model_families",
        )
    known = [*flavours_of(model.model_family), TINY]
    if model.model_flavour and model.model_flavour not in known:
        near = nearest(model.model_flavour, known)
        raise SettingsError(
            f"Unknown model_flavour '{model.model_flavour}' of {model.model_family}{near}",
            f"known flavours: {', '.join(known)}",
        )


def check_trainable(model: Model) -> None:
    """Raise SettingsError for a model that is not known, or known by its architecture alone."""
    check_model(model)
    if not path_of_traits(model):
        able = [key for key, entry in FAMILIES.items() if entry.traits]
        raise SettingsError(
            f"{model.model_family} cannot be trained yet: only its blocks can be detected",
            f"families that can: {', '.join(able)}",
        )
    flavour = flavour_of(model)
    if flavour and flavour.untrainable and not model.pretrained_model_name_or_path:
        name = model.model_flavour or f"{next(iter(flavours_of(model.model_family)))} (its default flavour)"
        raise SettingsError(
            f"{model.model_family} {name} cannot be trained: {flavour.untrainable}",
            "`simpletuner models` lists the flavours that can",
        )
    if not (flavour or model.pretrained_model_name_or_path or model.model_flavour == TINY):
        raise SettingsError(
            f"{model.model_family} has no published flavours",
            "name a pipeline folder with --pretrained_model_name_or_path, or use --model_flavour=tiny",
        )


def flavour_of(model: Model) -> Flavour | None:
    """Return the chosen published flavour, or the family's default one; None for tiny and for a user's own family."""
    flavours = flavours_of(model.model_family)
    return flavours.get(model.model_flavour) if model.model_flavour else next(iter(flavours.values()), None)


def path_of_traits(model: Model) -> str | None:
    """Return where the family's Traits are: as the settings say, as built in, or as an installed package says.

    Empty for a family that is known by its architecture alone, None for an unknown one.
    """
    key, own = model.model_family, model.model_families or {}
    if key in own:
        return own[key]
    if key in FAMILIES:
        return FAMILIES[key].traits
    return next((point.value for point in entry_points(group=ENTRY_POINTS, name=key)), None)


def installed_families() -> dict[str, str]:
    """Return the families that installed packages register, by name: where their Traits are."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS) if point.name not in FAMILIES}


def traits_of(model: Model) -> Traits:
    """Import and return what is particular to a family. Raises SettingsError when a user's own cannot be imported."""
    path = path_of_traits(model) or ""
    module, _, name = path.partition(":")
    try:
        return getattr(import_named(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"model_families: {model.model_family} = {path}: {error}", "it must be importable, as package.module:TRAITS"
        ) from None
