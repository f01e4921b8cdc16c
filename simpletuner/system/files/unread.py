"""Files of state that cannot be read, damaged or of a newer version: moved aside and named, never replaced.

For what cannot be made again. Caches and notes of measurements are written again without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from simpletuner.system.files.regular_files import read_file

# The end of the name of a file that could not be read.
ASIDE = ".unread"
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of parsing what somebody else has written."""

Warn = Callable[[str], object]
T = TypeVar("T")


def read_state(path: Path, parse: Callable[[bytes], T], warn: Warn) -> T | None:
    """Parse a file; None if it is missing. An unreadable one is moved aside.

    `parse` may raise MALFORMED. Raises OSError where the file cannot be moved.
    """
    try:
        return parse(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *MALFORMED):
        set_aside(path, warn)
        return None


def set_aside(path: Path, warn: Warn) -> None:
    """Rename whatever has this name, to one that nothing else has. Raises OSError."""
    aside = path.with_name(f"{path.name}.{time.time_ns()}{ASIDE}")
    path.rename(aside)
    warn(f"{path} cannot be read, or is of another version: it is set aside as {aside.name}, and written again")


def latest_set_aside(path: Path) -> Path | None:
    """Newest file that was moved aside from this name."""
    return max(path.parent.glob(f"{path.name}.*{ASIDE}"), default=None)
