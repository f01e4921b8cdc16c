"""Results of a measured network, and which of its pairs are slow. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median

from rich.filesize import decimal

# Slow are less than this share of the usual bandwidth, and more than so many times the usual latency.
SLOW_RATE, SLOW_LATENCY = 0.5, 2.0
# Least difference between a slow latency and the usual one: below it, processes that wait for a CPU make the
# difference.
LATENCY_FLOOR_SECONDS = {"gloo": 1e-3, "nccl": 100e-6}


@dataclass(frozen=True)
class NetworkMachine:
    """A machine with the ranks that it runs, and the network interface that they use."""

    number: int
    host: str
    ranks: tuple[int, ...]
    interface: str

    @property
    def name(self) -> str:
        return f"machine {self.number} ({self.host})"


@dataclass(frozen=True)
class PairResult:
    """Measurements of two ranks."""

    first: int
    second: int
    latency_seconds: float
    """Median round trip of 8 bytes."""
    bytes_per_second: float
    """Bytes that each of the two sends while it receives as many."""
    message_bytes: int

    @property
    def ranks(self) -> tuple[int, int]:
        return self.first, self.second


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of all ranks; `bus_bytes_per_second` is the bus bandwidth of nccl-tests."""

    message_bytes: int
    seconds: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class SlowPair:
    """A pair that is slower than usual; each of `reasons` (`bandwidth`, `latency`) with both numbers."""

    pair: PairResult
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())


@dataclass(frozen=True)
class NetworkResult:
    """Results of all measurements. `between` has the pairs of two machines, `within` those of one."""

    backend: str
    seconds: float
    machines: Sequence[NetworkMachine]
    between: Sequence[PairResult]
    within: Sequence[PairResult]
    all_reduce: Sequence[AllReduce]
    pairs: int
    """Number of pairs, of which time was enough for some or all."""

    @cached_property
    def slow(self) -> tuple[SlowPair, ...]:
        floor = LATENCY_FLOOR_SECONDS[self.backend]
        # By gloo, ranks of one machine wait for its CPUs, not for a network.
        within = self.within if self.backend == "nccl" else ()
        return (*find_slow(self.between, floor), *find_slow(within, floor))

    @property
    def bus_bytes_per_second(self) -> float:
        return self.all_reduce[-1].bus_bytes_per_second

    def name_of(self, rank: int) -> str:
        machine = next(each for each in self.machines if rank in each.ranks)
        return f"rank {rank} ({machine.host})"

    def machine_of(self, rank: int) -> str:
        """Return the name of the machine that a rank stands for, in the pairs between machines."""
        return next(each.name for each in self.machines if rank in each.ranks)

    def slow_sentences(self) -> Iterator[str]:
        """Yield a sentence for each rank or machine with slow pairs only, and for each other slow pair."""
        for measured, name in ((self.between, self.machine_of), (self.within, self.name_of)):
            slow = {each.pair.ranks: each for each in self.slow if each.pair in measured}
            common = slow_with_all(measured, slow)
            for rank in common:
                worst = min(
                    (each for ranks, each in slow.items() if rank in ranks), key=lambda each: each.pair.bytes_per_second
                )
                yield f"{name(rank)} with all others: {worst}"
            for (first, second), each in slow.items():
                if not {first, second} & set(common):
                    yield f"{name(first)} with {name(second)}: {each}"

    def as_json(self) -> dict[str, object]:
        kinds = (("between machines", self.between), ("within a machine", self.within))
        reasons = {each.pair.ranks: list(each.reasons) for each in self.slow}
        return {
            "backend": self.backend,
            "seconds": round(self.seconds, 1),
            "machines": [asdict(each) for each in self.machines],
            "pairs": [
                {"kind": kind, **asdict(each), "slow": reasons.get(each.ranks, [])}
                for kind, measured in kinds
                for each in measured
            ],
            "pairs_not_measured": self.pairs - len(self.between) - len(self.within),
            "all_reduce": [asdict(each) for each in self.all_reduce],
            "slow": list(self.slow_sentences()),
        }


def find_slow(pairs: Sequence[PairResult], floor_seconds: float) -> Iterator[SlowPair]:
    """Yield the pairs that are slower than what the median rank reaches with its best partner.

    The median of all pairs would not do: of three machines, one with a bad cable is in two of three pairs.
    """
    if len(pairs) < 2:
        return
    mine = list(by_rank(pairs).values())
    rate = median(max(pair.bytes_per_second for pair in each) for each in mine)
    latency = median(min(pair.latency_seconds for pair in each) for each in mine)
    limit = max(SLOW_LATENCY * latency, latency + floor_seconds)
    for pair in pairs:
        reasons = {}
        if pair.bytes_per_second < SLOW_RATE * rate:
            reasons["bandwidth"] = f"{as_rate(pair.bytes_per_second)}, usual are {as_rate(rate)}"
        if pair.latency_seconds > limit:
            reasons["latency"] = f"a round trip takes {as_ms(pair.latency_seconds)}, usual are {as_ms(latency)}"
        if reasons:
            yield SlowPair(pair, reasons)


def by_rank(pairs: Iterable[PairResult]) -> dict[int, list[PairResult]]:
    found: dict[int, list[PairResult]] = {}
    for pair in pairs:
        for rank in pair.ranks:
            found.setdefault(rank, []).append(pair)
    return found


def slow_with_all(pairs: Iterable[PairResult], slow: Collection[tuple[int, int]]) -> list[int]:
    """Return the ranks all of whose pairs, and at least two, are slow."""
    return [rank for rank, mine in by_rank(pairs).items() if len(mine) > 1 and all(pair.ranks in slow for pair in mine)]


def as_rate(rate: float) -> str:
    return f"{decimal(round(rate))}/s"


def as_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
