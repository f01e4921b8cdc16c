"""Merge sources, weakest first, into frozen settings: strict, with an origin for every value.

An `output_dir` in a bucket becomes a local folder with a mirror.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from simpletuner.errors import MAX_MISTAKES, Mistake, SettingsError
from simpletuner.run_log import LOG
from simpletuner.settings.declared.errors import UNKNOWN, InvalidSettings, did_you_mean, is_secret, shorten, to_mistake
from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, Settings, setting_fields
from simpletuner.settings.declared.table import canonical_name, plain_name
from simpletuner.settings.files.config_files import TOO_DEEP, check_depth, reason_of
from simpletuner.settings.files.formats import FORMATS, read_text
from simpletuner.settings.files.raw_values import Origin, RawValue, Source, with_places
from simpletuner.settings.foreign.recognition import import_hint, meaning_of
from simpletuner.settings.resolving.sources import (
    RANKS,
    MergedValues,
    apply_global_batch_size,
    collect_sources,
    missing_ranks,
    warn_of_defaults,
)
from simpletuner.settings.rules.effects import without_effect
from simpletuner.settings.rules.rules import find_contradictions, find_missing, normalize, warnings_about
from simpletuner.settings.values.parsed import check_bucket, parse_bucket
from simpletuner.settings.values.spelling import WORDS_FOR_NOTHING, normalize_name
from simpletuner.system.files.paths import expand_path

NAME, MIRROR = "output_dir", "mirror_output"


def apply_output_address(merged: MergedValues) -> None:
    """Set mirror_output to the address that output_dir gives, and output_dir to a folder of the same name
    here.

    Another value of mirror_output is a mistake.
    """
    given = str(merged.values.get(NAME, ""))
    if (address := parse_bucket(given)) is None:
        return
    origin = merged.origins[NAME]
    place = f"{NAME} = {given} ({origin})"
    folder = address.folder.rpartition("/")[2] or address.bucket
    merged.require_equal(RawValue(MIRROR, check_bucket(given), place), origin.source, "output_dir is in a bucket")
    merged.values[NAME] = folder
    merged.origins[NAME] = replace(origin, reason="the folder on this machine of that address")


# A short table of texts as it is typed: name=text,name=text.
PAIRS = re.compile(r"[\w-]+=[^,={}]+(,[\w-]+=[^,={}]+)*")
SHOWN = 3
"""Largest number of the original's names that are listed."""
NO_ORIGIN = Origin("default", None)
CONFIG_FILE = "a config file is named by --config="


@dataclass(frozen=True)
class Loaded:
    """Frozen settings, for each that a source gave its origin, and what the user should know."""

    settings: Settings
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()
    sources: Mapping[str, bool] = field(default_factory=dict)
    """Every source by name, weakest first, and whether it was found rather than named by the user."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of other programs that config.env holds."""

    def pass_on_variables(self, environment: MutableMapping[str, str]) -> None:
        # The environment takes precedence, as it does for settings; ranks inherit it.
        environment.update({name: value for name, value in self.variables.items() if name not in environment})


def load(
    flags: Mapping[str, object],
    config: Path | None = None,
    complete: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Loaded:
    """Return the settings of a run; unless `complete`, what a run cannot do without may be missing.

    Raises SettingsError that lists every mistake at once.
    """
    return resolve(collect_sources(flags, config, environment), complete)


def resolve(sources: Iterable[Source], complete: bool = True) -> Loaded:
    """Merge sources, weakest first, into settings. Raises SettingsError that lists every mistake at once."""
    sources = list(sources)
    merged = MergedValues()
    warnings = [warning for source in sources for warning in source.warnings]
    outranked: list[Mistake] = []
    for source in sources:
        # First: one sentence about the file says more than a mistake for each of its names.
        refuse_original(source)
        found = outranked if source.is_outranked else merged.mistakes
        for given in canonical_values(source, found):
            merged.set(given, source.name)
        found += source.mistakes
    warnings += sort_outranked(outranked, merged)
    if merged.values.get("deepspeed_config") is not None:
        from simpletuner.settings.resolving.deepspeed_source import apply_deepspeed_config

        warnings += apply_deepspeed_config(merged)
    warnings += [said for source in sources for said in warn_of_defaults(source.name, source.left_out, merged)]
    # After DeepSpeed's JSON, which may give the batch size of a rank.
    apply_global_batch_size(merged)
    apply_output_address(merged)
    mistakes, origins = merged.mistakes, merged.origins
    # What is missing stands in the config file that was meant.
    complete = complete and not any(each.hint.startswith(CONFIG_FILE) for each in mistakes)
    settings, invalid = validate(merged.values, origins, mistakes)
    if complete and RANKS not in merged.origins:
        mistakes += [missing_ranks(source.needs_ranks) for source in sources if source.needs_ranks]
    found = [*(find_missing(settings) if complete else ()), *find_contradictions(settings)]
    # Rules compare typed values: of a setting that is not valid by itself they know nothing.
    mistakes += [with_places(rule, origins) for rule in found if invalid.isdisjoint((rule.setting, *rule.others))]
    if mistakes:
        raise InvalidSettings(settings, invalid, origins, mistakes, hint_for_values(sources, invalid))
    # Before normalize(), which resets what some of these warnings are about.
    about = [
        str(with_places(warning, origins))
        for warning in (*warnings_about(settings), *without_effect(settings, origins))
    ]
    settings, reasons = normalize(settings)
    # A setting that a rule reset keeps its origin, with the reason that `config show` prints.
    changed = {name: replace(origins.get(name, NO_ORIGIN), reason=why) for name, why in reasons.items()}
    implicit = {source.name: source.implicit for source in sources}
    variables = {name: value for source in sources for name, value in source.variables.items()}
    return Loaded(settings, origins | changed, (*warnings, *about), implicit, variables)


def sort_outranked(found: Iterable[Mistake], merged: MergedValues) -> Iterator[str]:
    """Yield a warning for each mistake of config/config.env beside a named config file that cannot change the
    run.

    The others, about settings that nothing else sets, are added to the mistakes.
    """
    for mistake in found:
        name = canonical_name(mistake.setting)
        if name and (name not in merged.origins or merged.origins[name].place in mistake.place):
            merged.mistakes.append(mistake)
        else:
            yield f"{mistake}; it is not used, since a config file is named"


def refuse_original(source: Source) -> None:
    """Raise SettingsError for a file with the original's own names: `config import` translates it."""
    others = [name for given in source.values if (name := plain_name(given.name)) not in SECTION_OF]
    if others and source.is_file and not source.is_outranked:
        from simpletuner.settings.foreign.original_names import names_of_original

        if theirs := names_of_original(others):
            more = f" and {len(theirs) - SHOWN} more" if len(theirs) > SHOWN else ""
            message = f"{source.name} is a file of the original SimpleTuner: it has {', '.join(theirs[:SHOWN])}{more}"
            raise SettingsError(message, import_hint(source.name))


def hint_for_values(sources: Iterable[Source], invalid: frozenset[str]) -> str:
    """Hint to translate a file whose refused values are the original's; empty for other mistakes."""
    from simpletuner.settings.foreign.original_names import is_value_of_original

    for source in sources:
        for given in source.values if source.is_file else ():
            if (name := canonical_name(given.name)) in invalid and is_value_of_original(name, given.value):
                return import_hint(source.name)
    return ""


def canonical_values(source: Source, mistakes: list[Mistake]) -> Iterable[RawValue]:
    """Values of a source by setting name; a mistake is added for each name that cannot be resolved."""
    taken: dict[str, RawValue] = {}
    for given in source.values:
        name = canonical_name(given.name)
        if name is None:
            # Looking for a like name takes a millisecond, which tens of thousands of mistakes must not cost.
            mistakes.append(unknown_setting(given, may_guess=len(mistakes) < MAX_MISTAKES))
        elif name in taken:
            place = f"{taken[name].place} and {given.place}"
            mistakes.append(Mistake(name, "it is set twice", place, hint="keep one of them"))
        elif given.value is not None or is_known_null(name):
            taken[name] = given
    return [read_table(name, given, mistakes) for name, given in taken.items()]


def is_known_null(name: str) -> bool:
    """True if validation accepts null for a setting; elsewhere null means unset."""
    field = setting_fields()[name]
    return type(None) in get_args(field.annotation) or field.default not in ("", [])


def unknown_setting(given: RawValue, may_guess: bool) -> Mistake:
    if isinstance(given.value, Mapping) and given.name == "config":
        message = (
            "settings stand side by side, not in it: `simpletuner config import` reads files of the original's WebUI"
        )
        return Mistake(given.name, message, given.place)
    if isinstance(given.value, Mapping):
        message = "settings stand side by side, not in sections: move what is in it to the top of the file"
        return Mistake(given.name, message, given.place)
    if given.place == "flag" and given.value == "" and not given.name.startswith("-"):
        return Mistake(given.name, "is neither a flag nor the value of one", given.place, hint=flag_for(given.name))
    from simpletuner.settings.foreign.original_names import original_hint

    is_variable = re.search(r"\.env:\d+$", given.place, re.IGNORECASE)
    otherwise = "set it in the shell if it is a variable of another program" if is_variable else ""
    name = plain_name(given.name)
    like = original_hint(name) or meaning_of(name) or (did_you_mean(given.name, setting_fields()) if may_guess else "")
    return Mistake(given.name, UNKNOWN, given.place, hint=like or otherwise)


def flag_for(word: str) -> str:
    """Return the likely meaning of a folder or a file that is an argument by itself."""
    path = Path(word)
    if (path / LOG).is_file():
        return f"the folder of a run is named by --output_dir={word}"
    if path.is_dir():
        return f"a folder of images is named by --instance_data_dir={word}"
    if (path.suffix.lower() or path.name) not in (*FORMATS, ".envrc"):
        return "values are written as --name=value"
    return f"{CONFIG_FILE}{word}{'' if path.is_file() else ', and there is no such file'}"


def read_table(name: str, given: RawValue, mistakes: list[Mistake]) -> RawValue:
    """Parse a table setting that was given as text: inline JSON, or the path of a JSON file."""
    text, kind = given.value, next(filter(is_table, get_args(setting_fields()[name].annotation)), None)
    if kind is None or not isinstance(text, str) or normalize_name(text) in WORDS_FOR_NOTHING:
        return replace(given, name=name)
    # Only tables of text have the short form: in `a=1` a JSON table would need to know that 1 is a number.
    if get_args(kind) == (str, str) and PAIRS.fullmatch(text):
        return replace(given, name=name, value=dict(pair.split("=", 1) for pair in text.split(",")))
    file = "" if text.lstrip().startswith("{") else text
    try:
        value = parse_json(read_text(expand_path(file)) if file else text)
        if value is None:
            raise ValueError("it holds null")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else reason_of(error)
        message = f"use JSON or the path of a JSON file: {reason}"
        mistakes.append(Mistake(name, message, given.place, shorten(given.as_written)))
        value = None
    return replace(given, name=name, value=value, file=file)


def parse_json(text: str) -> object:
    """Parse JSON. Raises ValueError for a syntax error, deep nesting or a duplicate key in an object."""
    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(value)
    return value


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object. Raises ValueError for a duplicate key: json would silently keep the last one."""
    counts = Counter(name for name, _ in pairs)
    if len(counts) < len(pairs):
        raise ValueError(f"duplicate key `{min(name for name, count in counts.items() if count > 1)}`")
    return dict(pairs)


def is_table(annotation: object) -> bool:
    return get_origin(annotation) is dict


def validate(
    values: Mapping[str, object], origins: Mapping[str, Origin], mistakes: list[Mistake]
) -> tuple[Settings, frozenset[str]]:
    """Build typed settings and the names at their defaults, after adding a mistake for each."""
    sections: dict[str, Any] = {}
    invalid: set[str] = set()
    for section_name, section in SECTIONS.items():
        own = {name: value for name, value in values.items() if SECTION_OF[name] == section_name}
        try:
            # pydantic takes 2 ms to make the validator of a section, which defaults do not need
            sections[section_name] = section(**own) if own else section.model_construct()
        except ValidationError as error:
            # pydantic reports each branch of a union; one mistake per setting is enough.
            by_setting = {str(item["loc"][0]): item for item in error.errors()}
            fields = section.model_fields
            mistakes += [to_mistake(item, fields[name], origins[name]) for name, item in by_setting.items()]
            invalid |= by_setting.keys()
            sections[section_name] = section(**{name: value for name, value in own.items() if name not in by_setting})
    return Settings.model_construct(**sections), frozenset(invalid)


def provenance(loaded: Loaded) -> str:
    """Number of settings from each source, weakest first; their names for sources that were only found."""
    decided = {
        source: [name for name, origin in loaded.origins.items() if origin.source == source]
        for source in loaded.sources
    }
    parts = [
        f"{source}: {', '.join(names) if loaded.sources[source] else len(names)}"
        for source, names in decided.items()
        if names
    ]
    return "; ".join(parts) or "all at their defaults"


def settings_as_json(loaded: Loaded) -> dict[str, Any]:
    """Return every setting by name, as `settings.json` holds them: a file that `--config` reads again.

    A reference stands for a secret, so whoever reads the file learns only where it is, and a replay finds it
    there.
    """
    dumped = loaded.settings.model_dump(mode="json")
    values = {name: without_point(dumped[section][name]) for name, section in SECTION_OF.items()}
    if values["global_batch_size"] is not None:
        del values["gradient_accumulation_steps"]  # follows from it, on as many ranks as a replay has
    secret = (name for name in loaded.origins if is_secret(name) and values[name])
    return values | {name: loaded.origins[name].given for name in secret}


def without_point(value: object) -> object:
    # People write 64.0; TOML cannot hold whole numbers that are very large.
    # From 2^53 on a float stands for several whole numbers.
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value
