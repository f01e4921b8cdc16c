"""The block cache: one JSON file that remembers, by model, what was detected in it.

Each entry carries the fingerprint of all that it was made from. Who writes holds the lock, writes beside and renames,
so whoever reads, without a lock, sees a whole file. Nothing that is wrong with this cache ever stops a command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import block_cache_paths, damaged_of, lock_of
from simpletuner.system.files import read_file, replace_file
from simpletuner.system.locks import exclusive_lock

Warn = Callable[[str], None]


def look_up(
    key: str, fingerprint: str, warn: Warn, environment: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """Return the entry of a model, or None if there is none, or if what it was made from has changed."""
    for path in block_cache_paths(environment):
        entry = entries_of(path, warn).get(key)
        if isinstance(entry, dict) and entry.get("fingerprint") == fingerprint:
            return entry
    return None


def put(key: str, entry: Mapping[str, Any], warn: Warn, environment: Mapping[str, str] = os.environ) -> None:
    """Remember an entry; where the user's home cannot be written, in the system's folder for caches."""
    home, elsewhere = block_cache_paths(environment)
    why = failure_to_add(home, key, entry, warn)
    if why and not failure_to_add(elsewhere, key, entry, warn):
        warn(f"cannot write {home} ({why}): the block cache is {elsewhere}")
    elif why:
        warn(f"cannot write {home} ({why}), nor {elsewhere}: the answer is not remembered")


def failure_to_add(path: Path, key: str, entry: Mapping[str, Any], warn: Warn) -> str:
    """Add an entry to a file and return nothing; or why that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(lock_of(path)):
            entries = parsed(path)
            if entries is None:
                set_aside(path, warn)
            replace_file(path, in_lines({**(entries or {}), key: entry}))
    except OSError as error:
        return error.strerror or str(error)
    except EnvironmentNotReady as error:
        return error.message
    return ""


def entries_of(path: Path, warn: Warn) -> dict[str, Any]:
    """Return all entries of a file; none if there is no file. A damaged one is moved aside."""
    try:
        entries = parsed(path)
        if entries is None:
            with exclusive_lock(lock_of(path)):
                entries = parsed(path)  # another process may have made it anew meanwhile
                if entries is None:
                    set_aside(path, warn)
    except OSError as error:
        warn(f"cannot read {path}: {error.strerror}")
        return {}
    return entries or {}


def parsed(path: Path) -> dict[str, Any] | None:
    """Return what a file holds, nothing if it is not there; None if it is damaged. Raises OSError."""
    try:
        entries = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError):
        return None
    return entries if isinstance(entries, dict) else None


def in_lines(entries: Mapping[str, Any]) -> bytes:
    """Return JSON with an entry per line; json's own `indent` is ten times slower, and others wait."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
    return f"{{\n{lines}\n}}\n".encode()


def set_aside(path: Path, warn: Warn) -> None:
    """Move a damaged file aside, and say so. Raises OSError."""
    path.replace(damaged_of(path))
    warn(f"{path} was damaged: it is set aside as {damaged_of(path).name}, and made anew")
