"""Names of simpletuner's files in cache folders. A file of any other name is never touched."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

SHARD_SUFFIX, INDEX_SUFFIX = ".shard", ".index.jsonl"

BLOCK_CACHE = "fsdp_block_cache.json"

# The lock file of a cache folder; see `lease_folder.shared_folders`.
IN_USE = ".in-use"

MERGED_INDEX = "merged.index"
"""Records of a cache folder, derived from the indexes of its shards."""

COMPLETE = "complete.json"
"""Note of requests with all their records in a cache folder."""

SHARDS = rf"rank\d{{3,}}-\d{{5,}}({re.escape(SHARD_SUFFIX)}|{re.escape(INDEX_SUFFIX)})"
DERIVED = f"({re.escape(MERGED_INDEX)}|{re.escape(COMPLETE)})"
OURS = re.compile(rf"{SHARDS}|{re.escape(IN_USE)}(\.\d+)?|{DERIVED}|\.({DERIVED}|{SHARDS})(\.\w+)?\.unfinished")


def shard_name(rank: int, number: int) -> str:
    return f"rank{rank:03d}-{number:05d}{SHARD_SUFFIX}"


def index_of(shard: Path) -> Path:
    return shard.with_name(shard.name.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX)


def shard_of(index: Path) -> Path:
    return index.with_name(index.name.removesuffix(INDEX_SUFFIX) + SHARD_SUFFIX)


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of a cache folder that simpletuner wrote, and all else; links count as written by others."""
    ours: list[Path] = []
    others: list[Path] = []
    for path in entries_of(folder):
        (ours if OURS.fullmatch(path.name) and is_plain_file(path) else others).append(path)
    return ours, others


def entries_of(folder: Path) -> Iterator[Path]:
    """Yield the contents of a folder, sorted; nothing if it does not exist or was removed."""
    try:
        yield from sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return


def is_plain_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def is_plain_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def bytes_of(path: Path) -> int:
    """Bytes on disk of a file, or of all files below a folder; 0 for links and files removed meanwhile."""
    if is_plain_folder(path):
        return sum(bytes_of(child) for child in entries_of(path))
    try:
        return disk_bytes(path.lstat()) if is_plain_file(path) else 0
    except FileNotFoundError:
        return 0


def disk_bytes(state: os.stat_result) -> int:
    # Less than the size of sparse files. Up to 4 KiB the size: inline data has no blocks.
    # st_blocks counts 512 bytes each, whatever the file system's blocks are (stat(2)).
    return min(state.st_size, state.st_blocks * 512) if state.st_size > 4096 else state.st_size


def block_cache_paths(environment: Mapping[str, str] = os.environ) -> tuple[Path, Path]:
    """Return the file that caches which blocks were detected in which model, and the fallback if it is not
    writable: in the user's home (see `user_home`), else in the system's folder for caches.
    """
    from platformdirs import user_cache_path

    return user_home(environment) / BLOCK_CACHE, user_cache_path("simpletuner") / BLOCK_CACHE


def user_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for per-user files that belong to no run; SIMPLETUNER_HOME overrides it."""
    return Path(environment.get("SIMPLETUNER_HOME") or "~/.simpletuner").expanduser()


def lock_of(block_cache: Path) -> Path:
    """Return the file to lock (`locks.exclusive_lock`) while a block cache is read, changed and written."""
    return block_cache.with_suffix(".lock")
