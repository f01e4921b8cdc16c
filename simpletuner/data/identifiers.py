"""Names of datasets become folders: below the folder of all caches, each its own, and safe to print."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import PurePosixPath

LONGEST_BYTES = 255
"""Of each part of a path, on the usual file systems."""


def checked_id(name: str) -> str:
    """Return a dataset's id. Raises ValueError for one that is no path below a folder."""
    parts = name.split("/")
    if not name.strip():
        raise ValueError("an id cannot be empty")
    if any(is_control(letter) for letter in name):
        raise ValueError("an id cannot hold control characters")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("its cache would not be in a folder of its own: use a plain name, such as `photos`")
    if any(len(part.encode()) > LONGEST_BYTES for part in parts):
        raise ValueError(f"an id has at most {LONGEST_BYTES} bytes")
    return name


def is_control(letter: str) -> bool:
    """Return whether a letter is a control character, or half of a character."""
    return unicodedata.category(letter) in ("Cc", "Cs")


def id_of_folder(name: str) -> str:
    """Return the id for a folder's name, whatever it holds."""
    return "".join("_" if is_control(letter) else letter for letter in name) or "pictures"


def nested(names: Sequence[str]) -> list[str]:
    """Return a sentence for each id whose folder lies in that of another one."""
    paths = {name: PurePosixPath(name) for name in names}
    return [
        f"the cache of dataset `{inner}` would lie in that of `{outer}`: rename one of them"
        for outer in paths
        for inner in paths
        if inner != outer and paths[inner].is_relative_to(paths[outer])
    ]
