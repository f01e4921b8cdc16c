"""What a config file is read into, whatever its format, and how a text is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.system.paths import shown_path


@dataclass(frozen=True)
class FileEntry:
    """One name and value as written, and their line (0: a place without lines)."""

    key: str
    value: Any
    line: int = 0
    inner_lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of the names in a value that is itself names and values; of JSON and YAML."""
    written: str | None = None
    """What messages show for a value that has parts of the environment in it."""


def file_place(path: str | Path, line: int) -> str:
    """A place in a file; line 0 means that the line is not known."""
    name = shown_path(path)
    return f"{name}:{line}" if line else name


class NotSettings(ValueError):
    """A text that parses, but is no mapping."""


class NotParsed(ValueError):
    """A text that does not parse: the line, and why."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason = line, reason


def reason_of(error: Exception) -> str:
    """Why a text does not parse. Python's words for a number of thousands of digits name a function of its own."""
    return "a whole number has more than 4,300 digits" if "set_int_max_str_digits" in str(error) else str(error)


TOO_DEEP = "its brackets are nested too deeply"
MAX_DEPTH = 100
"""Levels of tables and lists. Real files have five; Python's own readers give up between 500 and 1,000."""


def check_depth(value: Any) -> None:
    """Raise ValueError for a value that is nested more deeply than what works on it can follow."""
    level, depth = [value], 0
    while level := [item for part in level for item in items_of(part)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)


def items_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
