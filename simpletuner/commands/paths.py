"""Options and arguments that are paths: `~` is the home folder, and an empty path is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from simpletuner.errors import SettingsError
from simpletuner.system.files.paths import expand_path


def path_option(flag: str, sentence: str, metavar: str = "<path>") -> Any:
    return typer.Option(flag, help=sentence, metavar=metavar, parser=parse_path)


def path_argument(sentence: str) -> Any:
    return typer.Argument(help=sentence, parser=parse_path)


def parse_path(text: str) -> Path:
    """Return the path that was typed. Raises SettingsError for an empty one and for an unknown user."""
    # Typer would take an empty path for the current folder, and a shell expands no `~` after `=`.
    try:
        return expand_path(text)
    except ValueError as error:
        raise SettingsError(f"'{text}': {error}", "`--help` after any command explains it") from None
