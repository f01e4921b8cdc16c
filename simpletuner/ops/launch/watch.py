"""Launchers watch one another: each beats in the store every second, and whoever ends early says why.

Only the thread touches the store: where a cable was cut, a call to it may never return, and the launcher must still be
able to end its ranks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from simpletuner.ops.launch.ending import Ending, machine_is_silent

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_SECONDS = 1.0
TELL_SECONDS = 3.0
"""How long to wait for the store to take a message."""
SUSPECT_SECONDS = 5.0
"""How long a machine may be silent when contact to it was lost already, which is no matter of patience any more."""

ENDING = "launchers/ending"
LOST = "simpletuner/lost"
REASON = "simpletuner/failures/{machine}/reason"
"""Keys that ranks set (parallel/world.py): a peer went away; why the first rank of a machine failed."""


class Watch:
    """This machine's beat, and what it knows of the others; `names` says what to call them all."""

    def __init__(
        self,
        store: Store,
        here: int,
        names: Sequence[str],
        timeout_seconds: float,
        suspect_seconds: float = SUSPECT_SECONDS,
    ) -> None:
        self.store, self.here, self.names = store, here, names
        self.timeout_seconds, self.suspect_seconds = timeout_seconds, min(suspect_seconds, timeout_seconds)
        self.beat_seconds = min(BEAT_SECONDS, timeout_seconds / 4)
        self.state, self.count = "running", 0
        self.ending: Ending | None = None
        self.wish: Ending | None = None
        self.lost_contact = self.cut_off = self.has_left = False
        self.reason = ""  # what the first rank of this machine that failed has left
        self.answered = time.monotonic()
        others = (machine for machine in range(len(names)) if machine != here)
        self.heard = {machine: ("", self.answered) for machine in others}
        self.woken, self.over = threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True  # a thread of torch's that runs on while Python ends would abort the process
        self.woken.set()
        self.thread.join(0 if self._out_of_reach() else TELL_SECONDS)

    def tell(self, ending: Ending) -> Ending:
        """Tell all machines why the run ends. Return what was told first, here or elsewhere."""
        self.wish = ending
        self._wait(lambda: self.ending, TELL_SECONDS)
        return self.ending or ending

    def silent(self) -> Ending | None:
        """Return the ending that a silent machine brings; None while all are heard."""
        now = time.monotonic()
        silence = {machine: now - at for machine, (beat, at) in self.heard.items() if not beat.endswith("left")}
        if self.here:  # without an answer from machine 0, which serves the store, nobody is heard
            silence = {**silence, 0: now - self.answered}
        machine = max(silence, key=lambda machine: (silence[machine], -machine), default=self.here)
        if silence.get(machine, 0) <= self._allowed_seconds():
            return None
        return machine_is_silent(self.here, self.names[machine], silence[machine])

    def _allowed_seconds(self) -> float:
        """Return how long a machine may be silent."""
        return self.suspect_seconds if self.lost_contact or self.cut_off else self.timeout_seconds

    def others_are(self, *states: str) -> bool:
        """Return whether every other machine was last heard in one of these states."""
        return all(beat.endswith(states) for beat, _ in self.heard.values())

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
        except DistError:
            self.cut_off = True

    def _beat(self, state: str) -> None:
        """Show that this machine lives, and what it is at."""
        self.count += 1
        self.store.set(f"launchers/beat/{self.here}", f"{self.count} {state}")

    def _listen(self) -> None:
        """Note which machines have beaten since the last time, and what ranks have left word of."""
        keys = {machine: f"launchers/beat/{machine}" for machine in self.heard}
        if keys and self.store.check(list(keys.values())):
            for machine, beat in zip(keys, self.store.multi_get(list(keys.values())), strict=True):
                if beat.decode() != self.heard[machine][0]:
                    self.heard[machine] = (beat.decode(), time.monotonic())
        self.lost_contact = self.lost_contact or self.store.check([LOST])
        reason = REASON.format(machine=self.here)
        if not self.reason and self.store.check([reason]):
            self.reason = self.store.get(reason).decode()

    def _read_ending(self) -> None:
        """Put up what this machine has to tell, unless another was first, and read what was told."""
        if self.wish and not self.ending:
            self.store.compare_set(ENDING, "", self.wish.with_reason(self.reason).as_json())
        if not self.ending and self.store.check([ENDING]):
            self.ending = Ending(**json.loads(self.store.get(ENDING)))
