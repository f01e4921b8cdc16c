"""Launchers watch one another: each beats in the store every second, and whoever ends early says why.

Only the thread touches the store: where a cable was cut, a call to it may never return, and the launcher must still be
able to end its ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.launch.registration import put_first
from simpletuner.launch.signing import MessageSigner
from simpletuner.launch.termination import Termination, machine_is_silent, parse_termination

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_SECONDS = 1.0
TELL_SECONDS = 3.0
"""How long to wait for the store to take a message."""
SUSPECT_SECONDS = 5.0
"""How long a machine may be silent when contact to it was lost already, which is no matter of patience any more."""

ENDING = "launchers/ending"


@dataclass(frozen=True)
class Heartbeat:
    """What a launcher writes every second: that it lives, what it is at, and what its ranks tell."""

    count: int
    state: str = "running"
    phase: int = 0
    """How far its furthest rank is."""
    lost_contact: bool = False
    """Whether one of its ranks has lost another."""


def beat_from(values: Mapping[str, Any] | None) -> Heartbeat | None:
    """Return the beat that another machine wrote; None if it is none."""
    match values:
        case {"count": int(count), "state": str(state), "phase": int(phase), "lost_contact": bool(lost)}:
            return Heartbeat(count, state, phase, lost)
    return None


class PeerMonitor:
    """This machine's beat, and what it knows of the others; `names` says what to call them all."""

    def __init__(
        self,
        store: Store,
        here: int,
        names: Sequence[str],
        timeout_seconds: float,
        suspect_seconds: float = SUSPECT_SECONDS,
        seal: MessageSigner | None = None,
    ) -> None:
        self.store, self.here, self.names, self.seal = store, here, names, seal or MessageSigner()
        self.timeout_seconds, self.suspect_seconds = timeout_seconds, min(suspect_seconds, timeout_seconds)
        self.beat_seconds = min(BEAT_SECONDS, timeout_seconds / 4)
        self.mine = Heartbeat(0)
        self.ending: Termination | None = None
        self.wish: Termination | None = None
        self.cut_off = self.has_left = False
        self.answered = time.monotonic()
        others = (machine for machine in range(len(names)) if machine != here)
        self.heard = {machine: (Heartbeat(0, ""), self.answered) for machine in others}
        self.state, self.phase, self.lost_contact = "running", 0, False
        self.woken, self.over = threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> PeerMonitor:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True  # a thread of torch's that runs on while Python ends would abort the process
        self.woken.set()
        self.thread.join(0 if self._out_of_reach() else TELL_SECONDS)

    def tell(self, ending: Termination) -> Termination:
        """Tell all machines why the run ends. Return what was told first, here or elsewhere."""
        self.wish = ending
        self._wait(lambda: self.ending, TELL_SECONDS)
        return self.ending or ending

    def silent(self) -> Termination | None:
        """Return the ending that a silent machine brings; None while all are heard."""
        now = time.monotonic()
        silence = {machine: now - at for machine, (beat, at) in self.heard.items() if beat.state != "left"}
        if self.here:  # without an answer from machine 0, which serves the store, nobody is heard
            silence = {**silence, 0: now - self.answered}
        machine = max(silence, key=lambda machine: (silence[machine], -machine), default=self.here)
        if silence.get(machine, 0) <= self._allowed_seconds():
            return None
        return machine_is_silent(self.here, self.names[machine], silence[machine])

    def _allowed_seconds(self) -> float:
        """Return how long a machine may be silent."""
        lost = self.lost_contact or self.cut_off or any(beat.lost_contact for beat, _ in self.heard.values())
        return self.suspect_seconds if lost else self.timeout_seconds

    def others_are(self, *states: str) -> bool:
        """Return whether every other machine was last heard in one of these states."""
        return all(beat.state in states for beat, _ in self.heard.values())

    @property
    def phase_elsewhere(self) -> int:
        """Return how far the furthest rank of the other machines is."""
        return max((beat.phase for beat, _ in self.heard.values()), default=0)

    def leave(self, patience_seconds: float) -> None:
        """Say goodbye. Machine 0 stays until all others have left, since it serves the store."""
        self.state = "left"
        self._wait(lambda: self.has_left, TELL_SECONDS)
        if self.here == 0:
            self._wait(lambda: self.others_are("left") or self.silent(), patience_seconds)

    def _wait(self, done: Callable[[], object], seconds: float) -> None:
        """Wait until the thread has done something, for some seconds at most; not where the store is out of reach."""
        self.woken.set()
        now = begin = time.monotonic()
        while not done() and not self.cut_off and now < begin + seconds:
            if self._out_of_reach():
                return
            time.sleep(0.01)
            now = time.monotonic()

    def _out_of_reach(self) -> bool:
        """Return whether the store has given no answer for so long that there is no use in waiting for one."""
        return self.here > 0 and time.monotonic() - self.answered > self._allowed_seconds()

    def _run(self) -> None:
        """Beat and listen until the process ends, or until machine 0 is gone."""
        from torch.distributed import DistError

        try:
            while not self.over:
                state = self.state
                self._beat(state)
                self._listen()
                self._read_ending()
                self.answered = time.monotonic()
                self.has_left = state == "left"
                self.woken.wait(self.beat_seconds)
                self.woken.clear()
        except (DistError, EnvironmentNotReady):
            self.cut_off = True

    def _beat(self, state: str) -> None:
        """Show that this machine lives, and what it is at."""
        self.mine = Heartbeat(self.mine.count + 1, state, self.phase, self.lost_contact)
        key = f"launchers/beat/{self.here}"
        self.store.set(key, self.seal.write(key, asdict(self.mine)))

    def _listen(self) -> None:
        """Note which machines have beaten since the last time; counts only rise, so that nothing old is taken."""
        keys = {machine: f"launchers/beat/{machine}" for machine in self.heard}
        if not self.store.check(list(keys.values())):  # one request for all, as a rule
            keys = {machine: key for machine, key in keys.items() if self.store.check([key])}
        messages = self.store.multi_get(list(keys.values())) if keys else []
        for (machine, key), message in zip(keys.items(), messages, strict=True):
            beat = beat_from(self.seal.read(key, message))
            if beat is not None and beat.count > self.heard[machine][0].count:
                self.heard[machine] = (beat, time.monotonic())

    def _read_ending(self) -> None:
        """Put up what this machine has to tell, unless another was first, and read what was told."""
        parse = partial(parse_termination, machines=len(self.names))
        if self.ending:
            return
        if self.wish:
            self.ending = put_first(self.store, self.seal, ENDING, self.wish.as_json(), parse)
        elif self.store.check([ENDING]):
            self.ending = parse(self.seal.read(ENDING, self.store.get(ENDING)))
