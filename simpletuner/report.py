"""All printing: results to stdout, messages to stderr; only rank 0 prints messages."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from simpletuner.errors import SimpleTunerError


UNFOLDED = 10_000
"""Width of tables when stdout is not a terminal: cells are not wrapped, so that scripts can parse them."""


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, reverse text or cannot be printed: C0 and C1 controls except tab and newline,
bidirectional marks, and the surrogates that stand for bytes of a file name that are not UTF-8."""


def printable(text: str) -> str:
    """Make text safe for terminals and logs: escape control characters and indent all lines but the first."""
    # the indent keeps a file name with a newline from faking a line that begins with `error:`
    return re.sub(r"\n(?=[^\n])(?!  )", "\n  ", CONTROLS.sub(escaped, text))


def escaped(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape", "surrogatepass").decode()


class Report:
    """Print for people and scripts; `quiet` silences messages, on ranks above 0."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self.quiet = quiet
        # Without `emoji=False` rich would print the folder `run:key:1` as `run🔑1`.
        self.talk = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        width = None if sys.stdout.isatty() else UNFOLDED
        self.data = Console(highlight=False, soft_wrap=True, emoji=False, width=width)

    def say(self, text: str, style: str = "") -> None:
        """Print a message to stderr."""
        if not self.quiet:
            self.talk.print(printable(text), style=style, markup=False)

    def warn(self, text: str, hint: str = "") -> None:
        """Print a warning, and what to do about it."""
        self.say(f"warning: {text}", style="yellow")
        if hint:
            self.say(f"hint: {hint}", style="dim")

    def warn_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.warn(text)

    def error(self, error: SimpleTunerError) -> None:
        """Print why a command failed, on any rank, even if quiet: only the rank that knows the reason calls this."""
        self.talk.print(printable(f"error: {error.message}"), style="bold red", markup=False)
        if error.hint:
            self.talk.print(printable(f"hint: {error.hint}"), style="dim", markup=False)

    def json(self, value: Any) -> None:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")

    def text(self, text: str) -> None:
        """Print text unchanged."""
        sys.stdout.write(text)

    def table(self, title: str, rows: Iterable[Sequence[object]], columns: Sequence[str] = ()) -> None:
        """Print rows as a table to stderr; without `columns`, as name and value pairs."""
        if not self.quiet:
            self.talk.print(table_of(title, rows, columns), markup=False)

    def data_table(self, title: str, rows: Iterable[Sequence[object]], columns: Sequence[str]) -> None:
        """Print rows as a table to stdout."""
        self.data.print(table_of(title, rows, columns), markup=False)

    def confirm(self, question: str) -> bool:
        """Ask a yes/no question; anything but yes means no."""
        self.talk.print(printable(f"{question} [y/N] "), end="", markup=False)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def ask(self, question: str, choices: Sequence[str] = (), default: str = "") -> str:
        """Ask until the answer is one of `choices`, if any are given; an empty answer means the default.

        Raises EOFError at the end of input.
        """
        from rich.prompt import Prompt

        return Prompt.ask(
            question, console=self.talk, choices=list(choices) or None, default=default, case_sensitive=False
        )

    def checklist(self, rows: Iterable[tuple[str, str, str, Sequence[str]]], styles: Mapping[str, str]) -> None:
        """Print name, status, sentence and fixes of each row to stdout; fixes are not wrapped, to be copied."""
        from rich.text import Text

        for name, status, sentence, fixes in rows:
            margin = f"  {name:<10}{status:<6}"
            lines = textwrap.wrap(
                printable(sentence), max(40, self.data.width - len(margin)), break_on_hyphens=False
            ) or [""]
            start = (
                Text(printable(f"  {name:<10}")).append(f"{status:<6}", style=styles.get(status, "")).append(lines[0])
            )
            self.data.print(start)
            for line in lines[1:]:
                self.data.print(" " * len(margin) + line, markup=False)
            for fix in fixes:
                self.data.print(Text(printable(f"      fix: {fix}"), style="cyan"))

    def line(self, text: str, style: str = "") -> None:
        """Print a line to stdout."""
        self.data.print(printable(text), style=style, markup=False)

    def progress(self, title: str, total: int, done: int = 0) -> Progress:
        """Start a progress display: a bar on a terminal, otherwise a line every 10 seconds."""
        return Progress(self, title, total, done)


def table_of(title: str, rows: Iterable[Sequence[object]], columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Text, not str: a str would be read as markup
    heading = Text(printable(title), style="table.title") if title else None
    table = Table(title=heading, title_justify="left", box=box.SIMPLE, show_header=bool(columns), pad_edge=False)
    for index, column in enumerate(columns or ("", "")):
        table.add_column(column, style="" if columns or index else "dim", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


class Progress:
    """Progress of a long job; `line_seconds` is the interval between lines where there is no terminal."""

    def __init__(self, report: Report, title: str, total: int, done: int, line_seconds: float = 10.0) -> None:
        self.report, self.title, self.total, self.done = report, title, total, done
        self.line_seconds, self.next_line, self.said = line_seconds, 0.0, False
        self.began, self.done_before = time.monotonic(), done
        self.bar: Any = None
        if report.talk.is_terminal and not report.quiet:
            self.bar = self._start_bar()

    def _start_bar(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.report.talk, refresh_per_second=2)
        bar.add_task(self.title, total=self.total, completed=self.done, note="")
        bar.start()
        return bar

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, note: str = "") -> None:
        """Set the number done, with a short note such as the loss."""
        again, self.done = self.said and done == self.done, done
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, note=note)
        elif not again and (time.monotonic() >= self.next_line or done == self.total):
            self.said = True
            self.next_line = time.monotonic() + self.line_seconds
            self.report.say(f"{self.title}: {done}/{self.total}{'  ' + note if note else ''}{self.time_left()}")

    def time_left(self) -> str:
        """Format how long the rest takes at the mean speed so far; empty where nothing is done, or nothing is left."""
        done_now, left = self.done - self.done_before, self.total - self.done
        if done_now <= 0 or left <= 0:
            return ""
        return f"  {timedelta(seconds=round(left * (time.monotonic() - self.began) / done_now))} left"
