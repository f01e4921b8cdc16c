"""What this process is doing, for its heartbeat to the launcher and for stall detection."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Activity:
    """The current phase: its text, and a counter that all ranks increment at the same points.

    A rank whose counter is lower than another's is behind, and the other ranks wait for it.
    """

    phase: int = 0
    doing: str = ""
    unsaved: bool = False
    """Whether there are trained steps that are not in a checkpoint yet."""
    watched: bool = False
    """Whether this phase always uses CPU or disk unless it hangs. False for a flush to a slow disk, which may not."""

    changed: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when the answer to Ctrl-C changes (`unsaved`), so that the launcher learns of it at once."""

    def begin(self, doing: str, unsaved: bool = False, watched: bool = True) -> None:
        """Enter a phase. All ranks enter the same phases in the same order."""
        is_other_kind = (unsaved, watched) != (self.unsaved, self.watched)
        self.doing, self.unsaved, self.watched = doing, unsaved, watched
        self.phase += 1
        if is_other_kind:  # not at every step: steps may take milliseconds
            self.changed.set()

    def advance(self) -> None:
        """Count that this rank now waits for the others."""
        self.phase += 1
