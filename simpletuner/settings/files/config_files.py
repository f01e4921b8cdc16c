"""Choice of the config file that a run reads when no flag names one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.system.files.paths import expand_path

PREFIX = "SIMPLETUNER_"
CONFIG_ENV = "config/config.env"
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
    folder: str = ""
    """The value of the variable."""
    warnings: tuple[str, ...] = ()
    env_file: Path | None = None
    """The config.env of the folder that was chosen."""
    is_named: bool = False
    """True if a flag or SIMPLETUNER_CONFIG names the file."""


def find_config(
    environment: Mapping[str, str], in_config_env: Mapping[str, str], named: Path | None = None
) -> FoundConfig:
    """Find the config file that is named, that the environment or config/config.env chooses, or the first usual one.

    `ENV=foo` chooses config/foo/, as for users of the original. Raises SettingsError where it names a folder without a
    config file; ENV=foo without such a folder may be meant for another program.
    """
    places = ((place, name) for place in (environment, in_config_env) for name in CONFIG_FOLDER)
    place, variable = next(
        ((place, name) for place, name in places if FOLDER_NAME.fullmatch(place.get(name, ""))), ({}, "")
    )
    chosen = "" if place.get(variable) == "default" else place.get(variable, "")
    folder = f"config/{chosen}"
    if named is None and environment.get(PREFIX + "CONFIG"):
        named = named_path(environment[PREFIX + "CONFIG"], PREFIX + "CONFIG")
    if named:
        unused = f"{variable} = {chosen} is not used: the config file is named, {named}"
        is_meant = chosen and Path(folder).is_dir() and named.parent != Path(folder)
        warnings = (unused,) if is_meant or variable.startswith(PREFIX) else ()
        return FoundConfig(named, variable, chosen, warnings, is_named=True)
    if not chosen:
        return FoundConfig(first_file(CONFIG_CANDIDATES), variable, place.get(variable, ""))
    path = first_file([candidate.replace("config", folder, 1) for candidate in CONFIG_CANDIDATES])
    env_file = first_file([f"{folder}/config.env"])
    if path or env_file:
        return FoundConfig(path, variable, chosen, env_file=env_file)
    problem = f"{variable} = {chosen}, but there is no {folder}/config.json, .toml, .yaml or .env"
    if variable.startswith(PREFIX) or Path(folder).is_dir():
        raise SettingsError(problem, f"correct it, or unset {variable} and name the file with --config")
    return FoundConfig(first_file(CONFIG_CANDIDATES), warnings=(f"{problem}: it is not used",))


def first_file(names: Iterable[str]) -> Path | None:
    return next((Path(name) for name in names if Path(name).is_file()), None)


def named_path(path: Path | str, setting: str) -> Path:
    """Return the path of a file that a setting names. Raises SettingsError for an empty one and for an unknown user."""
    try:
        return expand_path(path)
    except ValueError as error:
        raise SettingsError(f"{setting} = {str(path)!r}: {error}", "name a file") from None
