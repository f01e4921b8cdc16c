"""Folder of a check: created by any node, removed with the last node, even if that was killed.

Everything that a node writes is in `PATH/.simpletuner-nfs-check/` and begins with the node's rank. A node
writes its card (`0-card.json`) first and removes it last; files of a rank without a card are stale.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from simpletuner.launch.node_info import parse_node_info
from simpletuner.launch.store import MessageStore
from simpletuner.system.files.atomic import create_new, remove

FOLDER = ".simpletuner-nfs-check"
CREATED = "made-folders."
"""Prefix of records of created folders. Each is a file of its own: nodes start at the same moment."""
ARRIVAL_ATTEMPTS = 20
T = TypeVar("T")

GONE = (errno.ENOENT, errno.ESTALE)


class FolderStore:
    """A Store (`launch/store.py`) in a shared folder, in which every key has one writer.

    Clients of shared filesystems cache the content and size of files, and that a name does not exist. So no
    file is written twice (each `set` writes a new version, `KEY.3.json`, and removes the one before), and no
    name is opened before the folder lists it. Only the listing itself is cached: see `invalidate_dir_cache`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        version = self.versions[key] = self.versions.get(key, -1) + 1
        write_atomically(self.folder / f"{key}.{version}.json", value)
        if version:
            (self.folder / f"{key}.{version - 1}.json").unlink(missing_ok=True)

    def existing(self, keys: Collection[str]) -> set[str]:
        return set(self._latest()).intersection(keys)

    def all_exist(self, keys: Collection[str]) -> bool:
        return self.existing(keys) == set(keys)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys; empty for one that was removed or replaced after the folder was listed."""
        latest = self._latest() if keys else {}
        found = [read_bytes(self.folder / latest[key][1]) if key in latest else None for key in keys]
        return [value or b"" for value in found]

    def compare_set(self, key: str, expected: bytes, desired: str) -> bytes:
        """Create a key. Replacing a value would need a lock, which the check cannot rely on."""
        if expected:
            raise NotImplementedError("a folder can only create keys")
        path = self.folder / f"{key}.json"
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            return read_bytes(path) or b""
        try:
            with file:
                file.write(desired)
        except OSError:  # such as a full disk: half a value must not stay
            path.unlink(missing_ok=True)
            raise
        return desired.encode()

    def _latest(self) -> dict[str, tuple[int, str]]:
        """List the folder; return the latest version of each key, and its file name."""
        latest: dict[str, tuple[int, str]] = {}
        for name in os.listdir(self.folder):  # noqa: PTH208 - only names are needed
            if found := re.fullmatch(r"(.+?)(?:\.(\d+))?\.json", name):
                key, version = found[1], int(found[2] or 0)
                latest[key] = max(latest.get(key, (-1, "")), (version, name))
        return latest


@dataclass(frozen=True)
class Workspace:
    """The path to check, absolute and without symlinks, and the folder in it that the nodes use."""

    path: Path

    @property
    def folder(self) -> Path:
        return self.path / FOLDER

    def file(self, rank: int, name: str) -> Path:
        return self.folder / f"{rank}-{name}"

    def probe(self, rank: int) -> Path:
        """Return the file that tests for a moment whether the path itself can be written."""
        return self.path / f"{FOLDER}.probe-{rank}"

    def create(self) -> None:
        """Create path and folder, writable for every user, and record which of them are new."""
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's node created it
            self.folder.chmod(0o777)
        if missing:
            with create_new(self.folder / f"{CREATED}{uuid.uuid4().hex}.json") as file:
                file.write(json.dumps([str(path) for path in missing]).encode())

    def leave(self, rank: int) -> None:
        """Remove a node's files, its card last, and stale ones; the last node removes created folders."""
        self.probe(rank).unlink(missing_ok=True)
        files = [(path.name.partition("-")[0], path) for path in sorted(self.folder.glob("[0-9]*-*"))]
        present = {owner for owner, path in files if path.name == f"{card_key(owner)}.json"} - {str(rank)}
        # The card goes last: while it is there, no other process takes this rank and its files.
        own_card = self.folder / f"{card_key(rank)}.json"
        for owner, path in sorted(files, key=lambda file: (file[0] != str(rank), file[1] == own_card)):
            if owner not in present:
                remove(path)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # another node arrives or leaves meanwhile
            records = list(self.folder.iterdir())
            if not all(record.name.startswith(CREATED) for record in records):
                return
            created = {path for record in records for path in json.loads(read_bytes(record) or b"[]")}
            for record in records:
                record.unlink(missing_ok=True)
            self.folder.rmdir()
            for path in sorted(created, key=len, reverse=True):
                Path(path).rmdir()


def arriving(action: Callable[[], T]) -> T:
    """Repeat `action` where an earlier check's last node removes the folder meanwhile. Raises OSError."""
    for _ in range(ARRIVAL_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return action()
    return action()


@contextmanager
def cleanup_after_kill(workspace: Workspace, rank: int, nonce: str) -> Iterator[None]:
    """Fork a process that removes this node's files if this one is killed. Enter before any thread.

    It blocks in a read of a pipe whose other end only this process holds: any death closes that.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        clean_up_after_parent(reading, workspace, rank, nonce)
    os.close(reading)
    try:
        yield
    finally:
        os.write(writing, b"x")  # cleanup already ran; tell the helper process to exit
        os.close(writing)
        os.waitpid(pid, 0)


def clean_up_after_parent(pipe: int, workspace: Workspace, rank: int, nonce: str) -> None:
    try:
        # Out of the terminal's group, whose signals are not for it, and off mounts that it would keep busy.
        os.setsid()
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # whoever reads the parent's output waits until all copies of it are closed
            os.dup2(null, standard)
        # What the parent has locked, or listens on, must be free when the parent is dead.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        if os.read(pipe, 1) == b"":
            messages = MessageStore(FolderStore(workspace.folder))
            card = messages.read(card_key(rank), parse_node_info) if workspace.folder.exists() else None
            if card is None or card.nonce == nonce:  # a card that is half written can only be its own
                workspace.leave(rank)
    finally:
        # Not sys.exit: buffers and atexit functions are copies of the parent's.
        os._exit(0)


def card_key(rank: int | str) -> str:
    return f"{rank}-card"


def write_atomically(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    with create_new(new) as file:
        file.write(text.encode())
        os.fchmod(file.fileno(), 0o644)  # whatever the umask: nodes may run as different users
    new.replace(path)


def read_bytes(path: Path) -> bytes | None:
    """Read a file; None if it does not exist any more."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def invalidate_dir_cache(folder: Path) -> None:
    # A client that has changed a folder reads its listing from the server again.
    probe = folder / f"look.{uuid.uuid4().hex}"
    probe.touch()
    probe.unlink(missing_ok=True)
