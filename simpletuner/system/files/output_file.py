"""Files that a command writes for the user: atomically, and over an existing file only with --force."""

from __future__ import annotations

from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.system.files.atomic import replace_file


def refuse_overwriting(path: Path, force: bool) -> None:
    """Raise SettingsError for a file that exists."""
    if path.is_file() and not force:
        raise SettingsError(f"{path} exists already", "give another name, or --force to overwrite it")


def save(path: Path, text: str) -> None:
    """Write a file and the folders above it. Raises SettingsError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}", "give another name") from None
