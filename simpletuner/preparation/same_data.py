"""Before any image is opened, all machines verify that they have the same image and caption files as the first one.

Only digests are exchanged unless they differ.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from simpletuner.errors import DataError, RemoteFailure, SettingsError, SimpleTunerError
from simpletuner.parallel.world import World

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
        """The names of rank 0 and of this rank."""
        return self.name(0), self.name(self.world.rank)

    def read(self, key: str) -> Any:
        """Read what rank 0 has published."""
        return json.loads(self.world.store.get(f"data/{key}"))

    def publish(self, key: str, value: Any) -> None:
        self.world.store.set(f"data/{key}", json.dumps(value))


@dataclass
class Listed:
    """Files that a machine's first rank has found; empty on the others."""

    datasets: list[DatasetFiles] = field(default_factory=list)
    error: SimpleTunerError | None = None

    @property
    def count(self) -> int:
        return sum(len(files.list.table) for files in self.datasets)


def verify_same_data(listed: Listed, datasets: Sequence[ImageDataset], world: World, stop: Callable[[], None]) -> None:
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
    # Listing millions of files over a network may take an hour, in which nothing is counted; the launcher looks for
    # ranks that do nothing. No collective is held open.
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


def compare_machines(exchange: Exchange, listed: Listed) -> None:
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
    """Return the facts of several chunks by the samples' ids."""
    return {sample_id: FileFacts(**facts) for chunk in chunks for sample_id, facts in chunk.items()}


def raise_first(world: World, problem: str, kind: type[DataError | SettingsError]) -> None:
    """Collective: raise, on all ranks, the problem of the first rank that has one."""
    for sentence in world.gather_texts(problem):
        if sentence:
            raise kind(sentence, HINT if kind is DataError else "give every machine the same dataset file")
