"""Launchers monitor each other: each writes a heartbeat to the store every second, and why the run ends, if
early.

Only the thread accesses the store. When the network fails, a call to the store may never return, and the
launcher must still be able to kill its ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from simpletuner.errors import EnvironmentNotReady
from simpletuner.launch.store import MessageStore
from simpletuner.launch.termination import Termination, machine_silent, parse_termination

HEARTBEAT_SECONDS = 1.0
ANSWER_SECONDS = 3.0
"""Longest wait for the thread to write a message."""
# Longest silence of a machine after a rank lost contact to another: no slow network then.
SUSPECT_SECONDS = 5.0

TERMINATION_KEY = "launchers/ending"


@dataclass(frozen=True)
class Heartbeat:
    """A regular message of a launcher; a rising count means that it is alive."""

    count: int
    state: str = "running"
    """`running`, `finished`, or `left`."""
    phase: int = 0
    """The phase of its furthest rank."""
    lost_contact: bool = False
    """True if one of its ranks has lost contact to another."""


def parse_heartbeat(values: Mapping[str, object]) -> Heartbeat | None:
    match values:
        case {"count": int(count), "state": str(state), "phase": int(phase), "lost_contact": bool(lost)}:
            return Heartbeat(count, state, phase, lost)
    return None


class PeerMonitor:
    """Sends this machine's heartbeat and reads the other machines'; `names` lists all machines."""

    def __init__(
        self,
        messages: MessageStore,
        here: int,
        names: Sequence[str],
        timeout_seconds: float,
        suspect_seconds: float = SUSPECT_SECONDS,
    ) -> None:
        self.messages, self.here, self.names = messages, here, names
        self.timeout_seconds, self.suspect_seconds = timeout_seconds, min(suspect_seconds, timeout_seconds)
        # four heartbeats within the timeout, so that a single late one does not end the run
        self.interval_seconds = min(HEARTBEAT_SECONDS, timeout_seconds / 4)
        self.state, self.phase, self.lost_contact = "running", 0, False  # by the launcher, for the thread
        self.count = 0
        self.termination: Termination | None = None
        self.proposed: Termination | None = None
        self.cut_off = self.has_left = False
        self.answered = time.monotonic()
        """Time of the store's last answer."""
        others = (machine for machine in range(len(names)) if machine != here)
        self.received = {machine: (Heartbeat(0, ""), self.answered) for machine in others}
        """The last heartbeat of each other machine, and when it was read."""
        self.wake, self.closed = threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="peer monitor", daemon=True)

    def __enter__(self) -> PeerMonitor:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True  # a thread inside torch while the interpreter shuts down would abort the process
        self.wake.set()
        self.thread.join(0 if self._is_store_lost() else ANSWER_SECONDS)

    def terminate(self, termination: Termination) -> Termination:
        """Publish why the run ends. Return the reason published first, here or on another machine."""
        self.proposed = termination
        self._wait(lambda: self.termination, ANSWER_SECONDS)
        return self.termination or termination

    def find_silent(self) -> Termination | None:
        """Return the termination for a machine that has been silent for too long; None if there is none."""
        now = time.monotonic()
        silence = {machine: now - at for machine, (beat, at) in self.received.items() if beat.state != "left"}
        if self.here:  # machine 0 serves the store: if that does not answer, nothing is known of the others
            silence = {**silence, 0: now - self.answered}
        machine = max(silence, key=lambda machine: (silence[machine], -machine), default=self.here)
        if silence.get(machine, 0) <= self._allowed_seconds():
            return None
        return machine_silent(self.here, self.names[machine], silence[machine])

    def _allowed_seconds(self) -> float:
        lost = self.lost_contact or self.cut_off or any(beat.lost_contact for beat, _ in self.received.values())
        return self.suspect_seconds if lost else self.timeout_seconds

    def first_silent_since(self, asked: float) -> Termination | None:
        """Wait for a heartbeat of every machine later than a time; return the termination for one that sends
        none.

        None also where the run ends for a reason that is known meanwhile.
        """
        self.lost_contact = True  # so that it takes no longer than `suspect_seconds`
        while not all(beat.state == "left" or at > asked for beat, at in self.received.values()):
            if self.termination is not None:
                return None
            if silent := self.find_silent():
                return silent
            time.sleep(0.05)
        return None

    def others_are(self, *states: str) -> bool:
        """True if the last heartbeat of every other machine had one of these states."""
        return all(beat.state in states for beat, _ in self.received.values())

    @property
    def phase_elsewhere(self) -> int:
        """The phase of the furthest rank of the other machines."""
        return max((beat.phase for beat, _ in self.received.values()), default=0)

    def leave(self, timeout_seconds: float) -> None:
        """Publish that this machine has finished. Machine 0 serves the store until all others leave."""
        self.state = "left"
        self._wait(lambda: self.has_left, ANSWER_SECONDS)
        if self.here == 0:
            self._wait(lambda: self.others_are("left") or self.find_silent(), timeout_seconds)

    def _wait(self, done: Callable[[], object], timeout_seconds: float) -> None:
        """Wait until the thread has done something; not where the store does not answer."""
        self.wake.set()
        now = begin = time.monotonic()
        while not done() and not self.cut_off and now < begin + timeout_seconds:
            if self._is_store_lost():
                return
            time.sleep(0.01)
            now = time.monotonic()

    def _is_store_lost(self) -> bool:
        """True if the store has been silent for so long that waiting is useless."""
        return self.here > 0 and time.monotonic() - self.answered > self._allowed_seconds()

    def _run(self) -> None:
        from torch.distributed import DistError

        try:
            while not self.closed:
                state = self.state  # one reading: `has_left` must be about what was sent
                self._send(state)
                self._receive()
                self._exchange_termination()
                self.answered = time.monotonic()
                self.has_left = state == "left"
                self.wake.wait(self.interval_seconds)
                self.wake.clear()
        except (DistError, EnvironmentNotReady):  # machine 0 is gone, or a stranger keeps overwriting our key
            self.cut_off = True

    def _send(self, state: str) -> None:
        self.count += 1
        heartbeat = Heartbeat(self.count, state, self.phase, self.lost_contact)
        self.messages.write(heartbeat_key(self.here), asdict(heartbeat))

    def _receive(self) -> None:
        keys = {machine: heartbeat_key(machine) for machine in self.received}
        heartbeats = self.messages.read_all(keys.values(), parse_heartbeat)
        for machine, key in keys.items():
            # only a higher count: a recorded heartbeat, replayed by a stranger, is not a sign of life
            if key in heartbeats and heartbeats[key].count > self.received[machine][0].count:
                self.received[machine] = (heartbeats[key], time.monotonic())

    def _exchange_termination(self) -> None:
        """Publish this machine's termination unless another was first, or read another's."""
        parse = partial(parse_termination, machines=len(self.names))
        if self.termination:
            return
        if self.proposed:
            self.termination = self.messages.put_first(TERMINATION_KEY, self.proposed.as_json(), parse)
        else:
            self.termination = self.messages.read(TERMINATION_KEY, parse)


def heartbeat_key(machine: int) -> str:
    return f"launchers/beat/{machine}"
