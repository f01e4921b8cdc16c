"""Atomic file and directory writes: write to a temporary name, fsync, rename."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from simpletuner.errors import EnvironmentNotReady, SettingsError, naming
from simpletuner.system.files.promises import rename_over, sync
from simpletuner.system.files.regular_files import open_regular

# Linux reads no more than its read-ahead window for one request, by default 128 KiB (mm/readahead.c).
READ_AHEAD_BYTES = 128 << 10


def unfinished_path(folder: Path) -> Path:
    """Return the hidden sibling to which a file or folder is written before it is renamed to its final name."""
    return folder.with_name(f".{folder.name}.unfinished")


def replace_folder(new: Path, folder: Path) -> None:
    """Sync `new` and rename it to `folder`. The previous folder is removed only once the new one is in place."""
    old = folder.with_name(f".{folder.name}.old")
    flush_tree(new)
    remove(old)
    if os.path.lexists(folder):
        folder.rename(old)
    new.rename(folder)
    flush_to_disk(folder.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its contents; what cannot be removed from a folder stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def restore_replaced(folder: Path) -> None:
    """Finish an interrupted `replace_folder`, or undo it if the new folder was not in place yet."""
    old = folder.with_name(f".{folder.name}.old")
    if old.is_dir() and not old.is_symlink() and not folder.exists():
        old.rename(folder)
    remove(old)


@contextmanager
def atomic_file(path: Path, durably: bool = True, mode: int = 0o666, hidden: str = "") -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name, `path`, once it is whole and synced. A link is replaced.

    All of it happens in the folder that is opened first, under a name that is created exclusively: an archive may have
    brought links by that name, or by the final one, to any file of its reader's. `hidden` is another such name.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = hidden or unfinished_path(path).name
    try:
        file = create_new(new, folder, mode)
        try:
            with naming(path), file:
                yield file
                file.flush()
                if durably:
                    sync(file.fileno())
            rename_over(new, path.name, folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)
            raise
        if durably:
            sync(folder)
    finally:
        os.close(folder)


def create_new(name: Path | str, folder: int | None = None, mode: int = 0o666) -> BinaryIO:
    """Open a file that nobody else has, for writing; a file or link of that name is removed. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, mode, dir_fd=folder), "wb")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a user's file atomically. A link of its name is followed and the mode is kept. Raises OSError."""
    if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout, cannot be renamed over
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
            file.write(content)
        return
    path = path.resolve()
    with atomic_file(path) as file:
        if path.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        file.write(content)


def write_json(path: Path, value: object) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode("utf-8"))


def write_file(path: Path, *content: bytes | memoryview) -> None:
    """Write one of a run's own files, atomically and durably. A symbolic link is replaced, not followed."""
    with atomic_file(path) as file:
        file.writelines(content)


def read_ahead(paths: Sequence[Path]) -> None:
    """Have the kernel bring regular files into the page cache, in the background; what cannot be read is left out."""

    def advise() -> None:
        for path in paths:
            with suppress(OSError), open_regular(path) as file:
                for start in range(0, os.fstat(file.fileno()).st_size, READ_AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    if hasattr(os, "posix_fadvise"):  # not on macOS
        threading.Thread(target=advise, name="read ahead", daemon=True).start()


def refuse_special(path: Path) -> None:
    """Raise EnvironmentNotReady where one of a run's own files is a link, a folder, a FIFO or a device."""
    if path.is_symlink():
        raise EnvironmentNotReady(f"{path} is a link, which is not followed", "remove it")
    if path.exists() and not path.is_file():
        raise EnvironmentNotReady(f"{path} is not a regular file", "remove it, or move it away")


def flush_tree(folder: Path) -> None:
    """Sync all regular files and folders in a folder, and itself last. Raises OSError."""
    for name, _, files in os.walk(folder, topdown=False):
        for file in files:
            path = Path(name, file)
            if stat.S_ISREG(path.lstat().st_mode):
                with suppress(PermissionError):  # a user's own file, which was moved and not written
                    flush_to_disk(path)
        flush_to_disk(Path(name))


def flush_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's entries (without which a rename may be lost in a power failure)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def refuse_overwriting(path: Path, force: bool) -> None:
    """Raise SettingsError for a file that a command would write for the user, if it exists."""
    if path.is_file() and not force:
        raise SettingsError(f"{path} exists already", "give another name, or --force to overwrite it")


def save(path: Path, text: str) -> None:
    """Write a file and the folders above it. Raises SettingsError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}", "give another name") from None
