"""Resolve the names of files in requests, within the folders that the page was started for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.errors import shorten
from simpletuner.system.files.paths import expand_path

HINT = "start the page with --folder to open others"
MAX_DEPTH = 4
"""Levels of folders that a search for configurations or runs goes down: it may begin in a home folder."""
SKIPPED = {"node_modules", "site-packages", "checkpoints", "cache", "__pycache__", "venv"}
"""Names of folders that such a search does not enter."""


@dataclass(frozen=True)
class Folders:
    """Absolute folders without symbolic links.

    Names in requests begin in the current folder, as the paths in settings do.
    """

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Folders:
        """Raises SettingsError for a folder that does not exist."""
        for path in paths:
            if not path.is_dir():
                raise SettingsError(f"there is no folder {path}", "name a folder that exists")
        return cls(tuple(dict.fromkeys(path.resolve() for path in paths)))

    def resolve(self, name: str | Path) -> Path:
        """Return the real path behind a name, which need not exist. Raises SettingsError outside the folders."""
        try:
            # Symbolic links are followed first: one that leads outside is outside.
            path = Path(os.path.realpath(name if os.path.lexists(name) else expand_path(name)))
        except (OSError, ValueError):  # NUL characters, bytes that are not UTF-8, an unknown user's home
            path = None
        if path is None or not any(path.is_relative_to(root) for root in self.roots):
            raise SettingsError(f"{shorten(str(name))} is not in {', '.join(map(str, self.roots))}", HINT)
        return path

    def holds(self, name: str | Path) -> bool:
        try:
            self.resolve(name)
        except SettingsError:
            return False
        return True

    def shown(self, path: Path) -> str:
        """Format a path for people, and for addresses: below the current folder without that."""
        current = Path.cwd()
        return str(path.relative_to(current)) if path.is_relative_to(current) else str(path)
