"""Exclusive right to write to a folder or a bucket, held by one run at a time on any machine.

`docs/architecture.md` has what each kind of place can decide. A holder writes a record and renews it from a
thread. Others consider it dead when its record stands still for longer than it lives, by their own clock; on
the record's machine, the process itself is looked up. Of several waiting processes the next holder is the one
that creates the file of the next token, which the place allows only once.

A holder that wakes up after it was replaced must not write: `check` reads the record before anything is
removed, replaced or published. Between a check and the write is a window, so a lower token never replaces a
higher one.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto

from simpletuner.errors import SimpleTunerError
from simpletuner.status_line import format_seconds
from simpletuner.system.files.lease_record import MISSED_BEATS, LeaseLost, Record, boot_id, parse_record
from simpletuner.system.files.mounts import FileSystem

# Longest wait for a run whose launcher has died: its ranks save their last step and exit.
HANDOVER_SECONDS = 30
POLL_SECONDS = 0.2
# Longest time that a write is on its way, where two may create one file: who still reads his own then has it,
# which is Fischer's algorithm (Lamport, A Fast Mutual Exclusion Algorithm, 1987). Slower writes are waited
# for four times as long.
SETTLE_SECONDS = 5.0
READS, REREAD_SECONDS = 3, 0.1
"""Reads of a record that may be in the middle of an overwrite, and the seconds between them."""
RELEASE_SECONDS = 5.0
"""Longest wait, at the end, for a renewal that hangs."""


class Place(ABC):
    """Keeps the files of a lease, `name` and `name.TOKEN`."""

    name: str

    @property
    @abstractmethod
    def system(self) -> FileSystem: ...

    @property
    def holds_lock(self) -> bool:
        """True if this process has locked the file, and that file still exists."""
        return False

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return None where there is no such file."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Return False where there is such a file already."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None: ...

    @abstractmethod
    def remove(self, name: str) -> None: ...

    def lock(self, exclusive: bool) -> bool | None:
        """Lock the record; return True where another process has, None where there are no locks."""
        return None

    def unlock(self) -> None:  # noqa: B027
        """Release that lock."""


class Holding(Enum):
    """Knowledge of a holder at once, without watching it."""

    HELD = auto()
    FREE = auto()
    UNSURE = auto()
    """The record was not released; only watching for beats can tell whether the holder lives."""


def judge(record: Record | None, is_locked: bool | None, place: Place) -> Holding:
    """Judge a holder by its record and by the lock of its file; `is_locked` is None if there are no locks."""
    if is_locked:
        return Holding.HELD
    if record is None or record.released or (record.is_of_earlier_version and is_locked is False):
        return Holding.FREE
    system = place.system
    if record.damaged:  # on a disk of this machine, the free lock knows more
        return Holding.FREE if system.is_local and is_locked is False else Holding.HELD
    if record.is_on_this_machine and not record.shared:
        return Holding.HELD if record.is_of_living_process else Holding.FREE
    # A kernel has one table of locks for all of its containers, unless each mount locks for itself. A disk of
    # one machine has no other holders: a record of another boot and this name was written before a reboot.
    here = bool(record.boot) and record.boot == boot_id()
    was_here = system.is_local and record.host == socket.gethostname()
    if is_locked is False and (was_here or (here and system.shows_locks)):
        return Holding.FREE
    return Holding.UNSURE


def now() -> float:
    """Return seconds of a clock that also counts while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def nothing(text: str = "") -> None:
    """Stands for what need not be said, or asked."""


class Lease:
    """Held from `acquire` to `release`. One that was never acquired, as on other ranks, allows everything."""

    def __init__(self, own: Record | None = None) -> None:
        """`own` is what the record says of who holds it; by default, this process."""
        self.own = own
        self.place: Place | None = None
        self.record = Record()
        self.lost: Record | None = None
        self.confirmed_at = self.alone_since = 0.0
        self.closing, self.writing = threading.Event(), threading.Lock()

    @property
    def is_held(self) -> bool:
        return self.record.token > 0

    def acquire(
        self,
        place: Place,
        stop: Callable[[], None] = nothing,
        say: Callable[[str], None] = nothing,
        way_on: str = "give this one another --output_dir",
    ) -> None:
        """Take the place, if need be from a holder that is dead; `stop` may raise to end waiting for that.

        Raises LeaseLost where another holds it, which `way_on` helps with; and what is wrong with the place.
        """
        own = replace(self.own or Record.of_this_process(), id=secrets.token_hex(8))
        try:
            is_locked = self._lock(place, stop, say, way_on)
            while not (record := take(place, own, wait_until_free(place, is_locked, stop, say, way_on))):
                time.sleep(POLL_SECONDS)
        except BaseException:
            place.unlock()
            raise
        self._begin(place, record)

    def share(self, place: Place, stop: Callable[[], None] = nothing, say: Callable[[str], None] = nothing) -> None:
        """Be one of the users of a place, and write so; each of them holds its shared lock.

        Raises LeaseLost where one holds it that shares it with none, and OSError where that cannot be
        written.
        """
        own = replace(self.own or Record.of_this_process(), id=secrets.token_hex(8), shared=True)
        while True:
            found = current_record(place)
            if found is not None and not found.shared:
                found = wait_until_free(place, False, stop, say, "")
            record = replace(own, token=found.token if found is not None else 0)
            place.write(place.name, record.encode())
            # An exclusive claim of the next token, then reading the record: one of both sees the other.
            if place.read(claim_of(place, record.token + 1)) is None:
                return self._begin(place, record)

    def follow(self, identifier: str) -> None:
        """Name the holder, which is another rank of this run."""
        if not self.is_held:
            self.record = replace(self.record, id=identifier)

    def check(self) -> None:
        """Raise LeaseLost where another holds the place by now; and what is wrong with the place."""
        place = self.place
        if place is None or self.record.shared:
            return
        began = now() - self.record.seconds
        while self.lost is None and now() - began >= self.record.seconds:  # again, if it was stopped while it looked
            began = now()
            self.lost = self._find_other(place)
        if self.lost is not None:
            raise LeaseLost(
                f"another run{self.lost.describe()} has taken over {place.describe()}, while this one stood still",
                "nothing of that run was changed; wait for it, then run the same command again",
            )
        self.confirmed_at = now()

    def _find_other(self, place: Place) -> Record | None:
        """Return the record of who has taken over; one without an id where ours is gone."""
        found = read_record(place, place.name, is_expected=True)
        if found is None or found.damaged:  # on a full disk, perhaps
            return None if place.system.is_local and place.holds_lock else found or Record()
        if found.token < self.record.token:
            place.write(place.name, self.record.encode())  # over that of one that woke up while writing
        elif found.id != self.record.id:
            return found
        return read_record(place, claim_of(place, self.record.token + 1))

    def check_recent(self) -> None:
        """Raise as `check` does, and read nothing while the record was renewed just now."""
        if self.place is not None and now() - self.confirmed_at > 2 * self.record.seconds:
            self.check()

    def release(self) -> None:
        """Give the place back. One that cannot be written to is free when the record stood still."""
        place, self.place = self.place, None
        self.closing.set()
        if place is None:
            return
        with suppress(OSError, SimpleTunerError):
            if self.writing.acquire(timeout=RELEASE_SECONDS):
                self._say_released(place)
        self.record = Record()
        place.unlock()

    def _say_released(self, place: Place) -> None:
        found = read_record(place, place.name)
        is_own = self.lost is None and found is not None and found.id == self.record.id
        if self.record.shared:  # others that use it would have renewed the record meanwhile
            is_own = is_own and now() - self.alone_since > watch_seconds(self.record, place.system)
        if is_own:
            place.write(place.name, replace(self.record, released=True).encode())
        if self.lost is None and not self.record.shared:
            place.remove(claim_of(place, self.record.token))

    def _begin(self, place: Place, record: Record) -> None:
        self.place, self.record, self.lost = place, record, None
        self.confirmed_at = self.alone_since = now()
        self.closing, self.writing = threading.Event(), threading.Lock()
        arguments = (place, self.closing, self.writing)
        threading.Thread(target=self._renew, args=arguments, name="lease", daemon=True).start()

    def _renew(self, place: Place, closing: threading.Event, writing: threading.Lock) -> None:
        while not closing.wait(self.record.seconds) and self.lost is None:
            # What fails now may work the next time; who writes there checks before.
            with suppress(OSError, SimpleTunerError), writing:
                if closing.is_set():
                    return
                found = read_record(place, place.name) if self.record.shared else None
                if found is not None and found.id != self.record.id:
                    self.alone_since = now()
                self.check()
                self.record = self.record.renewed()
                place.write(place.name, self.record.encode())

    def _lock(self, place: Place, stop: Callable[[], None], say: Callable[[str], None], way_on: str) -> bool | None:
        end, said = time.monotonic() + HANDOVER_SECONDS, False
        while is_locked := place.lock(exclusive=True):
            stop()
            holder = read_record(place, place.name) or Record()
            if (holder.is_launcher_alive and not holder.released) or time.monotonic() > end:
                raise held_error(place, holder, way_on)
            if not said:
                say(f"waiting up to {HANDOVER_SECONDS} s for an earlier run to release {place.describe()}")
                said = True
            time.sleep(POLL_SECONDS)
        return is_locked


def claim_of(place: Place, token: int) -> str:
    return f"{place.name}.{token}"


def read_record(place: Place, name: str, is_expected: bool = False) -> Record | None:
    """Return a record as it is once it is not being written over: then s3rver 3.7.1 may show none."""
    record: Record | None = None
    for _ in range(READS):
        content = place.read(name)
        record = parse_record(content, f"{name} in {place.describe()}") if content is not None else None
        if not (is_expected if record is None else record.damaged):
            break
        time.sleep(REREAD_SECONDS)
    return record


def current_record(place: Place) -> Record | None:
    """Record of who holds the place, or is about to: a claim that is made counts before the record."""
    record = read_record(place, place.name)
    if record is not None and record.damaged:
        return record
    while (content := place.read(claim_of(place, token := (record.token if record else 0) + 1))) is not None:
        claim = parse_record(content, "")
        is_whole = claim is not None and not claim.damaged and claim.token == token
        record = claim if is_whole else Record(id="unknown", token=token)  # being written, perhaps
    return record


def watch_seconds(record: Record, system: FileSystem) -> float:
    """Return for how long a record has to stand still until its holder counts as dead."""
    return MISSED_BEATS * record.seconds + system.late_seconds


def wait_until_free(
    place: Place, is_locked: bool | None, stop: Callable[[], None], say: Callable[[str], None], way_on: str
) -> Record | None:
    """Return the record of a holder that is gone, None where there was none. Raises LeaseLost."""
    watched: Record | None = None
    began = time.monotonic()
    while True:
        found = current_record(place)
        holding = judge(found, is_locked, place)
        if holding is Holding.FREE or found is None:
            return found
        if holding is Holding.HELD or (watched is not None and found != watched):
            raise held_error(place, found, way_on, time.monotonic() - began if watched is not None else None)
        limit = watch_seconds(found, place.system)
        if watched is None:
            say(
                f"waiting up to {format_seconds(limit)} for an earlier run{found.describe()} that may write to "
                f"{place.describe()}: it is of another machine, and did not say that it ended"
            )
            watched, began = found, time.monotonic()
        if time.monotonic() - began > limit:
            return found
        stop()
        time.sleep(min(POLL_SECONDS, limit / 20))


def take(place: Place, own: Record, judged: Record | None) -> Record | None:
    """Become the holder after one that is gone; return the record, None where another one was faster."""
    record = replace(own, token=(judged.token if judged is not None else 0) + 1)
    claim, began = claim_of(place, record.token), time.monotonic()
    if not place.create(claim, record.encode()):
        return None
    if not place.system.creates_exclusively:
        time.sleep(max(SETTLE_SECONDS, 4 * (time.monotonic() - began)))
        if read_record(place, claim) != record:
            return None
    # A claim that its holder has removed by now could be made again, by one that has slept since it looked.
    found = read_record(place, place.name)
    if found is not None and found != judged and (found.damaged or judged is None or found.token >= judged.token):
        place.remove(claim)
        return None
    place.write(place.name, record.encode())
    for token in (record.token - 1, record.token + 1):  # of who is gone; and of before the record was removed
        place.remove(claim_of(place, token))
    return record


def held_error(place: Place, holder: Record, way_on: str, seconds: float | None = None) -> LeaseLost:
    """Return that the place is held; `seconds` after the beginning of a watch its record was renewed."""
    ways = f", or {way_on}" if way_on else ""
    if holder.damaged:
        return LeaseLost(
            f"{holder.damaged}, so it counts as held", f"if no run uses it on any machine, remove it{ways}"
        )
    since = f", begun {holder.since} by its clock" if holder.since else ""
    renewed = f"{since}; it has renewed its record within {seconds:.0f} s" if seconds is not None else ""
    if seconds is not None:
        ways = f", stop it on that machine{ways}" if ways else ", or stop it on that machine"
    return LeaseLost(f"another run is using {place.describe()}{holder.describe()}{renewed}", f"wait for it{ways}")


def asked(place: Place, is_locked: bool | None) -> tuple[Record | None, Holding]:
    """Holder of a place, as far as it can be determined without waiting."""
    with suppress(OSError):
        record = current_record(place)
        return record, judge(record, is_locked, place)
    return None, Holding.HELD if is_locked else Holding.UNSURE
