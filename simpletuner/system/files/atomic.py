"""Atomic file and directory writes: write to a temporary name, fsync, rename."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from simpletuner.errors import EnvironmentNotReady, SettingsError, naming, reason_of_os
from simpletuner.system.files.mounts import rename_over, rename_to_free, sync
from simpletuner.system.files.regular_files import open_regular

# Linux reads no more than its read-ahead window for one request, by default 128 KiB (mm/readahead.c).
READ_AHEAD_BYTES = 128 << 10

REMOVING = ".removing"
"""A file in a folder that is being removed in place."""


def unfinished_path(folder: Path, writer: str = "") -> Path:
    """Hidden sibling for writing a file or folder before it is renamed to its final name.

    `writer` separates two runs, one of which was stopped while it wrote and wakes up.
    """
    return folder.with_name(f".{folder.name}{'.' * bool(writer)}{writer}.unfinished")


def replace_folder(new: Path, folder: Path, check: Callable[[], None] = lambda: None) -> None:
    """Sync `new` and rename it to `folder`. The previous folder is removed only once the new one is in place.

    Where the previous one cannot be renamed, `new` waits as `.NAME.new` while that is removed in place.
    `check` may raise right before the renames, as syncing takes long.
    """
    old, waiting = (folder.with_name(f".{folder.name}.{state}") for state in ("old", "new"))
    flush_tree(new)
    check()
    remove(old)
    try:
        if os.path.lexists(folder):
            folder.rename(old)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove(waiting)
        move_folder(new, waiting)
        flush_to_disk(folder.parent)
        remove_in_place(folder)
        new = waiting
    move_folder(new, folder)
    flush_to_disk(folder.parent)
    remove(old)


def move_folder(folder: Path, target: Path) -> None:
    """Rename a folder; where that cannot be done it is copied, synced, and removed in place. Raises OSError.

    rename(2) answers EXDEV for a folder in a lower layer of an overlay, which every folder of a committed
    container image is, and where mergerfs keeps source and target on different disks.
    """
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = target.with_name(f".{target.name.lstrip('.')}.copy.unfinished")
        remove(copy)
        try:
            copy_folder(folder, copy)
            flush_tree(copy)
            copy.rename(target)
        except OSError:
            remove(copy)
            raise
        flush_to_disk(target.parent)
        remove_in_place(folder)


def copy_folder(folder: Path, copy: Path) -> None:
    """Copy files, links and folders with times and rights. Raises the first OSError, unlike copytree."""
    for root, folders, files in os.walk(folder):
        target = copy / Path(root).relative_to(folder)
        target.mkdir()
        for source in (Path(root, name) for name in [*files, *folders]):
            if stat.S_IFMT(source.lstat().st_mode) in (stat.S_IFREG, stat.S_IFLNK):
                shutil.copy2(source, target / source.name, follow_symlinks=False)


def remove_in_place(folder: Path) -> None:
    """Remove a folder that cannot be renamed first, with a mark for kills (`is_left_over`)."""
    mark = folder / REMOVING
    create_new(mark).close()
    flush_to_disk(folder)
    for path in folder.iterdir():
        if path != mark:
            remove(path)
    remove(folder)


def is_being_removed(folder: Path) -> bool:
    return os.path.lexists(folder / REMOVING)


def is_left_over(folder: Path) -> bool:
    # A removal that was killed leaves a marked or an empty folder.
    return folder.is_dir() and (is_being_removed(folder) or not any(folder.iterdir()))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its contents; what cannot be removed from a folder stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def restore_replaced(folder: Path) -> None:
    """Finish an interrupted `replace_folder`, or undo it if the new folder was not in place yet."""
    old, waiting = (folder.with_name(f".{folder.name}.{state}") for state in ("old", "new"))
    for kept in (waiting, old):  # a whole one each; a new one waits only while the previous one is being removed
        if kept.is_dir() and not kept.is_symlink() and (not folder.exists() or is_left_over(folder)):
            remove(folder)
            move_folder(kept, folder)
        remove(kept)


@contextmanager
def atomic_file(path: Path, durably: bool = True, mode: int = 0o666, replaces: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name, `path`, once it is whole and synced. A link is replaced.
    Raises FileExistsError where another file has that name by then, unless it `replaces` that.

    All of it happens in the folder that is opened first, under a name that is created exclusively: an archive
    may have brought links by that name, or by the final one, to any file of its reader's. Each writer has a
    name of its own: of several at once the last one wins, and none sees another's.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = unfinished_path(path, secrets.token_hex(4)).name
    try:
        file = create_new(new, folder, mode)
        try:
            with naming(path), file:
                yield file
                file.flush()
                if durably:
                    sync(file.fileno())
            (rename_over if replaces else rename_to_free)(new, path.name, folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)
            raise
        if durably:
            sync(folder)
    finally:
        os.close(folder)


def create_new(name: Path | str, folder: int | None = None, mode: int = 0o666) -> BinaryIO:
    """Create a file for writing, removing a file or link of that name first. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, mode, dir_fd=folder), "wb")


def replace_file(path: Path, content: bytes, replaces: bool = True) -> None:
    """Replace a user's file atomically, following a link and keeping the mode. Raises OSError."""
    if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout, cannot be renamed over
        # O_NONBLOCK: opening a FIFO that nobody reads would wait for a reader, and is refused.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK), "wb") as file:
            os.set_blocking(file.fileno(), True)
            file.write(content)
        return
    path = Path(os.path.realpath(path))  # of a link that leads to itself the link, which is replaced
    with atomic_file(path, replaces=replaces) as file:
        if path.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        file.write(content)


def write_json(path: Path, value: object) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode("utf-8"))


def write_file(path: Path, *content: bytes | memoryview) -> None:
    # A symbolic link is replaced, not followed.
    with atomic_file(path) as file:
        file.writelines(content)


def read_ahead(paths: Sequence[Path]) -> None:
    """Read regular files into the page cache in the background, skipping unreadable ones."""

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
    """Sync a file's content, or a folder's entries (or a rename may be lost in a power failure)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def refuse_overwriting(path: Path, force: bool) -> None:
    """Raise SettingsError for a file that a command would write for the user, if it exists or is a folder."""
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name that is too long
        raise SettingsError(f"cannot write {path}: {reason_of_os(error)}", "give another name") from None
    if is_folder:
        raise SettingsError(f"{path} is a folder", "give another name")
    if is_file and not force:
        raise SettingsError(f"{path} exists already", "give another name, or --force to overwrite it")


def save(path: Path, text: str, replaces: bool = True) -> None:
    """Write a file and the folders above it. Raises SettingsError where that cannot be done.

    Unless it `replaces` a file, one that another command has written since it was looked for is refused, too.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode("utf-8"), replaces)
    except FileExistsError as error:  # of mkdir, which would say of a file above it that it exists
        refuse_overwriting(path, replaces)
        raise SettingsError(f"cannot write {path}: {error.filename} is no folder", "give another name") from None
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {reason_of_os(error)}", "give another name") from None
