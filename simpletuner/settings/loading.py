"""Read settings from their sources, weakest first: defaults, a config file, flags. Strict, and with origins."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from simpletuner.errors import SettingsError
from simpletuner.settings.knob import extra_of
from simpletuner.settings.rules import contradictions
from simpletuner.settings.sections import SECTION_OF, SECTIONS, Settings
from simpletuner.settings.spelling import choices_of, normalised

CONFIG_CANDIDATES = ("config/config.json", "config/config.toml", "config/config.yaml")


@dataclass(frozen=True)
class Source:
    """Where values came from, such as `flag` or a file's path, and the values by name."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Origin:
    """Where a value came from, and what was written there."""

    place: str
    given: Any

    def __str__(self) -> str:
        return self.place


@dataclass(frozen=True)
class Loaded:
    """Frozen settings, and for each that is not a default its origin."""

    settings: Settings
    origins: Mapping[str, Origin]


def knobs() -> dict[str, FieldInfo]:
    """Return every knob by name, in the order of the sections."""
    return {name: field for section in SECTIONS.values() for name, field in section.model_fields.items()}


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Return the settings of a run. Raises SettingsError that lists every mistake at once."""
    path = config or next((Path(name) for name in CONFIG_CANDIDATES if Path(name).is_file()), None)
    sources = [Source(str(path), read_config(path))] if path else []
    return resolve([*sources, Source("flag", flags)])


def resolve(sources: Iterable[Source]) -> Loaded:
    """Merge sources, weakest first, into settings."""
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for source in sources:
        for key, value in source.values.items():
            name = canonical_name(str(key))
            if name is None:
                mistakes.append(f"unknown setting `{key}` ({source.name}){nearest(str(key), knobs())}")
                continue
            values[name] = normalised(name, knobs()[name], value)
            origins[name] = Origin(source.name, value)
    settings = validated(values, origins, mistakes)
    mistakes += contradictions(settings) if settings else []
    if settings is None or mistakes:
        raise SettingsError("\n  ".join(mistakes), "`simpletuner train --help` lists every setting with its type")
    return Loaded(settings, origins)


def canonical_name(key: str) -> str | None:
    """Return the knob that a key means: with or without leading dashes, dashes or underscores, older names."""
    name = key.lstrip("-").replace("-", "_")
    if name in SECTION_OF:
        return name
    return next((knob for knob, field in knobs().items() if name in (extra_of(field, "aliases") or [])), None)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def validated(values: Mapping[str, Any], origins: Mapping[str, Origin], mistakes: list[str]) -> Settings | None:
    """Return typed settings, or None after adding one sentence per mistake."""
    sections: dict[str, Any] = {}
    for section_name, section in SECTIONS.items():
        own = {name: value for name, value in values.items() if SECTION_OF[name] == section_name}
        try:
            sections[section_name] = section(**own)
        except ValidationError as error:
            mistakes += [sentence(item, origins) for item in error.errors()]
    return None if len(sections) < len(SECTIONS) else Settings(**sections)


def sentence(item: Any, origins: Mapping[str, Origin]) -> str:
    """Turn one of pydantic's findings into a sentence with the value, its source and what is allowed."""
    name = str(item["loc"][0])
    choices = [str(choice) for choice in choices_of(knobs()[name].annotation)]
    said = f"{name} = {item['input']!r} ({origins.get(name, 'default')})"
    if choices:
        return f"{said}: use one of {', '.join(choices)}{nearest(str(item['input']), choices)}"
    text = item["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{said}: {text[0].lower() + text[1:]}"


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON, TOML or YAML file of settings. Raises SettingsError where it does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        values = parse(path.suffix, text)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the config file {path}: {error}", "give its path with --config") from None
    except ValueError as error:
        raise SettingsError(f"{path} does not parse: {error}", "check the file at that line and column") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path} holds a {type(values).__name__}, not names and values")
    return values


def parse(suffix: str, text: str) -> Any:
    """Parse text in the format that a file suffix names. Raises ValueError with the place."""
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(error) from None
    return json.loads(text)


def settings_as_json(loaded: Loaded) -> dict[str, Any]:
    """Return every setting by name, as `settings.json` holds them: a file that `--config` reads again."""
    dumped = loaded.settings.model_dump(mode="json")
    return {name: dumped[section][name] for name, section in SECTION_OF.items()}
