"""The block cache: one JSON file with the detected blocks of each model.

Each entry has a fingerprint of everything that it was made from. A writer holds the lock, writes a temporary file and
renames it, so readers need no lock to see a whole file. A problem with this cache never stops a command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.atomic import replace_file
from simpletuner.system.files.cache_files import block_cache_paths, lock_of
from simpletuner.system.files.locks import exclusive_lock
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.files.unread import set_aside

Warn = Callable[[str], None]


def look_up(
    key: str, fingerprint: str, warn: Warn, environment: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """The entry of a model; None if there is none, or if its fingerprint differs."""
    # The second one has what `put` could not write below the user's home.
    for path in block_cache_paths(environment):
        entry = entries_of(path, warn).get(key)
        if isinstance(entry, dict) and entry.get("fingerprint") == fingerprint:
            return entry
    return None


def put(key: str, entry: Mapping[str, Any], warn: Warn, environment: Mapping[str, str] = os.environ) -> None:
    """Write an entry, to the system's folder for caches where the user's home cannot be written."""
    home, fallback = block_cache_paths(environment)
    why = failure_to_add(home, key, entry, warn)
    if why and not failure_to_add(fallback, key, entry, warn):
        warn(f"cannot write {home} ({why}): the block cache is {fallback}")
    elif why:
        warn(f"cannot write {home} ({why}), nor {fallback}: the result is not cached")


def failure_to_add(path: Path, key: str, entry: Mapping[str, Any], warn: Warn) -> str:
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


def entries_of(path: Path, warn: Warn) -> dict[str, Any]:
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


def to_lines(entries: Mapping[str, Any]) -> bytes:
    """Format as JSON with one entry per line."""
    # json's own `indent` is ten times slower, and other processes wait for the lock meanwhile.
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
    return f"{{\n{lines}\n}}\n".encode()
