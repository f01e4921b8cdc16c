"""Before anything is encoded, all ranks verify that they found the same images and captions as rank 0.

Only digests are exchanged unless they differ.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner.data.comparison import (
    SampleFacts,
    adopt_versions,
    chunk_digests,
    collect_facts,
    dataset_facts,
    find_dataset_difference,
    find_difference,
)
from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Discovery, Sample
from simpletuner.errors import DataError, SettingsError
from simpletuner.parallel.world import World

HINT = "give every machine the same files: one shared folder, or copies made with `rsync -a --delete`"


@dataclass(frozen=True)
class Exchange:
    """One rank's comparison with rank 0; `hosts` are the machines of all ranks."""

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


def verify_same_data(
    found: Discovery, datasets: Sequence[ImageDataset], world: World, stop: Callable[[], None]
) -> list[Sample]:
    """Collective: verify the data, and return the samples that all ranks train on, with the file versions of rank 0.

    Raises DataError or SettingsError, on all ranks, with the first difference between two of them.
    """
    if world.size == 1:
        return found.samples
    digests = chunk_digests(found.samples)
    info = {"host": socket.gethostname(), "digests": digests, "datasets": dataset_facts(datasets)}
    if world.is_first:
        world.store.set("data/card", json.dumps(info))
    world.store_barrier("data/found", stop)  # ranks may take minutes to scan: no collective is held open
    first = json.loads(world.store.get("data/card"))
    exchange = Exchange(world, world.gather_texts(info["host"]), stop)
    raise_first(world, find_dataset_difference(first["datasets"], info["datasets"], exchange.names), SettingsError)
    chunks = {number for number, digest in enumerate(digests) if digest != first["digests"][number]}
    return compare_chunks(exchange, found, chunks)


def compare_chunks(exchange: Exchange, found: Discovery, chunks: set[int]) -> list[Sample]:
    """Compare the chunks that differ from those of rank 0 sample by sample, if any rank has such."""
    world, stop = exchange.world, exchange.stop
    wanted = {number for text in world.gather_texts(json.dumps(sorted(chunks))) for number in json.loads(text)}
    if not wanted:
        return found.samples
    if world.is_first:
        exchange.publish("samples", len(found.samples))
        for number, facts in collect_facts(found.samples, wanted).items():
            exchange.publish(f"chunk/{number}", facts)
    own = facts_by_id(collect_facts(found.samples, chunks).values())
    world.store_barrier("data/details", stop)
    first = facts_by_id(exchange.read(f"chunk/{number}") for number in sorted(chunks))
    problem = find_difference(first, own, exchange.names, found.broken)
    count = exchange.read("samples")
    if problem and len(found.samples) != count:
        problem = f"{exchange.names[1]} has {len(found.samples)} images, {exchange.names[0]} has {count}: {problem}"
    world.store_barrier("data/compared", stop)
    if world.is_first:
        for number in wanted:
            world.store.delete_key(f"data/chunk/{number}")
    raise_first(world, problem, DataError)
    return adopt_versions(found.samples, first)


def facts_by_id(chunks: Any) -> dict[str, SampleFacts]:
    """Return the facts of several chunks by the samples' ids."""
    return {sample_id: SampleFacts(**facts) for chunk in chunks for sample_id, facts in chunk.items()}


def raise_first(world: World, problem: str, kind: type[DataError | SettingsError]) -> None:
    """Collective: raise, on all ranks, the problem of the first rank that has one."""
    for sentence in world.gather_texts(problem):
        if sentence:
            raise kind(sentence, HINT if kind is DataError else "give every machine the same dataset file")
