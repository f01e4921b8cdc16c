"""Declare a setting in one line: flag, file key, validation, help and `settings.json` all come from it.

sections.py declares AdamW's defaults; other optimizers have their own where they differ.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.table import TYPE_NAMES
from simpletuner.settings.values.spelling import choices_of
from simpletuner.system.files.paths import expand_path, refuse_address

NUMBERS = (int, float, int | None, float | None)


def knob(
    default: object, sentence: str, *, when: str = "", unit: str = "", aliases: tuple[str, ...] = (), **bounds: float
) -> Any:
    """Declare a setting: its default, what it does, its unit, older names, and bounds (`ge`, `gt`, `le`,
    `lt`).

    `when` is the condition on other settings without which it has no effect (`settings/rules/effects.py`
    reads it).
    """
    extra = {"unit": unit, "aliases": list(aliases), "when": when}
    return Field(default, description=sentence, json_schema_extra=extra, **bounds)  # pyright: ignore[reportCallIssue, reportArgumentType]


def extra_of(field: FieldInfo, name: Literal["unit", "aliases", "when"]) -> Any:
    """Addition of `knob` to pydantic's declaration: the unit, older names, or the condition of its effect."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def shown_default(field: FieldInfo) -> str:
    """Format a default for people; empty where there is none."""
    if field.annotation == bool | None and field.default is None:
        return "auto"
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return "" if value in (None, "", []) else str(value)


def kind_of(annotation: object) -> object:
    """The plain type behind an annotation, looking through Optional."""
    if get_origin(annotation) in (Union, types.UnionType):
        return kind_of(next(part for part in get_args(annotation) if part is not type(None)))
    return get_origin(annotation) or annotation


def bounds_of(field: FieldInfo, words: Mapping[str, str]) -> list[str]:
    """Format the bounds of a setting, each with the word for `ge`, `gt`, `le` or `lt` before it."""
    return [
        f"{word} {getattr(part, bound)}"
        for part in field.metadata
        for bound, word in words.items()
        if hasattr(part, bound)
    ]


def type_name(annotation: object) -> str:
    if annotation == bool | None:
        return "true|false|auto"
    names = {**TYPE_NAMES, SecretStr: "TEXT", list: "TEXT", dict: "JSON"}
    return names[kind_of(annotation)]


class Section(BaseModel):
    """A group of settings that one part of the program is given; frozen, and strict about unknown names."""

    # JSON has neither infinity nor NaN, and settings.json is JSON.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    # One for all checks: pydantic takes 0.05 ms to inspect each validator of each field, at each start.
    @field_validator("*", mode="wrap")
    @classmethod
    def check_value(cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        annotation = cls.model_fields[str(info.field_name)].annotation
        # First, since pydantic cannot hold the message of another check that quotes such a text.
        refuse_unwritable_text(value)
        refuse_bool_as_number(value, annotation)
        checked = handler(with_expanded_path(value, annotation))
        refuse_addresses(checked)
        if isinstance(checked, int) and checked >= 1 << 63:
            raise ValueError("use a whole number below 2^63")
        return checked


def refuse_unwritable_text(value: object) -> None:
    """Refuse characters that no file and no command line can hold."""
    for leaf in leaves(value):
        if isinstance(leaf, str | Path) and UNWRITABLE.search(str(leaf)):
            raise ValueError("text must be UTF-8 without NUL characters")


def refuse_bool_as_number(value: object, annotation: object) -> None:
    # pydantic would take them as 1 and 0.
    is_number = annotation in NUMBERS or any(isinstance(choice, int) for choice in choices_of(annotation))
    if isinstance(value, bool) and is_number:
        raise PydanticCustomError("word", "a number is expected")


def with_expanded_path(value: object, annotation: object) -> object:
    """Expand `~` and `{env:NAME}` wherever a path comes from: flag, file, variable."""
    if annotation == list[Path] and isinstance(value, list):
        return [expand_path(each) if isinstance(each, str | Path) else each for each in value]
    return expand_path(value) if kind_of(annotation) is Path and isinstance(value, str | Path) else value


def refuse_addresses(checked: object) -> None:
    # pathlib makes `s3:/BUCKET` of s3://BUCKET. Settings that take addresses have replaced theirs.
    for leaf in leaves(checked):
        if isinstance(leaf, Path):
            refuse_address(leaf)


UNWRITABLE = re.compile("[\0\ud800-\udfff]")


def leaves(value: object) -> Iterator[Any]:
    """Yield all values at any depth, and the names in tables."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


OWN_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    # Chen et al. 2023, arXiv:2302.06675, algorithm 2: its only moment remembers 100 steps, not 1,000 (0.999).
    "lion": {"adam_beta1": 0.9, "adam_beta2": 0.99},
    # Of these the papers have no weight decay, and torch's classes have 0; it would be added to the gradient
    # of the first two (Kingma and Ba 2015, Duchi et al. 2011, Shazeer and Stern 2018).
    "adam": {"adam_weight_decay": 0.0},
    "adagrad": {"adam_weight_decay": 0.0},
    "adafactor": {"adam_weight_decay": 0.0},
    # Mishchenko and Defazio 2023, arXiv:2306.06101: what it finds is multiplied by a rate of 1.
    "prodigy": {"learning_rate": 1.0, "adam_weight_decay": 0.0},
}


def own_defaults(optimizer: object) -> Mapping[str, float]:
    """Return the defaults of an optimizer that are not AdamW's, by setting."""
    return OWN_DEFAULTS.get(optimizer, {}) if isinstance(optimizer, str) else {}


def with_own_defaults(values: object) -> object:
    """Add an optimizer's own defaults to the settings that were given with it."""
    return {**own_defaults(values.get("optimizer")), **values} if isinstance(values, dict) else values
