"""The folder of a check: made on any node, and gone again when the last node leaves, even one that was killed.

All that a node writes begins with its rank and lies in `PATH/.simpletuner-nfs-check/`. A node's card (`0-card.json`)
is the first thing that it writes and the last that it removes; a file whose owner has no card belongs to nobody.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = ".simpletuner-nfs-check"
MADE = "made-folders.json"
CARD = "card.json"
GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True)
class Place:
    """A path to check, absolute and without symlinks, and the folder in it where nodes meet."""

    path: Path

    @property
    def folder(self) -> Path:
        """Return the folder where nodes meet."""
        return self.path / FOLDER

    def own(self, rank: int, name: str) -> Path:
        """Return where a node keeps something of its own."""
        return self.folder / f"{rank}-{name}"

    def probe(self, rank: int) -> Path:
        """Return the file that shows whether the path itself can be written; it lives for a moment."""
        return self.path / f"{FOLDER}.probe-{rank}"

    def make(self) -> None:
        """Make the path and the folder, open to every user, and note which folders of the path are new."""
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's node made it
            self.folder.chmod(0o777)
        if missing:
            (self.folder / MADE).write_text(json.dumps([str(path) for path in missing]), encoding="utf-8")

    def clear(self, rank: int) -> None:
        """Remove what a node wrote, its card last."""
        self.probe(rank).unlink(missing_ok=True)
        for path in sorted(self.folder.glob(f"{rank}-*")):
            if path.name != f"{rank}-{CARD}":
                removed(path)
        self.own(rank, CARD).unlink(missing_ok=True)

    def leave(self, rank: int) -> None:
        """Remove what a node wrote and what belongs to nobody; the last one removes the folders that were made."""
        self.clear(rank)
        paths = sorted(self.folder.glob("[0-9]*-*"))
        present = {path.name.partition("-")[0] for path in paths if path.name.endswith(f"-{CARD}")}
        for path in paths:
            if path.name.partition("-")[0] not in present:
                removed(path)
        self.remove_when_empty()

    def remove_when_empty(self) -> None:
        """Remove the folder, and those of the path that were made for it, if nobody needs them."""
        note = self.folder / MADE
        with contextlib.suppress(OSError, ValueError):  # somebody else comes, or leaves at the same moment
            if {path.name for path in self.folder.iterdir()} - {MADE}:
                return
            made = json.loads(note.read_text(encoding="utf-8")) if note.exists() else []
            note.unlink(missing_ok=True)
            self.folder.rmdir()
            for path in made:
                Path(path).rmdir()


def removed(path: Path) -> None:
    """Remove a file or a folder, whoever else removes it at the same time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, value: Any) -> None:
    """Write a file under its name in one step, readable by every user."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.chmod(0o644)
    new.replace(path)


def look_anew(folder: Path) -> None:
    """Change a folder, so that a client asks its server what is in it."""
    look = folder / f"look.{uuid.uuid4().hex}"
    look.touch()
    look.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Return what a file holds; None while it is missing or not yet whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
