"""Detect a denoiser's blocks on the meta device, or read them from the block cache; then no torch is needed.

The cache is one JSON file with the detected blocks of each model, each with a fingerprint of everything that
it was made from. A writer holds the lock, writes a temporary file and renames it, so readers need no lock to
see a whole file. A problem with this cache never stops a command.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.catalog.architecture import architecture_of, folder_of
from simpletuner.models.catalog.preset import Architecture
from simpletuner.models.catalog.registry import flavours_of
from simpletuner.parallel.model.blocks import BlockClass, Blocks, detect_blocks
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.atomic import replace_file
from simpletuner.system.files.cache_files import block_cache_paths, lock_of
from simpletuner.system.files.locks import exclusive_lock
from simpletuner.system.files.regular_files import read_file, set_aside

Warn = Callable[[str], None]


def look_up(
    key: str, fingerprint: str, warn: Warn, environment: Mapping[str, str] = os.environ
) -> dict[str, object] | None:
    """The entry of a model; None if there is none, or if its fingerprint differs."""
    # The second one has what `put` could not write below the user's home.
    for path in block_cache_paths(environment):
        entry = entries_of(path, warn).get(key)
        if isinstance(entry, dict) and entry.get("fingerprint") == fingerprint:
            return entry
    return None


def put(key: str, entry: Mapping[str, object], warn: Warn, environment: Mapping[str, str] = os.environ) -> None:
    """Write an entry, to the system's folder for caches where the user's home cannot be written."""
    home, fallback = block_cache_paths(environment)
    why = failure_to_add(home, key, entry, warn)
    if why and not failure_to_add(fallback, key, entry, warn):
        warn(f"cannot write {home} ({why}): the block cache is {fallback}")
    elif why:
        warn(f"cannot write {home} ({why}), nor {fallback}: the result is not cached")


def failure_to_add(path: Path, key: str, entry: Mapping[str, object], warn: Warn) -> str:
    """Add an entry to a file. Returns why that is not possible, or an empty text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(lock_of(path)):
            entries = parse(path)
            if entries is None:
                set_aside(path, warn)
            replace_file(path, to_lines({**(entries or {}), key: entry}))
    except OSError as error:
        return error.strerror or str(error)
    except EnvironmentNotReady as error:
        return error.message
    return ""


def entries_of(path: Path, warn: Warn) -> dict[str, object]:
    """All entries of a file; none if there is no file. A damaged one is moved aside."""
    try:
        entries = parse(path)
        if entries is None:
            with exclusive_lock(lock_of(path)):
                entries = parse(path)  # another process may have replaced it meanwhile
                if entries is None:
                    set_aside(path, warn)
    except OSError as error:
        warn(f"cannot read {path}: {error.strerror}")
        return {}
    return entries or {}


def parse(path: Path) -> dict[str, Any] | None:
    """Entries of a file; empty if it does not exist, None if it is damaged. Raises OSError."""
    try:
        entries = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError):
        return None
    return entries if isinstance(entries, dict) else None


def to_lines(entries: Mapping[str, object]) -> bytes:
    """Format as JSON with one entry per line."""
    # json's own `indent` is ten times slower, and other processes wait for the lock meanwhile.
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
    return f"{{\n{lines}\n}}\n".encode()


# Version of the cached form and of how units are chosen: a new number makes all cached entries invalid.
CACHE_VERSION = 2


@dataclass(frozen=True)
class Detection:
    """The blocks of a denoiser. `source` is the path of a config.json, or the URL where the architecture is
    published; `fingerprint` is a hash of the config's content and the version of diffusers."""

    model_family: str
    model_flavour: str
    pretrained_model: str
    denoiser: str
    source: str
    blocks: Blocks
    detected_at: str
    fingerprint: str
    lora_targets: Mapping[str, Mapping[str, int]]
    """Attention projections: layers that end with each name, and the LoRA's parameters for each rank."""
    cached: bool = False

    def as_json(self) -> dict[str, object]:
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


def to_tuple(value: object) -> Any:
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
    """Read an earlier detection of this architecture by this version of diffusers; imports no torch."""
    entry = look_up(key_of(model), fingerprint_of(architecture), warn)
    return from_json(entry) if entry is not None else None


def flavour_detected(model: Model) -> str:
    """The flavour that the settings mean: the family's default where they name no folder either."""
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
