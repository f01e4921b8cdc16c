"""`log.txt` as entries: what the last start said, and how it ended."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from simpletuner.page.runs.folder import RunFolder
from simpletuner.run_log import LOG

ENTRY = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<source>\[[^\]]*\] )?(?P<text>.*)")
STEPS = re.compile(r"^\s*steps\s+\d+ to (\d+)\s*$|^training: \d+/(\d+)", re.MULTILINE)
KINDS = ("warning", "error", "traceback")
MAX_BYTES = 4 << 20
"""Of the end of a log."""
LIST_BYTES = 64 << 10
"""Of those in the list of runs."""

Ending = Literal["finished", "stopped", "failed", ""]


@dataclass(frozen=True)
class Entry:
    """One message of a run; its further lines are indented."""

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
    def last_start(self) -> list[Entry]:
        """Return what was said since the run was last started."""
        starts = [number for number, entry in enumerate(self.entries) if entry.text.startswith("started: ")]
        return self.entries[starts[-1] :] if starts else self.entries

    @property
    def problems(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind]

    @property
    def max_steps(self) -> int | None:
        """Return up to which step the last start trains, as it said itself."""
        found = [match for entry in self.last_start for match in STEPS.finditer(entry.text)]
        return int(found[-1][1] or found[-1][2]) if found else None

    def ending(self) -> tuple[Ending, Entry | None]:
        """Return how the last start ended, and the entry that says so; nothing where it said nothing of an end."""
        for entry in reversed(self.last_start):
            if entry.text == "finished" or entry.text.startswith(("finished\n", "finished already")):
                return "finished", entry
            if entry.text.startswith("stopped by "):
                return "stopped", entry
            if entry.kind == "error":
                return "failed", entry
        return "", None


def read_log(run: RunFolder, size: int = MAX_BYTES) -> Log:
    text = run.tail(LOG, size)
    return Log(parse_log(text), len(text.encode("utf-8", "replace")) >= size)


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
    for line in text.removesuffix("\n").split("\n"):
        found = ENTRY.fullmatch(line)
        if found is not None:
            messages.append((found, [found["text"]]))
        elif messages:
            messages[-1][1].append(line)
    return messages
