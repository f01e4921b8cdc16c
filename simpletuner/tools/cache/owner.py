"""Say whose a cache is that cannot be cleared."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from simpletuner.system.files.locks import RUN_LOCK, describe_holder, is_locked
from simpletuner.tools.cache.contents import CacheItem


def describe_owner(item: CacheItem, output: Path) -> str:
    """Name the run that uses a cache: by the swap folder's owner, else by who holds the output folder."""
    if item.kept:
        return f"{item.path}: {item.kept}"
    holder = ""
    if is_locked(output / RUN_LOCK):
        with suppress(OSError):
            holder = describe_holder((output / RUN_LOCK).read_text(encoding="utf-8", errors="replace"))
    return f"{item.path} is in use by a run{holder}: stop it, or wait for it"
