"""Activity of this process, for its heartbeat to the launcher and for stall detection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Activity:
    """The current phase: its text, and a counter that all ranks increment at the same points.

    A rank whose counter is lower than another's is behind: the others wait for it.
    """

    phase: int = 0
    doing: str = ""
    unsaved: int = 0
    """The step that a stop would finish and save; 0 if there are no trained steps that a checkpoint lacks."""
    save_seconds: float = 0.0
    """Duration of saving, as far as it is known."""
    watched: bool = False
    """True if this phase uses CPU or disk unless it hangs; False for a flush to a slow disk."""

    changed: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when the answer to Ctrl-C changes (`unsaved`), so that the launcher learns of it at once."""
    show: Callable[[str], None] = field(default=lambda phase: None, repr=False)
    """Called with each phase, for the status line."""

    def begin(self, doing: str, unsaved: int = 0, watched: bool = True, shown_as: str = "") -> None:
        """Enter a phase. All ranks enter the same phases in the same order.

        `shown_as` is what the status line shows of several short phases that follow one another.
        """
        is_other_kind = (bool(unsaved), watched) != (bool(self.unsaved), self.watched)
        self.show(shown_as or doing)
        self.doing, self.unsaved, self.watched = doing, unsaved, watched
        self.phase += 1
        if is_other_kind:  # not at every step: steps may take milliseconds
            self.changed.set()

    def advance(self) -> None:
        """Count that this rank now waits for the others."""
        self.phase += 1
