"""Order of accesses over the streams of a device and the host, by vector clocks (Fidge 1988)."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, UntypedStorage

from fake_gpu.device import LIBRARY

HOST = -1
"""The host, in the place of a stream."""
RECORD, BLOCK, SYNCHRONIZE_EVENT, SYNCHRONIZE_STREAM, SYNCHRONIZE_DEVICE = range(5)
ROOM = 1000

Clock = dict[int, int]
"""How much of each stream has happened before."""


@dataclass
class Accesses:
    """The last accesses of a storage, as (stream, time on it, operator)."""

    made_on: int
    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    """Streams that the allocator waits for before it reuses the memory (`Tensor.record_stream`)."""

    def last(self) -> dict[int, tuple[int, str]]:
        last = dict(self.reads)
        if self.write is not None:
            stream, time, name = self.write
            last[stream] = max(last.get(stream, (0, "")), (time, name))
        return last


class StreamOrder:
    """Find accesses of one storage that nothing orders, and memory that is reused before another stream is done.

    `where` describes the line that is running, for `races`.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.where, self.races, self.lock = where, Counter[str](), threading.RLock()
        self.clocks: defaultdict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self.events: dict[int, Clock] = {}
        self.accesses: Any = weakref.WeakKeyDictionary[UntypedStorage, Accesses]()
        self.freed: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
        """By the stream that may reuse it: (stream, time, description) of accesses to memory that was freed."""
        self.room = (ctypes.c_int64 * (3 * ROOM))()

    def catch_up(self) -> None:
        """Take over what was recorded, waited for and synchronized."""
        while count := LIBRARY.take_order(self.room, ROOM):
            for at in range(0, 3 * count, 3):
                self.apply(*self.room[at : at + 3])

    def apply(self, kind: int, what: int, stream: int) -> None:
        if kind == RECORD:
            self.events[what] = dict(self.clocks[stream])
        elif kind == BLOCK:
            join(self.clocks[stream], self.events.get(what, {}))
        elif kind == SYNCHRONIZE_EVENT:
            join(self.clocks[HOST], self.events.get(what, {}))
        elif kind == SYNCHRONIZE_STREAM:
            join(self.clocks[HOST], self.clocks[what])
        else:
            self.wait_for_device()

    def wait_for_device(self) -> None:
        for clock in list(self.clocks.values()):
            join(self.clocks[HOST], clock)

    def follow(self, name: str, accessed: Iterable[tuple[Tensor, bool]], stream: int) -> None:
        """Note an operator on a stream, with its tensors, each with whether it is written."""
        with self.lock:
            self.catch_up()
            clock = self.clocks[stream]
            if stream != HOST:
                join(clock, self.clocks[HOST])  # a kernel comes after all that the host did before its launch
            clock[stream] += 1
            for tensor, writes in accessed:
                self.access(tensor.untyped_storage(), stream, writes, name)

    def access(self, storage: UntypedStorage, stream: int, writes: bool, name: str) -> None:
        clock, known = self.clocks[stream], self.accesses.get(storage)
        if known is None:
            known = self.accesses[storage] = Accesses(stream)
        if known.write is not None and clock[known.write[0]] < known.write[1]:
            self.found(f"{name} on {shown(stream)} before {known.write[2]} on {shown(known.write[0])} has written")
        if not writes:
            known.reads[stream] = clock[stream], name
            return
        for reader, (time, what) in known.reads.items():
            if clock[reader] < time:
                self.found(f"{name} on {shown(stream)} overwrites what {what} on {shown(reader)} reads")
        known.write, known.reads = (stream, clock[stream], name), {}

    def make(self, storage: UntypedStorage, stream: int) -> Accesses:
        """Note memory that was allocated on a stream: what others did with it before must be over."""
        with self.lock:
            self.accesses[storage] = made = Accesses(stream)
            if self.freed[stream]:
                self.catch_up()
                clock = self.clocks[stream]
                join(clock, self.clocks[HOST])
                for other, time, what in self.freed.pop(stream):
                    if clock[other] < time:
                        self.found(f"{what}: reused on {shown(stream)} before {shown(other)} is done")
            return made

    def free(self, accesses: Accesses) -> None:
        with self.lock:
            self.catch_up()
            made_on, clock = accesses.made_on, self.clocks[accesses.made_on]
            for stream, (time, name) in accesses.last().items():
                if stream not in (made_on, HOST, *accesses.recorded) and clock[stream] < time:
                    self.freed[made_on].append((stream, time, f"memory that {name} uses"))

    def found(self, what: str) -> None:
        self.races[f"{what}: {self.where()}"] += 1


def join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock[stream] < time:
            clock[stream] = time


def shown(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}"
