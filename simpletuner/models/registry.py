"""Which model families there are, by name only: no torch here, so that help and mistakes are answered at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpletuner.errors import SettingsError
from simpletuner.settings.loading import nearest
from simpletuner.settings.sections import Model

if TYPE_CHECKING:
    from simpletuner.models.family import Family

TINY = "tiny"


@dataclass(frozen=True)
class Entry:
    """One family: where its class is, its published flavours as hub ids, the default first, and the denoiser's size."""

    path: str
    flavours: Mapping[str, str]
    parameters: int | None = None


FAMILIES: dict[str, Entry] = {
    "sdxl": Entry(
        "simpletuner.models.sdxl:Sdxl",
        {
            "base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
            "base-0.9": "stabilityai/stable-diffusion-xl-base-0.9",
        },
        parameters=2_567_463_684,
    ),
    "flux": Entry(
        "simpletuner.models.flux:Flux",
        {
            "dev": "black-forest-labs/FLUX.1-dev",
            "krea": "black-forest-labs/FLUX.1-Krea-dev",
            "schnell": "black-forest-labs/FLUX.1-schnell",
        },
        parameters=11_901_408_320,
    ),
}


def check_model(model: Model) -> None:
    """Raise SettingsError for a family or flavour that is not known, with the nearest one."""
    entry = FAMILIES.get(model.model_family)
    if entry is None:
        raise SettingsError(
            f"Unknown model_family '{model.model_family}'{nearest(model.model_family, FAMILIES)}",
            f"known families: {', '.join(FAMILIES)}",
        )
    if model.model_flavour not in ("", TINY, *entry.flavours):
        known = [*entry.flavours, TINY]
        near = nearest(model.model_flavour, known)
        raise SettingsError(
            f"Unknown model_flavour '{model.model_flavour}' of {model.model_family}{near}",
            f"known flavours: {', '.join(known)}",
        )


def published_name(model: Model) -> str:
    """Return the hub id of the chosen flavour, or of the family's default one."""
    flavours = FAMILIES[model.model_family].flavours
    return flavours[model.model_flavour] if model.model_flavour else next(iter(flavours.values()))


def family_class(key: str) -> type[Family]:
    """Import and return the class of a family."""
    module, _, name = FAMILIES[key].path.partition(":")
    return getattr(importlib.import_module(module), name)
