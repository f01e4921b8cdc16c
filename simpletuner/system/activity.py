"""What this process is doing, as other threads and the launcher see it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Activity:
    """A counter that all ranks raise at the same places, and the text of the current phase.

    Ranks whose counter is lower than another's are behind: the others wait for them.
    """

    phase: int = 0
    doing: str = ""
    unsaved: bool = False
    """Whether there are trained steps that no checkpoint holds yet."""
    watched: bool = False
    """Whether this phase always computes, or reads and writes, unless it hangs; a flush to a slow disk may not."""

    changed: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set where a signal would now be answered otherwise, so that the launcher hears of it at once."""

    def begin(self, doing: str, unsaved: bool = False, watched: bool = True) -> None:
        """Enter a phase; all ranks enter the same phases in the same order."""
        is_other_kind = (unsaved, watched) != (self.unsaved, self.watched)
        self.doing, self.unsaved, self.watched = doing, unsaved, watched
        self.phase += 1
        if is_other_kind:  # rather than at every step, which may take milliseconds
            self.changed.set()

    def advance(self) -> None:
        """Note that this rank now waits for the others."""
        self.phase += 1
