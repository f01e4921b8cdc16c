"""Paths as a user types them: `~`, `{env:NAME}`, and the pipes that a shell hands over as `/dev/fd/63`."""

from __future__ import annotations

import os
import re
from pathlib import Path

DESCRIPTOR = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(?P<number>\d+)")
ENVIRONMENT = re.compile(r"\{env:([^{}]*)\}")
"""Pattern that the original takes for a variable of the environment in a path."""


def expand_path(text: str | Path) -> Path:
    """Replace a leading `~` by the home folder, and `{env:NAME}` by that variable of the environment.

    Raises ValueError for an empty text, for an unknown user, and for a variable that is not set or empty.

    A shell expands `~` only where a word begins, so `--output_dir=~/out` comes here as it was typed.
    """
    name = ENVIRONMENT.sub(lambda found: variable_named(found[1]), str(text))
    if not name.strip():
        raise ValueError("a path cannot be empty; `.` is the current folder")
    if not name.startswith("~"):
        path = Path(name)
        # pathlib drops the `./` of `./~x`. Absolute, it means the same when it is written to a file and read again.
        return path.absolute() if str(path).startswith("~") else path
    try:
        return Path(name).expanduser()
    except RuntimeError:
        user = name.partition("/")[0]
        raise ValueError(f"there is no home folder {user}; a file of this name is ./{user}") from None


def variable_named(name: str) -> str:
    """Return the value of a variable. Raises ValueError where it has none."""
    if value := os.environ.get(name):
        return value
    raise ValueError(f"{{env:{name}}}: there is no {name} in the environment")


def shown_path(path: str | Path) -> str:
    """Format a path for people: the number that a shell gave to `<(...)` means nothing to them."""
    return "a pipe" if descriptor_of(path) else str(path)


def descriptor_of(path: str | Path) -> int | None:
    """The number of the open file of this process that a path such as /dev/stdin or /dev/fd/63 means."""
    found = DESCRIPTOR.fullmatch(str(path))
    return int(found["number"] or 0) if found else None
