"""Files in the user's home that say which base models were found complete, so that later starts skip the check.

Most of the check's time imports the classes of text encoders, which a start with warm caches does not need.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.launch.node_info import versions
from simpletuner.models.family.base import ModelFamily
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.checksums import stream_checksum
from simpletuner.system.files.regular_files import open_regular, read_file

NOTES = "base_models"
HEADER_LENGTH_BYTES = 8
"""At the beginning of a safetensors file."""
MOST_READ_BYTES = 100 << 20
"""The largest header that safetensors reads; the largest published tokenizers have 33 MB."""

CHECKS = 2
"""Version of the checks, raised with each that is added: earlier notes do not say that it was passed."""


def is_checked(family: ModelFamily) -> bool:
    """Return whether a start has found the same files complete, with the same settings and versions."""
    return read_note(note_of(family)) == facts_of(family)


def note_checked(family: ModelFamily) -> None:
    """Note that a base model is complete, once a start has been found right in all else, too."""
    with suppress(OSError):  # no reason to end a run
        note_of(family).parent.mkdir(parents=True, exist_ok=True)
        write_json(note_of(family), facts_of(family))


def note_of(family: ModelFamily) -> Path:
    """Return the file for a base model with these settings, in the home rather than the run's folder: its next run has
    another folder, and a bucket or another machine does not have this one's files."""
    named = json.dumps([str(family.folder.absolute()), family.settings.model.model_dump(mode="json")])
    return user_home(os.environ) / NOTES / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def facts_of(family: ModelFamily) -> dict[str, Any]:
    """Return, as JSON has it, what the verdict depends on: settings of the model, versions, and what is read of each
    file."""
    paths = (path for path in sorted(family.folder.rglob("*")) if path.is_file())
    files = {path.relative_to(family.folder).as_posix(): identity_of(path) for path in paths}
    model = family.settings.model.model_dump(mode="json")
    return {"checks": CHECKS, "folder": str(family.folder), "model": model, "versions": versions(), "files": files}


def identity_of(path: Path) -> list[Any]:
    """Return a file's size and the checksum of what the check reads: the header of weights, other files whole.

    Times would not do: a disk that loses a bit changes none. What is larger than any config or tokenizer has its time.
    """
    import xxhash

    size = path.stat().st_size
    with open_regular(path) as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
            return [size, length, xxhash.xxh3_64_hexdigest(file.read(min(length, MOST_READ_BYTES)))]
        if size > MOST_READ_BYTES:
            return [size, path.stat().st_mtime_ns]
        return [size, stream_checksum(file)]


def read_note(path: Path) -> Any:
    """Return what a note holds; None if there is none, or a damaged one."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
