"""Entries of a config file, whatever its format, and errors about a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.system.files.paths import shown_path


@dataclass(frozen=True)
class FileEntry:
    """A name and value as written, and their line (0: a place without lines)."""

    key: str
    value: Any
    line: int = 0
    inner_lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of the names in a value that is itself names and values; of JSON and YAML."""
    written: str | None = None
    """Text for messages, of a value that has parts of the environment in it."""


def file_place(path: str | Path, line: int) -> str:
    """A place in a file; line 0 means that the line is not known."""
    name = shown_path(path)
    return f"{name}:{line}" if line else name


class NotSettings(ValueError):
    """A text that parses, but is no mapping."""


class NotParsed(ValueError):
    """A text that does not parse: the line, why, and what to do."""

    def __init__(self, line: int, reason: str, hint: str = "correct that line") -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason, self.hint = line, reason, hint


@contextmanager
def explain_parsing(path: Path, check: str, hint: str) -> Iterator[None]:
    """Raise SettingsError for a file that cannot be read, with the hint `check`, or that does not parse."""
    shown = shown_path(path)
    try:
        yield
    except OSError as error:
        raise SettingsError(f"cannot read {shown}: {error.strerror}", check) from None
    except NotSettings as error:
        hint = "`simpletuner config init` writes one to start from"
        raise SettingsError(f"{shown} holds {error}, not names and values", hint) from None
    except NotParsed as error:
        raise SettingsError(f"{shown}:{error.line} does not parse: {error.reason}", error.hint) from None
    except RecursionError:
        raise SettingsError(f"{shown} does not parse: {TOO_DEEP}", hint) from None
    except ValueError as error:
        raise SettingsError(f"{shown} does not parse: {reason_of(error)}", hint) from None


def json_mistake(error: json.JSONDecodeError) -> NotParsed:
    """Return what is wrong with a JSON text, with a hint for the usual mistakes in what is written by hand."""
    at = error.doc.rfind(",", 0, error.pos + 1)  # Python 3.13 points at a trailing comma, earlier versions behind it
    if at >= 0 and not error.doc[at + 1 : error.pos].strip() and re.match(r",\s*[\]}]", error.doc[at:]):
        line, column = error.doc.count("\n", 0, at) + 1, at - error.doc.rfind("\n", 0, at)
        hint = "JSON allows no comma before a closing bracket: remove it"
        return NotParsed(line, f"comma before a closing bracket, column {column}", hint)
    hint = "JSON takes double quotes, true, false and null, and a comma between entries"
    if error.doc[error.pos :].lstrip().startswith(("//", "/*", "#")):
        hint = "JSON has no comments: remove it"
    return NotParsed(error.lineno, f"{error.msg[0].lower()}{error.msg[1:]}, column {error.colno}", hint)


def reason_of(error: Exception) -> str:
    """The reason why a text does not parse. Python's words for a number of thousands of digits name a function of its
    own."""
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
