"""All printing: results to stdout, messages to stderr; only rank 0 prints messages."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from simpletuner.credentials import mask_credentials
from simpletuner.run_log import LOGGER, escape_controls
from simpletuner.status_line import Erase, Progress, StatusLine, is_animated

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from simpletuner.errors import SimpleTunerError


TERMINAL_BY_NAME = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Variables by which rich takes any stream for a terminal, as in CI."""

# Width of tables where there is no terminal: cells are not wrapped, so that scripts can parse them.
UNFOLDED = 10_000


def printable(text: str) -> str:
    """Make text safe for terminals and logs: credentials masked, controls escaped, further lines indented."""
    # the indent keeps a file name with a newline from faking a line that begins with `error:`
    return re.sub(r"\n(?=[^\n])(?!  )", "\n  ", escape_controls(mask_credentials(text)))


def wrapped(text: str, console: Console) -> str:
    # A terminal would break lines anywhere.
    if not is_animated(console):
        return text
    return "\n".join(wrapped_line(line, console.width) for line in text.split("\n"))


def wrapped_line(line: str, width: int) -> str:
    """Continue below the second column of a line, else with an indent, as no other message begins."""
    from rich.cells import cell_len

    columns = re.match(r"\s*\S+(?: \S+)*\s{2,}", line)
    indent = " " * (cell_len(columns[0]) if columns and 2 * len(columns[0]) < width else 2)
    rows = [""]
    for gap, word in re.findall(r"(\s*)(`[^`]*`\S*|\S+)", line):
        if rows[-1].strip() and cell_len(rows[-1] + gap + word) > width:
            rows.append(indent + word)
        else:
            rows[-1] += gap + word
    return "\n".join(rows)


class Report:
    """Print for people and scripts; `quiet` silences messages, on ranks above 0."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    @cached_property
    def talk(self) -> Console:
        return open_console(stderr=True)

    @cached_property
    def data(self) -> Console:
        return open_console(stderr=False)

    @cached_property
    def status(self) -> StatusLine:
        return StatusLine(self.talk, self.say, LOGGER.info, self.quiet)

    def say(self, text: str, style: str = "") -> None:
        """Print a message to stderr, and keep it in the log of a run."""
        if not self.quiet:
            self._print(printable(text), style)

    def _print(self, text: str, style: str) -> None:
        LOGGER.info(text)
        if is_plain(sys.stderr):
            sys.stderr.write(f"{text}\n")
        else:
            self.talk.print(*self._erase(), wrapped(text, self.talk), style=style, markup=False)

    def _erase(self) -> list[Erase]:
        """Return the control codes that remove a status line, of this process or of another one, before other
        output."""
        return [Erase()] if is_animated(self.talk) else []

    def confirm_stop(self, text: str) -> None:
        """Answer Ctrl-C, which the terminal has shown as `^C` where the cursor was."""
        self.say(f"\n{text}" if self.talk.is_terminal and not is_animated(self.talk) else text)

    def warn(self, text: str, hint: str = "") -> None:
        self.say(f"warning: {text}", style="yellow")
        if hint:
            self.say(f"hint: {hint}", style="dim")

    def warn_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.warn(text)

    def error(self, error: SimpleTunerError) -> None:
        # Even if quiet: only the rank that knows the reason calls this.
        self._print(printable(f"error: {error.message}"), "bold red")
        if error.hint:
            self._print(printable(f"hint: {error.hint}"), "dim")

    def json(self, value: Any) -> None:
        sys.stdout.write(mask_credentials(json.dumps(value, indent=2)) + "\n")

    def text(self, text: str) -> None:
        """Print text unchanged; as UTF-8 where the encoding of stdout lacks a character of it."""
        if encodable(text, sys.stdout.encoding):
            sys.stdout.write(text)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode(errors="backslashreplace"))

    def table(self, title: str, rows: Iterable[Sequence[object]], columns: Sequence[str] = ()) -> None:
        """Print rows as a table to stderr, below a blank line; without `columns`, as name and value pairs."""
        if self.quiet:
            return
        table, plain = table_of(title, rows, columns), is_plain(sys.stderr)
        text = as_text(table) if plain or LOGGER.isEnabledFor(logging.INFO) else ""
        LOGGER.info("\n".join(line.rstrip() for line in text.splitlines() if line.strip()))
        if plain and encodable(text, sys.stderr.encoding):
            sys.stderr.write(f"\n{text}")  # a new layout of a start's three tables is 7 % of its CPU time
        else:
            self.talk.print(*self._erase(), "", table, markup=False)

    def data_table(self, title: str, rows: Iterable[Sequence[object]], columns: Sequence[str]) -> None:
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
        """Print name, status, sentence and fixes of each row to stdout; fixes stay whole, to be copied."""
        if is_plain(sys.stdout):
            for name, status, sentence, fixes in rows:
                self.line(f"  {name:<10}{status:<6}{sentence}")
                for fix in fixes:
                    self.line(f"      fix: {fix}")
            return
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
        if is_plain(sys.stdout):
            # With the escapes of `open_standard_streams`: `text` is for the content of a file.
            sys.stdout.write(f"{printable(text)}\n")
        else:
            self.data.print(wrapped(printable(text), self.data), style=style, markup=False)

    def progress(
        self, title: str, total: int, done: int = 0, left: Callable[[int], float | None] | None = None
    ) -> Progress:
        """Return a context that shows how much of a job is done; see Progress for `left`."""
        return Progress(self.status, title, total, done, left)

    def phase(self, name: str) -> AbstractContextManager[None]:
        self.status.begin(name)
        return self.status.running()


def open_console(stderr: bool) -> Console:
    from rich.console import Console

    # Without `emoji=False` rich would print the folder `run:key:1` as `run🔑1`.
    console = Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:  # where rich would fold tables at 80 columns, also within paths
        console.width = UNFOLDED
    return console


def is_plain(stream: TextIO) -> bool:
    """True where rich, which takes 0.02 CPU s to import and 0.1 ms a line, would add nothing to a text."""
    return not stream.isatty() and not TERMINAL_BY_NAME & os.environ.keys()


def encodable(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


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


def as_text(table: Table) -> str:
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=UNFOLDED, highlight=False, soft_wrap=True, emoji=False).print(table, markup=False)
    return text.getvalue()
