"""Counts of earlier commands and starts, kept in the user's home: one file for each thing that was counted.

A record answers only the very question that it holds: family, configs, settings, shapes, versions of the
libraries, and the code that counts. It is written whole or not at all, and ends with a checksum; whatever
else lies there counts as nothing, and is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import simpletuner
from simpletuner.launch.node_info import versions
from simpletuner.models.family.base import ModelFamily
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.regular_files import MALFORMED, read_file

T = TypeVar("T")

FOLDER = "counts"
# The newest are kept: 0.1 MB each for FLUX.
MOST_RECORDS = 500
FAMILIES = "simpletuner.models.families."
SOURCES = ("counting", "models/families", "models/family", "parallel/model", "private_api")
"""Folders of the package whose code decides a count."""
# Settings of `model` that say where it is: its config decides.
ELSEWHERE = {"pretrained_model_name_or_path", "revision", "variant"}


@dataclass(frozen=True)
class CountRecord:
    """The place for one number, or for a trace."""

    facts: Mapping[str, Any] | None
    """Everything that it depends on, as JSON. Nothing is kept of a class of the user's (None)."""

    @classmethod
    def of(cls, family: ModelFamily, kind: str, **facts: Any) -> CountRecord:
        # The class of a user, and a pipeline that is called as it is, run code that no version names.
        is_ours = type(family).__module__.startswith(FAMILIES)
        return cls({"kind": kind, "family": facts_of(family), **facts} if is_ours else None)

    @property
    def path(self) -> Path:
        return user_home(os.environ) / FOLDER / f"{checksum(self.facts)[:16]}.json"

    def get(self, parse: Callable[[Any], T], count: Callable[[], T], dump: Callable[[T], object]) -> T:
        """Return what was counted before; else count, and keep it. `parse` may raise MALFORMED."""
        if self.facts is None:
            return count()
        with suppress(OSError, *MALFORMED):
            return parse(self.read())
        found = count()
        with suppress(OSError):  # no reason to end a command
            self.write(dump(found))
        return found

    def number(self, count: Callable[[], int]) -> int:
        return self.get(as_number, count, as_number)

    def read(self) -> Any:
        """Return the written value of these facts. Raises OSError or MALFORMED for anything else."""
        content, _, written = read_file(self.path).decode().rpartition("\n")
        if hashlib.sha256(content.encode()).hexdigest() != written:
            raise ValueError("not whole")
        found = json.loads(content)
        if checksum(found["facts"]) != checksum(self.facts):
            raise ValueError("of something else")
        return found["value"]

    def write(self, value: object) -> None:
        """Write a value, and remove what is old. Raises OSError."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"facts": self.facts, "value": value}).encode()
        write_file(self.path, content, b"\n", hashlib.sha256(content).hexdigest().encode())
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - MOST_RECORDS)]:
            path.unlink(missing_ok=True)


def as_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    return value


def checksum(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def facts_of(family: ModelFamily) -> dict[str, object]:
    """Return, as JSON, what every count of a family depends on."""
    settings = family.settings
    return {
        "class": f"{type(family).__module__}.{type(family).__qualname__}",
        "config": family.config,
        "vae": family.vae_config,
        "model": settings.model.model_dump(mode="json", exclude=ELSEWHERE),
        "lora": settings.lora.model_dump(mode="json") if settings.model.model_type == "lora" else {},
        "versions": {**versions(), "peft": installed("peft")},
        "code": checksum_of_code(),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def checksum_of_code() -> str:
    """Hash the files that decide a count, so that no record of other code is read."""
    package, digest = Path(simpletuner.__file__).parent, hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(read_file(path))
    return digest.hexdigest()
