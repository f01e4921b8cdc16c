"""The only place that prints: data to stdout, talk to stderr, quiet on every rank but the first."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from simpletuner.errors import SimpleTunerError


UNFOLDED = 10_000
"""Columns of tables that scripts read: no cell is broken into lines."""


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What may move the cursor, turn text round or cannot be printed: C0 and C1 but for tab and newline, bidirectional
marks, and the surrogates that stand for bytes of a file name which are not UTF-8."""


def printable(text: str) -> str:
    """Return text that is safe on a terminal and in a log: controls as escapes, and every further line indented.

    A name with a newline in it can so never begin a line, where errors and warnings begin.
    """
    return re.sub(r"\n(?=[^\n])(?!  )", "\n  ", CONTROLS.sub(escaped, text))


def escaped(control: re.Match[str]) -> str:
    """Return a control character as Python writes it."""
    return control[0].encode("unicode_escape", "surrogatepass").decode()


class Report:
    """Tell a person, or a script, what happens; `quiet` keeps ranks above 0 from saying it again."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.talk = Console(stderr=True, highlight=False, soft_wrap=True)
        self.data = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else UNFOLDED)

    def say(self, text: str, style: str = "") -> None:
        """Print one line of talk."""
        if not self.quiet:
            self.talk.print(printable(text), style=style, markup=False)

    def warn(self, text: str, hint: str = "") -> None:
        """Print something that the user should know and may ignore."""
        self.say(f"warning: {text}", style="yellow")
        if hint:
            self.say(f"hint: {hint}", style="dim")

    def error(self, error: SimpleTunerError) -> None:
        """Print why a command ended, on any rank: whoever calls this has the reason."""
        self.talk.print(printable(f"error: {error.message}"), style="bold red", markup=False)
        if error.hint:
            self.talk.print(printable(f"hint: {error.hint}"), style="dim", markup=False)

    def json(self, value: Any) -> None:
        """Print a value for scripts."""
        sys.stdout.write(json.dumps(value, indent=2) + "\n")

    def text(self, text: str) -> None:
        """Print text for scripts, as it is."""
        sys.stdout.write(text)

    def table(self, title: str, rows: Iterable[Sequence[object]], columns: Sequence[str] = ()) -> None:
        """Print rows as a table of talk; without `columns`, as name and value pairs."""
        if not self.quiet:
            self.talk.print(table_of(title, rows, columns), markup=False)

    def data_table(self, title: str, rows: Iterable[Sequence[object]], columns: Sequence[str]) -> None:
        """Print rows as a table that is what the user asked for; whole words, however wide."""
        self.data.print(table_of(title, rows, columns), markup=False)

    def confirm(self, question: str) -> bool:
        """Ask a person at the terminal; anything but yes means no."""
        self.talk.print(printable(f"{question} [y/N] "), end="", markup=False)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def ask(self, question: str, choices: Sequence[str] = (), default: str = "") -> str:
        """Ask a person at the terminal until the answer is one of the choices, if there are any.

        An empty answer means the default. Raises EOFError at the end of input.
        """
        from rich.prompt import Prompt

        return Prompt.ask(
            question, console=self.talk, choices=list(choices) or None, default=default, case_sensitive=False
        )

    def checklist(self, rows: Iterable[tuple[str, str, str, Sequence[str]]], styles: Mapping[str, str]) -> None:
        """Print name, status and sentence of each row as data, and below what to type, each on a line to be copied."""
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
        """Print one line of data."""
        self.data.print(printable(text), style=style, markup=False)

    def progress(self, title: str, total: int, done: int = 0) -> Progress:
        """Return a progress display: a bar on a terminal, a line now and then elsewhere."""
        return Progress(self, title, total, done)


def table_of(title: str, rows: Iterable[Sequence[object]], columns: Sequence[str]) -> Table:
    """Return rows as a plain table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=printable(title), title_justify="left", box=box.SIMPLE, show_header=bool(columns), pad_edge=False
    )
    for index, column in enumerate(columns or ("", "")):
        table.add_column(column, style="" if columns or index else "dim", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


class Progress:
    """Show how far a long job is; `line_seconds` is the pace of plain lines where there is no terminal."""

    def __init__(self, report: Report, title: str, total: int, done: int, line_seconds: float = 10.0) -> None:
        self.report, self.title, self.total, self.done = report, title, total, done
        self.line_seconds, self.next_line, self.said = line_seconds, 0.0, False
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
        """Set the count done, with a short note such as the loss."""
        again, self.done = self.said and done == self.done, done
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, note=note)
        elif not again and (time.monotonic() >= self.next_line or done == self.total):
            self.said = True
            self.next_line = time.monotonic() + self.line_seconds
            self.report.say(f"{self.title}: {done}/{self.total}{'  ' + note if note else ''}")
