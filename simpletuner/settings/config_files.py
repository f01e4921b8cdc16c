"""Which config file a run reads when no flag names one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.system.paths import expand_home

PREFIX = "SIMPLETUNER_"
CONFIG_CANDIDATES = ("config/config.json", "config/config.toml", "config/config.yaml")
CONFIG_FOLDER = ("SIMPLETUNER_ENVIRONMENT", "SIMPLETUNER_ENV", "ENV")
"""Variables that choose a folder below config/, the strongest first."""
FOLDER_NAME = re.compile(r"\w[\w.-]*")
"""A shell's own ENV is the path of a file."""


@dataclass(frozen=True)
class FoundConfig:
    """The config file of a run, the variable that chose its folder, and what the user should know."""

    path: Path | None
    variable: str = ""
    warnings: tuple[str, ...] = ()


def find_config(environment: Mapping[str, str]) -> FoundConfig:
    """Find the config file that the environment names, or the first of the usual ones that exists.

    `ENV=foo` chooses config/foo/, as for users of the original. Raises SettingsError where SIMPLETUNER_ENV names a
    folder without a config file; ENV alone may be meant for another program.
    """
    if named := environment.get(PREFIX + "CONFIG"):
        return FoundConfig(named_path(named, PREFIX + "CONFIG"))
    usual = first_file(CONFIG_CANDIDATES)
    variable = next((name for name in CONFIG_FOLDER if FOLDER_NAME.fullmatch(environment.get(name, ""))), "")
    folder = f"config/{environment.get(variable)}"
    if not variable or folder == "config/default":
        return FoundConfig(usual, variable)
    if path := first_file([candidate.replace("config", folder, 1) for candidate in CONFIG_CANDIDATES]):
        return FoundConfig(path, variable)
    problem = f"{variable} = {environment[variable]}, but there is no {folder}/config.json, .toml or .yaml"
    if variable.startswith(PREFIX):
        raise SettingsError(problem, f"correct it, or unset {variable} and name the file with --config")
    return FoundConfig(usual, warnings=(f"{problem}: it is not used",))


def first_file(names: Iterable[str]) -> Path | None:
    return next((Path(name) for name in names if Path(name).is_file()), None)


def named_path(path: Path | str, setting: str) -> Path:
    """Return the path of a file that a setting names. Raises SettingsError for an empty one and for an unknown user."""
    try:
        return expand_home(path)
    except ValueError as error:
        raise SettingsError(f"{setting} = {str(path)!r}: {error}", "name a file") from None
