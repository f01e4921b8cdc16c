"""An edit of a text, and functions that cut texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

# In place of a value: the setting is taken out of the file.
REMOVED: Final = object()


@dataclass(frozen=True)
class Edit:
    """A setting and its new value, as the format's reader will return it; `is_there`: the text has the setting."""

    name: str
    value: Any
    is_there: bool

    @property
    def removes(self) -> bool:
        return self.value is REMOVED


def newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def replace_span(text: str, start: int, end: int, new: str = "") -> str:
    return text[:start] + new + text[end:]


def insert_line(text: str, position: int, line: str) -> str:
    """Add a line at `position`, which is the start of a line or the end of the text."""
    newline = newline_of(text)
    before, after = text[:position], text[position:]
    return before + newline * bool(before and not before.endswith("\n")) + line + newline + after


def line_start(text: str, position: int) -> int:
    return text.rfind("\n", 0, position) + 1


def line_end(text: str, position: int) -> int:
    """Return where the line ends that holds `position`, after its newline."""
    found = text.find("\n", position)
    return len(text) if found < 0 else found + 1


def indent_of(text: str, position: int) -> str:
    """Return the blanks at the start of a line."""
    found = re.compile(r"[ \t]*").match(text, line_start(text, position))
    return found[0] if found else ""
