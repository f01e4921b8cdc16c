"""What this process is doing, as other threads and the launcher see it."""

from __future__ import annotations

from dataclasses import dataclass


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

    def begin(self, doing: str, unsaved: bool = False, watched: bool = True) -> None:
        """Enter a phase; all ranks enter the same phases in the same order."""
        self.doing, self.unsaved, self.watched = doing, unsaved, watched
        self.phase += 1

    def advance(self) -> None:
        """Note that this rank now waits for the others."""
        self.phase += 1
