"""Machines verify, before anything is opened, that they have the same files and output folders.

Only digests are exchanged unless they differ.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.scan.comparison import (
    DatasetFiles,
    FileFacts,
    chunk_digests,
    collect_facts,
    dataset_facts,
    digest_of,
    find_dataset_difference,
    find_difference,
    find_table_difference,
)
from simpletuner.errors import DataError, EnvironmentNotReady, RemoteFailure, SettingsError, SimpleTunerError
from simpletuner.parallel.world import World
from simpletuner.system.files.late_files import find_late
from simpletuner.system.files.locks import WAIT_SECONDS, is_locked, lock_file, retry_until_unlocked
from simpletuner.system.files.mounts import sync

HINT = "give every machine the same files: one shared folder, or copies made with `rsync -a --delete`"


@dataclass(frozen=True)
class Exchange:
    """A rank's comparison with rank 0; `hosts` are the machines of all ranks."""

    world: World
    hosts: list[str]
    stop: Callable[[], None]

    def name(self, rank: int) -> str:
        return f"rank {rank} (host {self.hosts[rank]})"

    @property
    def names(self) -> tuple[str, str]:
        return self.name(0), self.name(self.world.rank)

    def read(self, key: str) -> Any:
        return json.loads(self.world.store.get(f"data/{key}"))

    def publish(self, key: str, value: object) -> None:
        self.world.store.set(f"data/{key}", json.dumps(value))


@dataclass
class ListedFiles:
    """Files that a machine's first rank has found; empty on the others."""

    datasets: list[DatasetFiles] = field(default_factory=list)
    error: SimpleTunerError | None = None

    @property
    def count(self) -> int:
        return sum(len(files.list.table) for files in self.datasets)


def verify_same_data(
    listed: ListedFiles, datasets: Sequence[ImageDataset], world: World, stop: Callable[[], None]
) -> None:
    """Collective: verify that all machines have the same datasets and files.

    Raises DataError or SettingsError, on all ranks, with the first difference between two of them.
    """
    is_lister = world.local_rank == 0
    info = {
        "host": socket.gethostname(),
        "datasets": dataset_facts(datasets),
        "error": [int(listed.error.exit_code), listed.error.message, listed.error.hint] if listed.error else [],
        "tables": {files.dataset.id: files.list.others.table for files in listed.datasets},
        "digest": digest_of(files.list.table for files in listed.datasets) if is_lister else "",
    }
    # Listing millions of files over a network may take an hour, in which nothing is counted; the launcher
    # looks for ranks that do nothing. No collective is held open.
    world.store_barrier("data/found", stop, patience_seconds=math.inf)
    of_all = [json.loads(text) for text in world.gather_texts(json.dumps(info))]
    for error in (each["error"] for each in of_all if each["error"]):
        raise RemoteFailure(*error)
    exchange = Exchange(world, [each["host"] for each in of_all], stop)
    first = of_all[0]
    raise_first(world, find_dataset_difference(first["datasets"], info["datasets"], exchange.names), SettingsError)
    tables = info["tables"] if is_lister else first["tables"]
    raise_first(world, find_table_difference(first["tables"], tables, exchange.names), DataError)
    if any(each["digest"] not in ("", first["digest"]) for each in of_all):
        compare_machines(exchange, listed)


def compare_machines(exchange: Exchange, listed: ListedFiles) -> None:
    """Compare the chunks in which some machine differs from the first one, file by file. Collective."""
    world, stop = exchange.world, exchange.stop
    digests = chunk_digests(listed.datasets) if listed.datasets else []
    if world.is_first:
        exchange.publish("chunks", digests)
        exchange.publish("count", listed.count)
    world.store_barrier("data/chunks", stop)
    first_digests = exchange.read("chunks")
    chunks = {number for number, digest in enumerate(digests) if digest != first_digests[number]}
    wanted = {number for text in world.gather_texts(json.dumps(sorted(chunks))) for number in json.loads(text)}
    if world.is_first:
        for number, facts in collect_facts(listed.datasets, wanted).items():
            exchange.publish(f"chunk/{number}", facts)
    own = facts_by_id(collect_facts(listed.datasets, chunks).values())
    world.store_barrier("data/details", stop)
    first = facts_by_id(exchange.read(f"chunk/{number}") for number in sorted(chunks))
    problem = find_difference(first, own, exchange.names)
    count = exchange.read("count")
    if problem and listed.count != count:
        problem = f"{exchange.names[1]} has {listed.count} images, {exchange.names[0]} has {count}: {problem}"
    world.store_barrier("data/compared", stop)
    if world.is_first:
        # The store would keep them in rank 0's memory until the run ends.
        for number in wanted:
            world.store.delete_key(f"data/chunk/{number}")
    raise_first(world, problem, DataError)


def facts_by_id(chunks: Any) -> dict[str, FileFacts]:
    return {sample_id: FileFacts(**facts) for chunk in chunks for sample_id, facts in chunk.items()}


def raise_first(world: World, problem: str, kind: type[DataError | SettingsError]) -> None:
    """Collective: raise, on all ranks, the problem of the first rank that has one."""
    for sentence in world.gather_texts(problem):
        if sentence:
            raise kind(sentence, HINT if kind is DataError else "give every machine the same dataset file")


VISIBLE_SECONDS = 3.0
"""Longest delay until an NFS client shows a new file although the folder is listed again and again."""

PROBE = ".probe-"

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def verify_same_folders(
    folders: Sequence[tuple[str, Path]], world: World, stop: Callable[[], None], place: str
) -> None:
    """Collective: verify that each folder, given with what it is for, is the same one on all ranks.

    Rank 0 puts a file with a random name into each, and every rank looks for it. `place` is unique per call.
    Raises EnvironmentNotReady, on all ranks, which names the first folder and rank.
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
    """Create a file with a random name and remove it at the end; yield its name, "" if read-only."""
    path = folder / f"{PROBE}{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_probes(folder)
        # The lock tells it from one that a killed run has left; a run that looks locks it for a moment.
        descriptor = retry_until_unlocked(
            lambda: lock_file(path, exclusive=True, needed=False), f"another process holds {path}", WAIT_SECONDS
        )
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
