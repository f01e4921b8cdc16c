"""Before anything is encoded, all ranks verify that they write into the same folders."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.world import World
from simpletuner.system.files.locks import is_locked, lock_file

VISIBLE_SECONDS = 3.0
"""Longest delay until an NFS client shows a new file although the folder is listed again and again."""

PROBE = ".probe-"

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def verify_same_folders(
    folders: Sequence[tuple[str, Path]], world: World, stop: Callable[[], None], place: str
) -> None:
    """Collective: verify that each folder, given with what it is for, is the same one on all ranks.

    Rank 0 puts a file with a random name into each, and every rank looks for it. `place` is unique per call. Raises
    EnvironmentNotReady, on all ranks, which names the first folder and rank.
    """
    if world.size == 1:
        for _, folder in folders:
            with suppress(OSError):  # left by a killed run of several ranks
                remove_stale_probes(folder)
        return
    with ExitStack() as stack:
        if world.is_first:
            probes = [stack.enter_context(create_probe(folder)) for _, folder in folders]
            world.store.set(f"{place}/marks", json.dumps(probes))
        world.store_barrier(f"{place}/marked", stop)
        probes = json.loads(world.store.get(f"{place}/marks"))
        missing = [
            number for number, (_, folder) in enumerate(folders) if not wait_until_visible(folder, probes[number], stop)
        ]
        world.store_barrier(f"{place}/looked", stop)  # the probes are removed only after all have looked
        results = world.gather_texts(json.dumps([socket.gethostname(), *missing[:1]]))
    hosts = [json.loads(text)[0] for text in results]
    for rank, text in enumerate(results):
        for number in json.loads(text)[1:]:
            name, folder = folders[number]
            raise EnvironmentNotReady(
                f"{name} {folder} is not the same folder on rank {rank} (host {hosts[rank]}) "
                f"as on rank 0 (host {hosts[0]})",
                "all machines must share it; `simpletuner nfs check` on each of them shows whether they do",
            )


@contextmanager
def create_probe(folder: Path) -> Iterator[str]:
    """Create a file with a random name, remove it at the end; yield its name, or "" where the folder is read-only."""
    path = folder / f"{PROBE}{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_probes(folder)
        descriptor = lock_file(
            path, exclusive=True, needed=False
        )  # the lock tells it from one that a killed run has left
    except OSError as error:
        if error.errno not in READ_ONLY or not folder.is_dir():
            raise EnvironmentNotReady(
                f"cannot write to {folder}: {error.strerror}", "check its rights and room on the disk, or name another"
            ) from None
        yield ""
        return
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_stale_probes(folder: Path) -> None:
    for path in folder.glob(f"{PROBE}*"):
        if is_locked(path) is False:
            path.unlink(missing_ok=True)


def wait_until_visible(folder: Path, name: str, stop: Callable[[], None]) -> bool:
    """Return whether a file is in a folder, looking repeatedly since caches of NFS may be late."""
    end = time.monotonic() + VISIBLE_SECONDS
    while name and not is_visible(folder, name):
        if time.monotonic() > end:
            return False
        stop()
        time.sleep(0.1)
    return True


def is_visible(folder: Path, name: str) -> bool:
    try:
        # The parent, too: a client that has looked before remembers, for a while, that `folder` is not there.
        for listed in (folder.parent, folder):
            list(listed.iterdir())  # opening a folder makes an NFS client ask its server for changes
    except OSError:
        return False
    return (folder / name).exists()
