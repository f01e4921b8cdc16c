"""Before anything is encoded, all ranks verify that they write into the same folders."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.world import World
from simpletuner.system.files.late_files import find_late
from simpletuner.system.files.locks import is_locked, lock_file
from simpletuner.system.files.promises import sync

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
            number
            for number, (_, folder) in enumerate(folders)
            if probes[number] and find_late(folder, {probes[number]: 0}, stop, VISIBLE_SECONDS)
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
        # The lock tells it from one that a killed run has left.
        descriptor = lock_file(path, exclusive=True, needed=False)
        sync(descriptor)  # s3fs has no object before
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
