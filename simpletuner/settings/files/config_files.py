"""Default config file of a run, its entries in any format, and errors about its text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.system.files.paths import expand_path, shown_path

PREFIX = "SIMPLETUNER_"
# Names a source rather than a setting; may stand wherever settings do. `none` turns the default file off.
LAUNCHED_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""Variable that every launcher in accelerate/utils/launch.py (1.15) sets, whatever is asked for."""
ACCELERATE_CONFIG = "accelerate_config"
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
    """Find the config file that is named, that the environment or config/config.env chooses, or the first
    usual one.

    `ENV=foo` chooses config/foo/, as for users of the original. Raises SettingsError where it names a folder
    without a config file; ENV=foo without such a folder may be meant for another program.
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
    """Path of a file that a setting names. Raises SettingsError for an empty one and for an unknown user."""
    try:
        return expand_path(path)
    except ValueError as error:
        raise SettingsError(f"{setting} = {str(path)!r}: {error}", "name a file") from None


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
    """Error for invalid JSON, with a hint for the usual mistakes of files written by hand."""
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
    """The reason why a text does not parse. Python's words for a number of thousands of digits name a
    function of its own."""
    return "a whole number has more than 4,300 digits" if "set_int_max_str_digits" in str(error) else str(error)


TOO_DEEP = "its brackets are nested too deeply"
# Levels of tables and lists. Real files have five; Python's own readers give up between 500 and 1,000.
MAX_DEPTH = 100


def check_depth(value: object) -> None:
    """Raise ValueError for a value that is nested more deeply than what works on it can follow."""
    level, depth = [value], 0
    while level := [item for part in level for item in items_of(part)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)


def items_of(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def default_accelerate_file(environment: Mapping[str, str]) -> Path | None:
    """The file that `accelerate config` wrote, if there is one."""
    home = Path(environment.get("HOME", "~")).expanduser()
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    # As accelerate 1.15 has it in accelerate/commands/config/config_args.py, YAML first.
    folder = Path(environment.get("HF_HOME") or caches / "huggingface").expanduser() / "accelerate"
    return next((path for name in ("yaml", "json") if (path := folder / f"default_config.{name}").is_file()), None)
