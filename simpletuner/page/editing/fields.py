"""The form of a config file: a field per setting with its origin, mistakes and warnings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_origin

from simpletuner.errors import BrokenRule, Mistake, SettingsError, SimpleTunerError
from simpletuner.models.catalog.registry import AUTO, presets, trainable_flavours
from simpletuner.page.editing.documents import TYPED, Document, find_outside, holds_table, shown_value
from simpletuner.runs.folder import Folders
from simpletuner.settings import Loaded, Origin, Settings
from simpletuner.settings.declared.errors import InvalidSettings, is_secret
from simpletuner.settings.declared.knob import bounds_of, extra_of, kind_of, own_defaults, shown_default, type_name
from simpletuner.settings.declared.sections import Model, setting_fields
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.files.raw_values import Source
from simpletuner.settings.resolving.loading import NO_ORIGIN, resolve
from simpletuner.settings.rules.engine_rules import WRAP_POLICIES
from simpletuner.settings.showing.export import because, field_value
from simpletuner.settings.values.spelling import SWITCHES, choices_of, normalize_value
from simpletuner.tools.run_check import errors_around, examine_run


@dataclass(frozen=True)
class ConfigCheck:
    """The result of validation: settings as far as they are valid, origins, and mistakes."""

    settings: Settings
    origins: Mapping[str, Origin]
    mistakes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sentences by setting; a contradiction is there for each setting that it names."""
    general: Sequence[str] = ()
    """Sentences about no setting that there is: unknown keys, for example."""
    warnings: Sequence[str] = ()
    invalid: frozenset[str] = frozenset()
    """Settings whose value is wrong by itself, whatever the others are."""

    @property
    def count(self) -> int:
        distinct = {sentence for sentences in self.mistakes.values() for sentence in sentences}
        return len(distinct) + len(self.general)


def examine(document: Document, folders: Folders, environment: Mapping[str, str] = os.environ) -> ConfigCheck:
    """Check a document as `config validate` does, the fields that are not saved yet included.

    Raises SettingsError for a file that cannot be read at all.
    """
    # What was typed may name any file of the machine, which the settings layer would read: such fields count
    # as empty.
    outside = find_outside(document, folders)
    safe = replace(document, typed={**document.typed, **dict.fromkeys(outside, "")})
    loaded, errors = check(safe.sources(environment))
    mistakes = [mistake for error in errors for mistake in mistakes_of(error)]
    mistakes += [(name, f"{error.message}; {error.hint}") for name, error in outside.items()]
    by_setting: dict[str, list[str]] = {}
    for name, sentence in dict.fromkeys(mistakes):
        by_setting.setdefault(name, []).append(sentence)
    general = [text for name in by_setting.keys() - setting_fields().keys() for text in by_setting.pop(name)]
    warnings, invalid = (loaded.warnings, ()) if isinstance(loaded, Loaded) else ((), loaded.invalid)
    broken = (name for name, value in document.changes.items() if holds_table(name) and is_broken_table(value))
    wrong = frozenset((*outside, *invalid, *broken))
    return ConfigCheck(loaded.settings, loaded.origins, by_setting, general, warnings, wrong)


def check(sources: Iterable[Source]) -> tuple[Loaded | InvalidSettings, list[SimpleTunerError]]:
    """Return the valid settings, and all errors of `config validate`."""
    try:
        loaded = resolve(sources)
    except InvalidSettings as error:
        return error, [*errors_around(error)]
    return loaded, examine_run(loaded)[1]


def mistakes_of(error: SimpleTunerError) -> Iterator[tuple[str, str]]:
    """Yield each sentence with each setting next to which it is shown."""
    if not isinstance(error, SettingsError) or not error.mistakes:
        sentence = f"{error.message}; {error.hint}" if error.hint else error.message
        for name in error.about or ("",):
            yield name, sentence
        return
    for mistake in error.mistakes:
        names = (mistake.setting, *mistake.others) if isinstance(mistake, BrokenRule) else (mistake.setting,)
        for name in names:
            # A key within a table is named after it.
            owner = canonical_name(name.partition(".")[0]) or ""
            yield owner, sentence_of(mistake, is_beside=bool(owner))


def sentence_of(mistake: Mistake, is_beside: bool) -> str:
    """Describe the mistake; next to its field, omit name, value and place, which are shown there."""
    if isinstance(mistake, BrokenRule):
        return f"{mistake.message}; {mistake.hint}" if mistake.hint else mistake.message
    if not is_beside:
        return str(mistake)
    inner = mistake.setting.partition(".")[2]
    sentence = f"{inner}: {mistake.message}" if inner else mistake.message
    return f"{sentence}; {mistake.hint}" if mistake.hint else sentence


def is_broken_table(value: object) -> bool:
    """True for typed JSON that does not parse."""
    return isinstance(value, str) and value.startswith("{")


KINDS = {"true|false": "true or false", "INTEGER": "whole number", "NUMBER": "number", "TEXT": "", "PATH": "path"}
KINDS |= {"JSON": "JSON, or the path of a JSON file", "true|false|auto": "true, false or auto"}
SECRET_IS_SET = "set, and not shown; a blank removes it"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Note:
    """Texts that change as a person types: the origin of the value, and its mistakes."""

    name: str
    origin: str
    mistakes: Sequence[str]


@dataclass(frozen=True)
class Field:
    """A setting as a form shows it."""

    name: str
    label: str
    sentence: str
    facts: str
    """Type, bounds, unit and default."""
    control: str
    """`select`, `lines`, `table`, `secret` or `text`."""
    options: Sequence[tuple[str, str]]
    value: str
    """The value in the file; empty where there is none."""
    placeholder: str
    note: Note
    suggestions: Sequence[str] = ()
    """Values that are known, of a text that may also be another."""
    unavailable: str = ""
    """Why this family or this machine cannot do it; empty where it can."""


@dataclass(frozen=True)
class FieldGroup:
    """A section of the form, or of another view of it."""

    anchor: str
    title: str
    fields: Sequence[Field]


def make_field(
    name: str,
    document: Document,
    examined: ConfigCheck,
    label: str = "",
    names: Mapping[str, str] | None = None,
    unavailable: str = "",
) -> Field:
    """Describe a setting; `names` are words for its choices, which are shown with them."""
    declared = setting_fields()[name]
    value = file_text(name, document)
    placeholder = placeholder_of(name, examined)
    control = control_of(name, declared.annotation)
    return Field(
        name=name,
        label=label or name,
        sentence=declared.description or "",
        facts=field_facts(name),
        control=control,
        options=list(options_of(name, value, placeholder, names or {}, examined)) if control == "select" else (),
        value="" if control == "secret" else value,
        placeholder=SECRET_IS_SET if control == "secret" and value else placeholder,
        note=make_note(name, examined),
        # A dotted path may be typed as well.
        suggestions=WRAP_POLICIES if name == "fsdp_auto_wrap_policy" else (),
        # What is set must be able to be taken back.
        unavailable="" if value else unavailable,
    )


def control_of(name: str, annotation: object) -> str:
    if is_secret(name):
        return "secret"
    if annotation in SWITCHES or choices_of(annotation) or name in ("model_family", "model_flavour"):
        return "select"
    return {list: "lines", dict: "table"}.get(kind_of(annotation), "text")


def file_text(name: str, document: Document) -> str:
    """Return the value in the file, in one spelling where there are choices; empty where there is none."""
    if name not in document.values:
        return ""
    declared = setting_fields()[name]
    value = document.values[name]
    if declared.annotation in SWITCHES or choices_of(declared.annotation):
        value = normalize_value(name, declared, value)
        return "auto" if value is None and declared.annotation == bool | None else shown_value(value)
    return shown_value(value)


def placeholder_of(name: str, examined: ConfigCheck) -> str:
    """Return the effective value of an empty field: that of a weaker source, or the default."""
    origin = examined.origins.get(name, NO_ORIGIN)
    weaker = origin.outranks[0] if origin.outranks else None
    if weaker is not None and not is_secret(name):
        return shown_value(weaker.given)
    own = own_defaults(examined.settings.optimizer.optimizer)
    return shown_value(own[name]) if name in own else shown_default(setting_fields()[name])


def options_of(
    name: str, value: str, unset: str, names: Mapping[str, str], examined: ConfigCheck
) -> Iterator[tuple[str, str]]:
    """Yield the choices of a select, with a word for each; the file's value is always among them."""
    annotation = setting_fields()[name].annotation
    choices = [shown_value(choice) for choice in choices_of(annotation)] or models_of(name, examined.settings.model)
    if annotation in SWITCHES:
        choices = ["true", "false", *(["auto"] if annotation == bool | None else [])]
    elif type(None) in getattr(annotation, "__args__", ()):
        choices.append("none")
    yield "", f"not set ({names.get(unset, unset)})" if unset else "not set"
    for choice in dict.fromkeys([*choices, *filter(None, [value])]):
        yield choice, names.get(choice, choice)


def models_of(name: str, model: Model) -> list[str]:
    """Families that can be trained, those of the file included, or the flavours of the one it has."""
    if name == "model_family":
        trainable = (family for family, preset in presets().items() if preset.family_class)
        return [*trainable, AUTO, *(model.model_families or {})]
    return trainable_flavours(model.model_family) if name == "model_flavour" else []


def field_facts(name: str) -> str:
    """Type, bounds, unit and default on one line; choices are in the select itself."""
    declared = setting_fields()[name]
    kind = type_name(declared.annotation) if not choices_of(declared.annotation) else ""
    if get_origin(declared.annotation) is list:
        kind = "one per line"
    bounds = bounds_of(declared, BOUNDS)
    unit, default = extra_of(declared, "unit"), shown_default(declared)
    facts = [" ".join(filter(None, [KINDS.get(kind, kind), *bounds])), unit and f"in {unit}"]
    return " · ".join(filter(None, [*facts, f"default {default}" if default else ""]))


def make_note(name: str, examined: ConfigCheck) -> Note:
    return Note(name, origin_of(name, examined), examined.mistakes.get(name, ()))


def origin_of(name: str, examined: ConfigCheck) -> str:
    """Return the origin of a value and what it outranks; empty for the default."""
    origin = examined.origins.get(name, NO_ORIGIN)
    if origin is NO_ORIGIN:
        return ""
    value = field_value(examined.settings, name)
    reason = "" if is_secret(name) else because(value, origin)
    place = "not saved yet" if origin.place == TYPED else f"from {origin}"
    return f"{place}; {reason}" if reason else place
