"""Where settings come from, weakest first: config.env, accelerate, a config file, the environment, flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from simpletuner.errors import SettingsError
from simpletuner.settings.accelerate import Told, account, default_file, launched_entries, read_file
from simpletuner.settings.formats import read_entries
from simpletuner.settings.sections import knobs
from simpletuner.settings.spelling import WORDS_FOR_NOTHING, normalize_name

CONFIG_CANDIDATES = ("config/config.json", "config/config.toml", "config/config.yaml")
CONFIG_ENV = "config/config.env"
PREFIX = "SIMPLETUNER_"
ACCELERATE_CONFIG = "accelerate_config"
"""Names a source rather than a setting; may stand wherever settings do. `none` turns the default file off."""

NOT_SETTINGS = {
    "config": "",
    "debug": "",
    "home": "",
    "run_secret": "",
    "env": "pass the file with --config",
    "log_level": "errors are short; `--debug` shows more",
    "config_backend": "the file's suffix says its format",
    "accelerate_extra_args": "set gpu_ids, use_cpu or an accelerate file",
    "trainer_extra_args": "write each argument as a setting",
}
"""Names that users have beside settings in config.env or in the environment, and why not used ("": quietly)."""


@dataclass(frozen=True)
class RawValue:
    """One value as written under a name, the place where it stands, and the JSON file that was read for it, if any."""

    name: str
    value: Any
    place: str
    file: str = ""


@dataclass(frozen=True)
class Source:
    """One place that settings come from; `warnings` name what it holds that is not used."""

    name: str
    given: list[RawValue]
    warnings: list[str] = field(default_factory=list)
    implicit: bool = False
    """Found rather than named by the user: when it decides something, the user is told."""


def gathered(flags: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]) -> list[Source]:
    """Return all sources, weakest first. Raises SettingsError for a file that is missing or does not parse."""
    flag_source = of_flags(flags)
    variables = environment_source(environment)
    path = config or config_path(environment)
    files = [file_source(path)] if path else []
    pairs = [pairs_source(Path(CONFIG_ENV))] if path != Path(CONFIG_ENV) and Path(CONFIG_ENV).is_file() else []
    chosen = chosen_in([*pairs, *files, variables, flag_source])
    accelerate = accelerate_source(chosen, environment)
    return [*launcher_source(environment), *pairs, *accelerate, *files, variables, flag_source]


def of_flags(flags: Mapping[str, Any]) -> Source:
    """Return what was typed; `[]` empties a list, since an empty text is an item of it."""
    return Source("flag", [RawValue(name, [] if value == ["[]"] else value, "flag") for name, value in flags.items()])


def launcher_source(environment: Mapping[str, str]) -> list[Source]:
    """Return how many ranks a launcher has started, if this is one of them; the weakest source, as it names no wish."""
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return []
    return [Source("launcher", [RawValue("num_processes", environment["WORLD_SIZE"], "launcher WORLD_SIZE")])]


def of_file_alone(path: Path) -> list[Source]:
    """Return what a config file says, and the accelerate file if it names one, whatever else there is."""
    source = file_source(path)
    chosen = chosen_in([source])
    return [*(accelerate_source(chosen, {}) if chosen else []), source]


def chosen_in(sources: list[Source]) -> Any:
    """Take the name of the accelerate file out of the sources and return it; the strongest wins."""
    chosen = None
    for source in sources:
        for given in [given for given in source.given if is_accelerate_config(given.name)]:
            source.given.remove(given)
            chosen = given.value
    return chosen


def is_accelerate_config(name: str) -> bool:
    """Return whether a name means the accelerate file."""
    return normalize_name(name.lstrip("-")).removeprefix(PREFIX.lower()) == ACCELERATE_CONFIG


def config_path(environment: Mapping[str, str]) -> Path | None:
    """Return the config file that the environment names, or the first of the usual ones that exists."""
    if named := environment.get(PREFIX + "CONFIG"):
        return Path(named)
    return next((Path(name) for name in CONFIG_CANDIDATES if Path(name).is_file()), None)


def file_source(path: Path) -> Source:
    """Read a config file of any format."""
    if path.suffix.lower() == ".env":
        return pairs_source(path)
    entries = [entry for entry in read_entries(path) if entry.key != "$schema"]  # for editors, not for us
    return Source(str(path), [RawValue(entry.key, entry.value, in_file(path, entry.line)) for entry in entries])


def in_file(path: object, line: int) -> str:
    """Return a place in a file; 0 means that the line is not known."""
    return f"{path}:{line}" if line else str(path)


def pairs_source(path: Path) -> Source:
    """Read shell-like pairs, with or without our prefix."""
    pairs = {f"{path}:{entry.line}": (entry.key, entry.value) for entry in read_entries(path)}
    return without_strangers(str(path), pairs, implicit=path == Path(CONFIG_ENV))


def environment_source(environment: Mapping[str, str]) -> Source:
    """Return the variables that begin with our prefix."""
    ours = [name for name in environment if name.startswith(PREFIX)]
    return without_strangers("environment", {f"environment {name}": (name, environment[name]) for name in ours})


def without_strangers(name: str, pairs: Mapping[str, tuple[str, Any]], implicit: bool = False) -> Source:
    """Return a source of pairs by place; what is known not to be a setting is left out, with its reason."""
    given, warnings = [], []
    for place, (key, value) in pairs.items():
        plain = key.removeprefix(PREFIX).lower()
        if plain not in NOT_SETTINGS:
            given.append(RawValue(plain, [] if value == "" and is_list(plain) else value, place))
        elif NOT_SETTINGS[plain]:
            warnings.append(f"{key} ({place}) is not used: {NOT_SETTINGS[plain]}")
    return Source(name, given, warnings, implicit)


def is_list(name: str) -> bool:
    """Return whether a setting is a list, which an empty variable leaves empty; elsewhere "" is an item."""
    return name in knobs() and get_origin(knobs()[name].annotation) is list


def accelerate_source(chosen: Any, environment: Mapping[str, str]) -> list[Source]:
    """Return what accelerate was told: by `accelerate launch`, in the chosen file, or in its default one."""
    if entries := launched_entries(environment):
        return [accelerate_given("accelerate launch", account(entries), implicit=False)]
    chosen = chosen or environment.get("ACCELERATE_CONFIG_FILE")
    if chosen is not None and normalize_name(chosen) in WORDS_FOR_NOTHING:
        return []
    path = Path(str(chosen)).expanduser() if chosen else default_file(environment)
    if path is None:
        return []
    told = account(read_file(path))
    if not any(item.field == "distributed_type" for item in told):
        raise SettingsError(
            f"{path} is no accelerate file: it has no distributed_type", "`accelerate config` writes one"
        )
    return [accelerate_given(str(path), told, implicit=chosen is None)]


def accelerate_given(name: str, told: list[Told], implicit: bool) -> Source:
    """Return accelerate's fields as settings; those that are not used as warnings."""
    given = [RawValue(item.knob, item.value, place_of(name, item)) for item in told if item.knob]
    warnings = [f"{name}: {item.field} = {item.value} is not used: {item.note}" for item in told if item.warning]
    return Source(name, given, warnings, implicit)


def place_of(name: str, told: Told) -> str:
    """Return where a field stands, with its own name where the setting has another."""
    return in_file(name, told.line) + (f" {told.field}" if told.field != told.knob else "")
