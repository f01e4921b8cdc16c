"""Detect a denoiser's blocks on the meta device, or read them from the block cache; then no torch is needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.analysis.block_cache import look_up, put
from simpletuner.models.catalog.architecture import architecture_of, folder_of
from simpletuner.models.catalog.preset import Architecture
from simpletuner.models.catalog.registry import flavours_of
from simpletuner.parallel.model.blocks import BlockClass, Blocks, detect_blocks
from simpletuner.settings.declared.sections import Model

CACHE_VERSION = 2
"""Version of the cached form and of how units are chosen: a new number makes all cached entries invalid."""


@dataclass(frozen=True)
class Detection:
    """The blocks of a denoiser. `source` is the path of a config.json, or the URL where the architecture is published;
    `fingerprint` is a hash of the config's content and the version of diffusers."""

    model_family: str
    model_flavour: str
    pretrained_model: str
    denoiser: str
    source: str
    blocks: Blocks
    detected_at: str
    fingerprint: str
    lora_targets: Mapping[str, Mapping[str, int]]
    """The attention projections: how many layers end with each name, and the LoRA's parameters for each rank."""
    cached: bool = False

    def as_json(self) -> dict[str, Any]:
        """The form of `--json` and of the block cache."""
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
            "lora_targets": {name: dict(counts) for name, counts in self.lora_targets.items()},
            "cached": self.cached,
            "detected_at": self.detected_at,
            "fingerprint": self.fingerprint,
        }


def class_as_json(item: BlockClass) -> dict[str, Any]:
    sizes = {f"bytes_{name}": size * item.parameters for name, size in (("bf16", 2), ("fp32", 4))}
    return asdict(item) | sizes


def from_json(entry: Mapping[str, Any]) -> Detection | None:
    """Read a cached detection; None if the entry is not one."""
    names = [field.name for field in fields(BlockClass)]
    try:
        classes = tuple(BlockClass(**{name: to_tuple(item[name]) for name in names}) for item in entry["classes"])
        recommended = tuple(entry["recommended"])
        blocks = Blocks(entry["total_parameters"], classes, recommended, dict(entry["outside"]))
        own = {field.name: entry[field.name] for field in fields(Detection) if field.name not in ("blocks", "cached")}
        return Detection(**own, blocks=blocks, cached=True)
    except (KeyError, TypeError, ValueError):
        return None


def to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def detect(model: Model, refresh: bool, warn: Callable[[str], None]) -> Detection:
    """Find the blocks of the denoiser that the settings name, in the block cache unless `refresh`.

    Raises SettingsError or EnvironmentNotReady for a model that cannot be found or built.
    """
    architecture = architecture_of(model, warn)
    if not refresh and (cached := find_cached(model, architecture, warn)) is not None:
        return cached
    fingerprint = fingerprint_of(architecture)
    blocks, lora_targets = build_and_detect(architecture)
    detection = Detection(
        model_family=model.model_family,
        model_flavour=flavour_detected(model),
        pretrained_model=folder_of(model),
        denoiser=architecture.class_name,
        source=architecture.source,
        blocks=blocks,
        lora_targets=lora_targets,
        detected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
    )
    put(key_of(model), detection.as_json(), warn)
    return detection


def find_cached(model: Model, architecture: Architecture, warn: Callable[[str], None]) -> Detection | None:
    """Return what was detected earlier of the same architecture, by the same version of diffusers; no torch."""
    entry = look_up(key_of(model), fingerprint_of(architecture), warn)
    return from_json(entry) if entry is not None else None


def flavour_detected(model: Model) -> str:
    """The flavour that the settings mean: the family's default one where they name neither that nor a folder."""
    return model.model_flavour or ("" if folder_of(model) else next(iter(flavours_of(model.model_family)), ""))


def key_of(model: Model) -> str:
    return " ".join((model.model_family or "-", flavour_detected(model) or "-", folder_of(model))).rstrip()


def fingerprint_of(architecture: Architecture) -> str:
    """A hash that changes with the config, the version of diffusers, and our rules."""
    parts = [CACHE_VERSION, version("diffusers"), architecture.class_name, dict(architecture.config)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build_and_detect(architecture: Architecture) -> tuple[Blocks, dict[str, dict[str, int]]]:
    """Build a denoiser on the meta device, and find its blocks and its attention projections.

    Raises EnvironmentNotReady if it cannot be built.
    """
    from simpletuner.models.family.adapter import count_targets
    from simpletuner.models.folder.diffusers_io import build_on_meta
    from simpletuner.models.folder.malformed import RAISED, reason, refuse_too_many_modules

    refuse_too_many_modules(architecture.config, architecture.source)
    try:
        config = {**architecture.config, "_class_name": architecture.class_name}
        model = build_on_meta(config, include_buffers=True)
        return detect_blocks(model), count_targets(model)
    except RAISED as error:
        raise EnvironmentNotReady(
            f"{architecture.class_name} cannot be built as {architecture.source} says: {reason(error)}",
            "see whether the file is whole; or pip install --upgrade diffusers",
        ) from None
