"""Detect a denoiser's blocks on the meta device, or remember what was detected before; then no torch is needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.architecture import architecture_of, folder_of
from simpletuner.models.block_cache import look_up, put
from simpletuner.models.registry import Architecture, flavours_of
from simpletuner.parallel.blocks import BlockClass, Blocks, detect_blocks
from simpletuner.settings.sections import Model

FORM = 1
"""Of what is remembered, and of how units are chosen: a new number makes everything be detected anew."""


@dataclass(frozen=True)
class Detection:
    """What a denoiser consists of, and where the answer comes from: `source` is the path of a config.json, or where the
    architecture is published; `fingerprint` stands for the config's content and the version of diffusers."""

    model_family: str
    model_flavour: str
    pretrained_model: str
    denoiser: str
    source: str
    blocks: Blocks
    detected_at: str
    fingerprint: str
    cached: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return what scripts see, and what is remembered."""
        return {
            "model_family": self.model_family,
            "model_flavour": self.model_flavour,
            "pretrained_model": self.pretrained_model,
            "denoiser": self.denoiser,
            "source": self.source,
            "total_parameters": self.blocks.total_parameters,
            "classes": [class_as_json(item) for item in self.blocks.classes],
            "recommended": list(self.blocks.recommended),
            "outside": dict(self.blocks.outside),
            "cached": self.cached,
            "detected_at": self.detected_at,
            "fingerprint": self.fingerprint,
        }


def class_as_json(item: BlockClass) -> dict[str, Any]:
    """Return a class with its bytes."""
    sizes = {f"bytes_{name}": size * item.parameters for name, size in (("bf16", 2), ("fp32", 4))}
    return asdict(item) | sizes


def of_json(entry: Mapping[str, Any]) -> Detection | None:
    """Return a detection that is remembered, or None if the entry is not one."""
    names = [field.name for field in fields(BlockClass)]
    try:
        classes = tuple(BlockClass(**{name: frozen(item[name]) for name in names}) for item in entry["classes"])
        recommended = tuple(entry["recommended"])
        blocks = Blocks(entry["total_parameters"], classes, recommended, dict(entry["outside"]))
        own = {field.name: entry[field.name] for field in fields(Detection) if field.name not in ("blocks", "cached")}
        return Detection(**own, blocks=blocks, cached=True)
    except (KeyError, TypeError, ValueError):
        return None


def frozen(value: Any) -> Any:
    """Return a list of JSON as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def detect(model: Model, refresh: bool, warn: Callable[[str], None]) -> Detection:
    """Return what the denoiser of these settings consists of, from the block cache unless `refresh`.

    Raises SettingsError or EnvironmentFault for a model that cannot be found or built.
    """
    architecture = architecture_of(model, warn)
    mark, place = fingerprint_of(architecture), folder_of(model)
    flavour = model.model_flavour or ("" if place else next(iter(flavours_of(model.model_family)), ""))
    key = " ".join((model.model_family or "-", flavour or "-", place)).rstrip()
    entry = None if refresh else look_up(key, mark, warn)
    if entry is not None and (remembered := of_json(entry)) is not None:
        return remembered
    detection = Detection(
        model_family=model.model_family,
        model_flavour=flavour,
        pretrained_model=place,
        denoiser=architecture.class_name,
        source=architecture.source,
        blocks=built_blocks(architecture),
        detected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=mark,
    )
    put(key, detection.as_json(), warn)
    return detection


def fingerprint_of(architecture: Architecture) -> str:
    """Return what changes with the config, with diffusers, and with how we look."""
    parts = [FORM, version("diffusers"), architecture.class_name, dict(architecture.config)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def built_blocks(architecture: Architecture) -> Blocks:
    """Build a denoiser on the meta device and look at it. Raises EnvironmentFault if its config does not build one."""
    from simpletuner.models.diffusers_io import build_on_meta
    from simpletuner.models.malformed import RAISED, reason, refuse_endless

    refuse_endless(architecture.config, architecture.source)
    try:
        return detect_blocks(build_on_meta({**architecture.config, "_class_name": architecture.class_name}))
    except RAISED as error:
        raise EnvironmentNotReady(
            f"{architecture.class_name} cannot be built as {architecture.source} says: {reason(error)}",
            "see whether the file is whole; or pip install --upgrade diffusers",
        ) from None
