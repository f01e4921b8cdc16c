"""Merge sources, weakest first, into frozen settings: strict, with an origin for every value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from simpletuner.errors import SettingsError
from simpletuner.settings.deepspeed.source import spread
from simpletuner.settings.knob import extra_of
from simpletuner.settings.merging import Merged, Origin
from simpletuner.settings.mistakes import nearest, sentence, shortened
from simpletuner.settings.rules import contradictions, incomplete, settled, warnings_about
from simpletuner.settings.sections import SECTION_OF, SECTIONS, Settings, knobs
from simpletuner.settings.sources import RawValue, Source, gathered
from simpletuner.settings.spelling import WORDS_FOR_NOTHING, normalize_name
from simpletuner.system.files import read_file

PAIRS = re.compile(r"[\w-]+=[^,={}]+(,[\w-]+=[^,={}]+)*")
"""A short table of texts as it is typed: name=text,name=text."""


@dataclass(frozen=True)
class Loaded:
    """Frozen settings, for each that a source gave its origin, and what the user should know."""

    settings: Settings
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()
    sources: Mapping[str, bool] = field(default_factory=dict)
    """Every source by name, weakest first, and whether it was found rather than named by the user."""


def load(
    flags: Mapping[str, Any],
    config: Path | None = None,
    complete: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Loaded:
    """Return the settings of a run; unless `complete`, what a run cannot do without may be missing.

    Raises SettingsError that lists every mistake at once.
    """
    return resolve(gathered(flags, config, environment), complete)


def resolve(sources: Iterable[Source], complete: bool = True) -> Loaded:
    """Merge sources, weakest first, into settings."""
    sources = list(sources)
    merged = Merged()
    for source in sources:
        for given in understood(source, merged.mistakes):
            merged.take(given, source.name)
    warnings = [*(warning for source in sources for warning in source.warnings), *spread(merged)]
    mistakes, origins = merged.mistakes, merged.origins
    settings = validated(merged.values, origins, mistakes)
    if settings is not None:
        found = [*(incomplete(settings) if complete else ()), *contradictions(settings)]
        mistakes += [with_places(mistake, origins) for mistake in found]
    if settings is None or mistakes:
        raise SettingsError("\n  ".join(mistakes), "`--help` lists every setting with its type")
    about = warnings_about(settings)
    settings, reasons = settled(settings)
    changed = {name: replace(origins.get(name, Origin("default", None)), reason=why) for name, why in reasons.items()}
    found = {source.name: source.implicit for source in sources}
    return Loaded(settings, origins | changed, (*warnings, *about), found)


def understood(source: Source, mistakes: list[str]) -> Iterable[RawValue]:
    """Return what a source gives by the names of knobs, after adding a sentence for each that cannot be meant."""
    taken: dict[str, RawValue] = {}
    for given in source.given:
        name = canonical_name(given.name)
        if name is None:
            flat = ": settings stand side by side, not in sections" if isinstance(given.value, Mapping) else ""
            mistakes.append(f"unknown setting `{given.name}` ({given.place}){flat or nearest(given.name, knobs())}")
        elif name in taken:
            mistakes.append(f"{name} is set twice ({taken[name].place} and {given.place}): keep one of them")
        else:
            taken[name] = opened(name, given, mistakes)
    return taken.values()


def opened(name: str, given: RawValue, mistakes: list[str]) -> RawValue:
    """Return what is given for a knob; of one that holds JSON and was given text, what that or the file in it says."""
    text, kind = given.value, next(filter(is_table, get_args(knobs()[name].annotation)), None)
    if kind is None or not isinstance(text, str) or normalize_name(text) in WORDS_FOR_NOTHING:
        return replace(given, name=name)
    if get_args(kind) == (str, str) and PAIRS.fullmatch(text):
        return replace(given, name=name, value=dict(pair.split("=", 1) for pair in text.split(",")))
    file = "" if text.lstrip().startswith("{") else text
    try:
        value = json_in(read_file(Path(file).expanduser()).decode("utf-8") if file else text)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        mistakes.append(f"{name} = {shortened(text)} ({given.place}): use JSON or the path of a JSON file: {reason}")
        value = None
    return replace(given, name=name, value=value, file=file)


def json_in(text: str) -> Any:
    """Return the JSON in a text. Raises ValueError for what is none, and for an object with a name in it twice."""
    return json.loads(text, object_pairs_hook=without_doubles)


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a name stands twice in it: only one value could count."""
    names = [name for name, _ in pairs]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"`{min(doubles)}` stands there twice")
    return dict(pairs)


def is_table(annotation: Any) -> bool:
    """Return whether a type is a table of names and values."""
    return get_origin(annotation) is dict


def canonical_name(key: str) -> str | None:
    """Return the knob that a key means: leading dashes, dashes for underscores, any case, older names."""
    name = normalize_name(key.lstrip("-"))
    if name in SECTION_OF:
        return name
    return next((knob for knob, field in knobs().items() if name in (extra_of(field, "aliases") or [])), None)


def validated(values: Mapping[str, Any], origins: Mapping[str, Origin], mistakes: list[str]) -> Settings | None:
    """Return typed settings, or None after adding one sentence per mistake."""
    sections: dict[str, Any] = {}
    for section_name, section in SECTIONS.items():
        own = {name: value for name, value in values.items() if SECTION_OF[name] == section_name}
        try:
            sections[section_name] = section(**own)
        except ValidationError as error:
            found = {str(item["loc"][0]): item for item in error.errors()}  # one sentence per knob
            mistakes += [
                sentence(item, section.model_fields[name], origins[name].given, origins[name])
                for name, item in found.items()
            ]
    return None if len(sections) < len(SECTIONS) else Settings(**sections)


def with_places(mistake: str, origins: Mapping[str, Origin]) -> str:
    """Return a sentence about several settings, and where each was set, unless that is the command line just typed."""
    places = {name: str(origin) for name, origin in origins.items() if re.search(rf"\b{name}\b", mistake)}
    said = ", ".join(f"{name}: {place}" for name, place in places.items())
    typed = all(place.partition(" ")[0] == "flag" for place in places.values())
    return mistake if typed else f"{mistake} [{said}]"


def provenance(loaded: Loaded) -> str:
    """Return how many settings each source decided, weakest first; of sources found rather than named, say which."""
    decided = {
        source: [name for name, origin in loaded.origins.items() if origin.source == source]
        for source in loaded.sources
    }
    return (
        "; ".join(
            f"{source}: {', '.join(names) if loaded.sources[source] else len(names)}"
            for source, names in decided.items()
            if names
        )
        or "all at their defaults"
    )


def settings_as_json(loaded: Loaded) -> dict[str, Any]:
    """Return every setting by name, as `settings.json` holds them: a file that `--config` reads again."""
    dumped = loaded.settings.model_dump(mode="json")
    return {name: dumped[section][name] for name, section in SECTION_OF.items()}
