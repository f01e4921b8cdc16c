"""The form: one field per setting, made of what the settings layer declares and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from simpletuner.models.catalog.registry import AUTO, presets, trainable_flavours
from simpletuner.page.editing.documents import TYPED, Document, shown_value
from simpletuner.page.editing.examination import Examined
from simpletuner.settings.declared.knob import bounds_of, extra_of, kind_of, shown_default, type_name
from simpletuner.settings.declared.optimizer_defaults import own_defaults
from simpletuner.settings.declared.secret_names import is_secret
from simpletuner.settings.declared.sections import Model, setting_fields
from simpletuner.settings.resolving.loading import NO_ORIGIN
from simpletuner.settings.rules.engine_rules import WRAP_POLICIES
from simpletuner.settings.showing.explain import because
from simpletuner.settings.showing.export import field_value
from simpletuner.settings.values.spelling import SWITCHES, choices_of, normalize_value

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
    examined: Examined,
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
        facts=facts_of(name),
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


def control_of(name: str, annotation: Any) -> str:
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


def placeholder_of(name: str, examined: Examined) -> str:
    """Return the effective value of an empty field: that of a weaker source, or the default."""
    origin = examined.origins.get(name, NO_ORIGIN)
    weaker = origin.outranks[0] if origin.outranks else None
    if weaker is not None and not is_secret(name):
        return shown_value(weaker.given)
    own = own_defaults(examined.settings.optimizer.optimizer)
    return shown_value(own[name]) if name in own else shown_default(setting_fields()[name])


def options_of(
    name: str, value: str, unset: str, names: Mapping[str, str], examined: Examined
) -> Iterator[tuple[str, str]]:
    """Yield the choices of a select, with a word for each; what the file says is one, even if it is none of them."""
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
    """Return the families that can be trained, those of the file included, or the flavours of the one it has."""
    if name == "model_family":
        trainable = (family for family, preset in presets().items() if preset.family_class)
        return [*trainable, AUTO, *(model.model_families or {})]
    return trainable_flavours(model.model_family) if name == "model_flavour" else []


def facts_of(name: str) -> str:
    """Type, bounds, unit and default on one line; choices are in the select itself."""
    declared = setting_fields()[name]
    kind = type_name(declared.annotation) if not choices_of(declared.annotation) else ""
    if get_origin(declared.annotation) is list:
        kind = "one per line"
    bounds = bounds_of(declared, BOUNDS)
    unit, default = extra_of(declared, "unit"), shown_default(declared)
    facts = [" ".join(filter(None, [KINDS.get(kind, kind), *bounds])), unit and f"in {unit}"]
    return " · ".join(filter(None, [*facts, f"default {default}" if default else ""]))


def make_note(name: str, examined: Examined) -> Note:
    return Note(name, origin_of(name, examined), examined.mistakes.get(name, ()))


def origin_of(name: str, examined: Examined) -> str:
    """Say where the value comes from and what it outranks; nothing where it is the default."""
    origin = examined.origins.get(name, NO_ORIGIN)
    if origin is NO_ORIGIN:
        return ""
    value = field_value(examined.settings, name)
    reason = "" if is_secret(name) else because(value, origin)
    place = "not saved yet" if origin.place == TYPED else f"from {origin}"
    return f"{place}; {reason}" if reason else place
