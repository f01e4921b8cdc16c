"""Find picture files below a folder, without what a run itself writes there; count what is not read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

NOT_READ = frozenset(
    {".heic", ".heif", ".avif", ".gif", ".tif", ".tiff", ".bmp", ".jp2", ".jxl", ".jfif", ".psd", ".exr", ".hdr"}
    | {".svg", ".tga", ".ppm", ".pgm", ".ico", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"}
    | {".mp4", ".mov", ".webm", ".mkv", ".avi", ".zip", ".tar", ".parquet"}
)
"""Suffixes of files that a user may take for training data."""

OWN_NAMES = frozenset({"cache", "checkpoints", "validation", "logs", "pipeline", "pipeline-ema", "loss.png"})
"""What a run writes into output_dir, for users who keep pictures in the same folder."""

Identity = tuple[int, int]
"""Device and inode: which folder this is, whatever path leads to it."""


@dataclass
class Scan:
    """A search below `folder`; `written` are output_dir and the caches, in which nothing is found."""

    folder: Path
    written: Sequence[Path] = ()
    not_read: list[Path] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)

    def pictures(self) -> Iterator[Path]:
        """Yield every picture file, hidden ones left out, in no particular order.

        Links are followed, but never into a folder that they lie in. Raises DataError for a folder that cannot be read.
        """
        own = frozenset(filter(None, map(identity, self.written)))
        yield from self._walk(self.folder, frozenset(), own)

    def _walk(self, folder: Path, above: frozenset[Identity], own: frozenset[Identity]) -> Iterator[Path]:
        this = identity(folder)
        if this is None or this in above:
            return
        names = OWN_NAMES if this in own else frozenset()
        if this in own and above:
            self.left_out.append(folder)
            return
        for entry in entries_of(folder):
            if entry.name.startswith("."):
                continue
            if entry.name in names:
                self.left_out.append(Path(entry.path))
            elif is_folder(entry):
                yield from self._walk(Path(entry.path), above | {this}, own)
            else:
                suffix = Path(entry.name).suffix.lower()
                if suffix in SUFFIXES:
                    yield Path(entry.path)
                elif suffix in NOT_READ:
                    self.not_read.append(Path(entry.path))


def identity(folder: Path) -> Identity | None:
    """Return which folder a path leads to, None if there is none."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return what lies in a folder. Raises DataError where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}", "check its rights") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or leads to one; a link that leads in circles is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False
