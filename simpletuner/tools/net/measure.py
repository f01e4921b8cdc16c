"""Latency and bandwidth between pairs of ranks, and of all-reduces of all ranks, within a given time.

Pairs meet as in a tournament: in each round a rank is in one pair at most, so that what is measured is the
link and not its sharing. Messages grow until one takes long enough to be timed, so that a slow link takes no
longer than a fast one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from statistics import median

import torch
import torch.distributed as dist

from simpletuner.parallel.world import World
from simpletuner.tools.net.results import AllReduce, PairResult

PING_BYTES = 8
LEAST_PINGS, MOST_PINGS = 5, 200
"""Round trips that a latency is the median of."""
FIRST_BYTES, GROWTH = 1 << 16, 4
# Largest message, by the device: two of them are in memory.
MOST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 26}
MOST_REPEATS = 20
# Share of a measurement's time above which messages do not grow: two more of the next size fit.
GROWING = 1 / 24
PAIRS_SHARE, PINGS_SHARE = 0.6, 0.2
"""Share of pairs in the whole time, and of latency in the time of a pair."""
# Least duration of a round. Where the time is not enough for all of them, some rounds are measured.
LEAST_ROUND_SECONDS = 0.2

Order = Callable[[int, int], list[float]]
"""Has both or all ranks send messages of so many bytes so often, and returns the seconds of each."""


def tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds in which everyone meets everyone else once, and nobody two at a time (circle method)."""
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    half, rounds = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def rounds_of(machines: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Return the rounds of all pairs to measure, given the ranks of each machine.

    Between machines one rank of each represents it: one link at a time is what can be compared.
    """
    between = tournament([ranks[0] for ranks in machines])
    within = zip_longest(*(tournament(ranks) for ranks in machines), fillvalue=[])
    return [pairs for pairs in (*between, *([*chain(*each)] for each in within)) if pairs]


def thinned(rounds: Sequence[list[tuple[int, int]]], seconds: float) -> list[list[tuple[int, int]]]:
    """Return as many of the rounds as the time is enough for, evenly spaced."""
    count = max(1, min(len(rounds), int(seconds / LEAST_ROUND_SECONDS)))
    return [rounds[number * len(rounds) // count] for number in range(count)]


def measure_pairs(world: World, rounds: Sequence[list[tuple[int, int]]], seconds: float) -> list[PairResult]:
    """Measure the pairs of some rounds in so many seconds. Collective; every rank gets all results."""
    found = []
    for pairs in rounds:
        world.barrier()
        for first, second in pairs:
            if world.rank == first:
                found.append(lead(Link(world, second), first, seconds / len(rounds)))
            elif world.rank == second:
                Link(world, first).follow()
    texts = world.gather_texts(json.dumps([asdict(each) for each in found]))
    return [PairResult(**each) for text in texts for each in json.loads(text)]


class Link:
    """A rank's messages to one other rank, in the memory of the device. Orders travel by gloo."""

    def __init__(self, world: World, peer: int) -> None:
        self.device, self.peer = world.device, peer

    def order(self, size: int, repeats: int) -> list[float]:
        dist.send(torch.tensor([size, repeats]), self.peer)
        return self._perform(size, repeats, leads=True)

    def follow(self) -> None:
        """Do what the other rank orders, until it orders nothing more."""
        wanted = torch.zeros(2, dtype=torch.int64)
        dist.recv(wanted, self.peer)
        while wanted[1]:
            self._perform(int(wanted[0]), int(wanted[1]), leads=False)
            dist.recv(wanted, self.peer)

    def _perform(self, size: int, repeats: int, leads: bool) -> list[float]:
        sent, received = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        sending, receiving = dist.P2POp(dist.isend, sent, self.peer), dist.P2POp(dist.irecv, received, self.peer)
        if size == PING_BYTES:
            batches = [[sending], [receiving]] if leads else [[receiving], [sending]]
        else:
            batches = [[sending, receiving]]  # at once, as in the rings of an all-reduce
        return [self._timed(batches) for _ in range(repeats)]

    def _timed(self, batches: list[list[dist.P2POp]]) -> float:
        began = time.perf_counter()
        for operations in batches:
            # Batched even if one: NCCL would otherwise make a communicator for each pair, as no run does.
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            synchronize(self.device)
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lead(link: Link, rank: int, seconds: float) -> PairResult:
    began = time.perf_counter()
    trip = median(link.order(PING_BYTES, LEAST_PINGS))
    pings = max(LEAST_PINGS, min(MOST_PINGS, int(PINGS_SHARE * seconds / trip)))
    latency = median(link.order(PING_BYTES, pings))
    size, took = growing(link.order, seconds - (time.perf_counter() - began), MOST_BYTES[link.device.type])[-1]
    link.order(0, 0)
    return PairResult(rank, link.peer, latency, size / took, size)


def growing(order: Order, seconds: float, most_bytes: int) -> list[tuple[int, float]]:
    """Seconds of messages of growing size; of the largest, for which time is left, the median of several."""
    end, size, found = time.perf_counter() + seconds, FIRST_BYTES, []
    while (took := order(size, 2)[-1]) < GROWING * seconds and size * GROWTH <= most_bytes:  # the first one warms up
        found.append((size, took))
        size *= GROWTH
    repeats = max(1, min(MOST_REPEATS, int((end - time.perf_counter()) / took)))
    return [*found, (size, median(order(size, repeats)))]


def measure_all_reduce(world: World, seconds: float) -> list[AllReduce]:
    """Measure all-reduces of all ranks in so many seconds. Collective; rank 0 gets the results."""

    def perform(size: int, repeats: int) -> list[float]:
        values, times = torch.zeros(size // 4, device=world.device), []
        for _ in range(repeats):
            began = time.perf_counter()
            dist.all_reduce(values)
            synchronize(world.device)
            times.append(time.perf_counter() - began)
        return times

    def order(size: int, repeats: int) -> list[float]:
        wanted = torch.tensor([size, repeats])
        dist.broadcast(wanted, 0)
        return perform(size, repeats)

    world.barrier()
    if world.is_first:
        found = growing(order, seconds, MOST_BYTES[world.device.type])
        order(0, 0)
        return [AllReduce(size, took, bus_rate(size, took, world.size)) for size, took in found]
    wanted = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(wanted, 0)
    while wanted[1]:
        perform(int(wanted[0]), int(wanted[1]))
        dist.broadcast(wanted, 0)
    return []


def bus_rate(size: int, seconds: float, ranks: int) -> float:
    # As nccl-tests counts them: of each rank, so that numbers of ranks compare.
    return size / seconds * 2 * (ranks - 1) / ranks
