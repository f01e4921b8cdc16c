"""`log.txt` as entries."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from simpletuner.page.runs.folder import RunFolder
from simpletuner.run_log import LOG, STARTED

ENTRY = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<source>\[[^\]]*\] )?(?P<text>.*)")
KINDS = ("warning", "error", "traceback")
# Of the end of a log.
MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A message of a run; its further lines are indented."""

    time: str
    source: str
    text: str
    hint: str = ""

    @property
    def kind(self) -> str:
        """Return `warning`, `error` or `traceback`; empty for anything else."""
        return next((kind for kind in KINDS if self.text.startswith((f"{kind}:", f"{kind}\n"))), "")

    @property
    def message(self) -> str:
        return self.text.removeprefix(f"{self.kind}: ") if self.kind else self.text


@dataclass(frozen=True)
class Log:
    """The entries of a log, or of its end."""

    entries: list[Entry]
    is_cut: bool

    @property
    def problems(self) -> list[Entry]:
        """Those of the last start."""
        return [entry for entry in self.entries[self.start :] if entry.kind]

    @property
    def earlier_problems(self) -> list[Entry]:
        return [entry for entry in self.entries[: self.start] if entry.kind]

    @property
    def start(self) -> int:
        """Index of the first entry of the last start; 0 where that is further back than this end of a log."""
        starts = (index for index in reversed(range(len(self.entries))) if self.entries[index].text.startswith(STARTED))
        return next(starts, 0)


def read_log(run: RunFolder) -> Log:
    text = run.tail(LOG, MAX_BYTES)
    return Log(parse_log(text), len(text.encode("utf-8", "replace")) >= MAX_BYTES)


def parse_log(text: str) -> list[Entry]:
    """Parse lines; one that does not begin with a time belongs to the entry before it."""
    entries: list[Entry] = []
    for found, lines in messages_in(text):
        message = "\n".join(lines)
        if message.startswith("hint: ") and entries and entries[-1].kind and not entries[-1].hint:
            entries[-1] = replace(entries[-1], hint=message.removeprefix("hint: "))
        else:
            entries.append(Entry(found["time"], (found["source"] or "").strip(), message))
    return entries


def messages_in(text: str) -> list[tuple[re.Match[str], list[str]]]:
    """Return the first line of each message as parsed, and the text of all its lines."""
    messages: list[tuple[re.Match[str], list[str]]] = []
    # Not splitlines(), which also breaks at a form feed or U+2028 within a message.
    for line in text.removesuffix("\n").split("\n"):
        found = ENTRY.fullmatch(line)
        if found is not None:
            messages.append((found, [found["text"]]))
        elif messages:
            messages[-1][1].append(line)
    return messages
