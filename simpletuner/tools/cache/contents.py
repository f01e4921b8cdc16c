"""What there is to list and to clear: one item per file or folder that is ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from simpletuner.deepspeed.swap_files import PREFIX, owner_of, state_of
from simpletuner.system.cache_files import (
    IN_USE,
    INDEX_SUFFIX,
    block_cache_paths,
    bytes_of,
    entries_of,
    files_of,
    is_plain_file,
    is_plain_folder,
    lock_of,
)
from simpletuner.system.locks import is_locked

READ_BYTES = 1 << 20


class Kind(StrEnum):
    """What can be cleared."""

    BLOCKS = "blocks"
    DEEPSPEED = "deepspeed"
    LATENTS = "latents"
    TEXT = "text"
    ALL = "all"


@dataclass(frozen=True)
class Item:
    """One cache; `kept` says why clearing passes it over, `others` is what lies in it and is not ours."""

    kind: Kind
    path: Path
    entries: int
    bytes: int
    in_use: bool | None = False
    kept: str = ""
    others: list[Path] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return what scripts see."""
        numbers = {"entries": self.entries, "bytes": self.bytes, "in_use": self.in_use}
        return {"kind": self.kind.value, "path": str(self.path), **numbers}


def find_blocks() -> list[Item]:
    """Return the block caches that there are."""
    return [
        Item(Kind.BLOCKS, path, entries_in_json(path), bytes_of(path), is_locked(lock_of(path)))
        for path in block_cache_paths()
        if is_plain_file(path)
    ]


def find_swap(parent: Path | None) -> tuple[list[Item], list[Path]]:
    """Return our swap folders below the offload folder, and those there that look like DeepSpeed's but are not ours."""
    items, strangers = [], []
    for path in entries_of(parent) if parent is not None else ():
        owner = owner_of(path)
        state = state_of(path, owner)
        if state == "foreign":
            strangers += [path] * path.name.startswith((PREFIX, "zero_stage_"))
            continue
        kept = {"live": f"in use by {owner}", "elsewhere": f"made by {owner}: clear it there", "dead": ""}[state]
        in_use = {"live": True, "elsewhere": None, "dead": False}[state]
        items.append(Item(Kind.DEEPSPEED, path, len(list(entries_of(path))) - 1, bytes_of(path), in_use, kept))
    return items, strangers


def find_shards(
    kind: Kind, folders: Iterable[Path], roots: Iterable[Path] = (), not_in: Path | None = None
) -> list[Item]:
    """Return the cache folders among `folders`, `roots` and what lies directly in roots; links there lead nowhere.

    What `not_in` leads to is left out unless it is one of `folders` or `roots` itself.
    """
    named = [*folders, *roots]
    below = [path for root in roots for path in entries_of(root) if is_plain_folder(path)]
    below = [path for path in below if not_in is None or path.resolve() != not_in.resolve()]
    distinct = {path.resolve(): path for path in [*below, *named]}
    items = [shards_in(kind, path) for path in distinct.values()]
    return sorted((item for item in items if item is not None), key=lambda item: item.path)


def shards_in(kind: Kind, folder: Path) -> Item | None:
    """Return a cache folder, or None if nothing in it is ours."""
    ours, others = files_of(folder)
    if not ours:
        return None
    entries = sum(lines_in(path) for path in ours if path.name.endswith(INDEX_SUFFIX))
    loose = [path for path in others if not is_plain_folder(path)]
    return Item(kind, folder, entries, sum(map(bytes_of, ours)), is_locked(folder / IN_USE), others=loose)


def lines_in(path: Path) -> int:
    """Return the number of whole lines of a file; 0 if it is gone."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in blocks_of(file))
    except FileNotFoundError:
        return 0


def blocks_of(file: Any) -> Iterator[bytes]:
    """Yield a file's bytes in pieces."""
    while block := file.read(READ_BYTES):
        yield block


def entries_in_json(path: Path) -> int:
    """Return how many entries a JSON file has; 0 if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return len(value) if isinstance(value, dict | list) else 0
