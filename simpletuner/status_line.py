"""The status line: redrawn in place on a terminal, otherwise printed once a minute.

On a terminal the cursor stays at the start of the line. So whatever is printed next, by any process, begins
there, and a terminal that rewraps the line when it becomes narrower leaves the cursor before all of its rows:
erasing what follows the cursor leaves nothing behind. rich's Live moves up by the rows that it drew, which
are others after a resize.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

DRAW_SECONDS = 0.5
# Between lines where there is no terminal, and in the log.
LINE_SECONDS = 60.0
# 30 years; timedelta raises beyond 3 million.
LONGEST_SECONDS = 1e9
# A phase that takes longer shows for how long it has been running, and a job how long the rest takes.
SOON_SECONDS = 3.0


class Erase:
    """Control codes for rich: return to the start of the line, and erase from there to the end of the screen.
    In two parts: what is erased from the upper left corner on, tmux adds to its history, each time.

    In two parts: what is erased from the upper left corner on, tmux adds to its history, each time.
    """

    def __rich_console__(self, console: Console, options: object) -> Iterator[object]:
        from rich.segment import ControlType, Segment

        yield Segment("\r\x1b[K\x1b[C\x1b[J\r", None, [(ControlType.CLEAR,)])


def is_animated(console: Console) -> bool:
    # rich drops control codes elsewhere.
    return console.is_terminal and not console.is_dumb_terminal


class StatusLine:
    """The phase that is running, how much of it is done, and how much time is left.

    `say` prints a line where there is no terminal; `log` keeps one where there is.
    """

    def __init__(self, console: Console, say: Callable[[str], None], log: Callable[[str], None], quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.emit = log if is_animated(console) else say
        self.watch: Callable[[str, int, int], None] = lambda doing, done, total: None
        """Called twice a second with the phase and its progress; `total` is 0 where that is not counted."""
        self.jobs: list[Progress] = []
        self.phase, self.phase_began = "", 0.0
        self.line_seconds, self.next_line = LINE_SECONDS, 0.0
        self.holders, self.closed = 0, threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self, phase: str) -> None:
        if phase != self.phase:
            self.phase, self.phase_began = phase, time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the line within; contexts may be nested."""
        self.holders += 1
        if self.holders == 1 and not self.quiet:
            self.next_line, self.closed = time.monotonic() + self.line_seconds, threading.Event()
            self.thread = threading.Thread(target=self._run, args=(self.closed,), name="status line", daemon=True)
            self.thread.start()
        try:
            yield
        finally:
            self.holders -= 1
            if self.holders == 0 and self.thread is not None:
                self.closed.set()
                self.thread.join()
                self.thread = None

    def _run(self, closed: threading.Event) -> None:
        animated = is_animated(self.console)
        while not closed.wait(DRAW_SECONDS):
            if animated:
                self._draw()
            self._tell()
            if time.monotonic() >= self.next_line:
                self.write_line()
        if animated:
            self.console.print(Erase(), end="")

    def _tell(self) -> None:
        inner = self._inner_job()
        self.watch(self.phase, *((inner.done, inner.total) if inner else (0, 0)))

    def _inner_job(self) -> Progress | None:
        """Return the job that is the present phase."""
        # A copy: the thread that draws reads while another one begins and ends jobs.
        jobs = list(self.jobs)
        return jobs[-1] if jobs and jobs[-1].title == self.phase else None

    def _draw(self) -> None:
        from rich.text import Text

        width = self.console.width - 2  # a margin for the cursor, and a last column that does not wrap
        line = Text(f" {fitting(self.parts(), width)}")
        self.console.print(Erase(), line, end="\r", no_wrap=True, overflow="ellipsis", crop=True, soft_wrap=False)

    def write_line(self) -> None:
        """Print the line, or keep it in the log where it is drawn."""
        self.next_line = time.monotonic() + self.line_seconds
        if (parts := self.parts()) and not self.quiet:
            self.emit("  ".join(parts))

    def parts(self) -> list[str]:
        """Return the parts of the line, the most important first."""
        inner = self._inner_job()
        outer = next((job for job in list(self.jobs) if job is not inner), None)
        parts = [inner.count() if inner else self._phase_text()]
        if outer is not None:
            parts += [outer.time_left(), outer.count()]
        elif inner is not None:
            parts += [inner.time_left(), *inner.notes]
        return [part for part in parts if part]

    def _phase_text(self) -> str:
        seconds = time.monotonic() - self.phase_began
        return f"{self.phase} ({format_seconds(seconds)})" if self.phase and seconds > SOON_SECONDS else self.phase


class Progress:
    """Progress of a job, as the status line shows it while the context lasts."""

    def __init__(
        self, line: StatusLine, title: str, total: int, done: int, left: Callable[[int], float | None] | None
    ) -> None:
        """`left` returns the seconds that the rest takes; by default, at the mean speed so far."""
        self.line, self.title, self.total, self.done = line, title, total, done
        self.left = left or self._left_at_mean_speed
        self.notes: tuple[str, ...] = ()
        self.last_written = -1
        self.began, self.done_before = time.monotonic(), done
        self.ends: float | None = None
        """Time at which the job ends, by the last estimate."""
        self.running = line.running()

    def __enter__(self) -> Progress:
        self.line.jobs.append(self)
        self.line.begin(self.title)
        self.running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.line.jobs.remove(self)
        self.line.begin(self.line.jobs[-1].title if self.line.jobs else "")
        self.running.__exit__(None, None, None)

    def update(self, done: int, *notes: str) -> None:
        """Set the number done, with notes such as the loss; a narrow terminal shows the first of them."""
        self.done, self.notes = done, notes
        left = self.left(done)
        self.ends = time.monotonic() + left if left is not None else None
        is_outer = not self.line.jobs or self.line.jobs[0] is self
        if is_outer and (self.last_written < 0 or done == self.total != self.last_written):
            self.last_written = done
            self.line.write_line()

    def count(self) -> str:
        return f"{self.title}: {self.done}/{self.total}"

    def time_left(self) -> str:
        """Format how long the rest takes; empty where nothing is done, or nothing is left."""
        if self.ends is None:
            return ""
        left = max(0.0, self.ends - time.monotonic())
        # After the last step there may be a checkpoint, validation images and the export.
        return f"{format_seconds(left)} left" if left >= 0.5 or self.done < self.total else ""

    def _left_at_mean_speed(self, done: int) -> float | None:
        done_now, seconds = done - self.done_before, time.monotonic() - self.began
        # Threads start and files are opened meanwhile: 7 minutes passed from the first of 100,000 images.
        if done_now <= 0 or seconds < SOON_SECONDS:
            return None
        return (self.total - done) * seconds / done_now


def format_seconds(seconds: float) -> str:
    # An estimate may be anything: it follows from numbers in files.
    return str(timedelta(seconds=round(seconds))) if abs(seconds) < LONGEST_SECONDS else "a long time"


def fitting(parts: Iterable[str], width: int) -> str:
    """Join the parts that fit into a width; the first one always counts as fitting."""
    from rich.cells import cell_len

    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if not line or cell_len(longer) <= width:
            line = longer
    return line
