"""The folder of a check: made on any node, and gone again when the last node leaves, even one that was killed.

All that a node writes begins with its rank and lies in `PATH/.simpletuner-nfs-check/`. A node's card (`0-card.json`)
is the first thing that it writes and the last that it removes; a file whose owner has no card belongs to nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

FOLDER = ".simpletuner-nfs-check"
MADE = "made-folders.json"
CARD = "card.json"


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


class Janitor:
    """A small process of its own that clears up after this one, should it be killed where nothing can be caught.

    It sleeps in a read of a pipe, whose other end only this process holds: the kernel closes it at any death.
    """

    def __init__(self, place: Place, rank: int, token: str) -> None:
        reading, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            watch(reading, place, rank, token)
        os.close(reading)

    def __enter__(self) -> Janitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the janitor home: this process has cleared up itself."""
        os.write(self.pipe, b"x")
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


def watch(pipe: int, place: Place, rank: int, token: str) -> None:
    """Wait for the parent's end, clear up if it came without a word, and end this process."""
    try:
        os.setsid()
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # whoever reads the parent's output waits until all copies of it are closed
            os.dup2(nothing, standard)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        if os.read(pipe, 1) == b"" and card_token(place.own(rank, CARD)) in ("", token):
            place.leave(rank)
    finally:
        os._exit(0)


def card_token(card: Path) -> str:
    """Return whose card it is, or nothing."""
    try:
        return json.loads(card.read_text(encoding="utf-8")).get("token", "")
    except (OSError, ValueError):
        return ""
