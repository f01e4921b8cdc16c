"""Tables for the configuration files of other tools: accelerate's YAML, DeepSpeed's JSON, the dataset file.

A table has one rule per key, which says what becomes of it. `interpret` reads a file by a table; `export`
reads the table backwards and returns the keys that settings can fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from simpletuner.settings.declared.sections import SECTION_OF, Settings
from simpletuner.settings.files.config_files import FileEntry
from simpletuner.settings.values.spelling import normalize_name

Convert = Callable[[Any], Any]
"""Converts a value, or raises ValueError with what to write instead."""


def unchanged(value: object) -> object:
    return value


def always(settings: Settings) -> bool:
    return True


def never(settings: Settings) -> bool:
    """Condition of an alternative key: it is read, but never written."""
    return False


@dataclass(frozen=True)
class Maps:
    """The key becomes a setting."""

    setting: str
    read: Convert = unchanged
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing special."""
    write: Convert = unchanged
    """The inverse of `read`, for the export."""
    export_if: Callable[[Settings], bool] = always


@dataclass(frozen=True)
class Keeps:
    """The key is passed on under its own name."""

    read: Convert = unchanged


@dataclass(frozen=True)
class Ignores:
    """Key has no effect here; the user is warned unless `warns` is false or the value asks for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()
    warns: bool = True


@dataclass(frozen=True)
class Refuses:
    """The key is a mistake, unless its value asks for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


# Every key of a foreign file has exactly one fate. What is not passed on needs a reason, since the user wrote
# it to have an effect.
Rule = Maps | Keeps | Ignores | Refuses
Outcome = Literal["set", "kept", "neutral", "unused", "refused", "unknown"]


@dataclass(frozen=True)
class MappedField:
    path: str
    """The key with its sections, as the file spells it."""
    key: str
    """The same as the table spells it."""
    value: Any
    """Value after the rule's conversion, or the file's value without a rule."""
    outcome: Outcome
    setting: str = ""
    note: str = ""
    """Why it is neutral, unused or refused."""
    line: int = 0


@dataclass(frozen=True)
class KeyTable:
    """The rules of one kind of file, by the key with its sections (`section.key`)."""

    rules: Mapping[str, Rule]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Canonical key by alternative name."""
    unset: tuple[object, ...] = (None,)
    """Values that stand for a key that is not there."""
    is_off: Callable[[object], bool] = lambda value: value is None
    """Predicate of values that turn an ignored or refused key off, so that there is nothing to report."""

    @cached_property
    def sections(self) -> frozenset[str]:
        return frozenset(name[:end] for name in self.rules for end, letter in enumerate(name) if letter == ".")

    def names_in(self, section: str) -> set[str]:
        """Keys of a section (`"bf16."`; empty for the top level), for suggestions."""
        known = (*self.rules, *self.aliases)
        return {name.removeprefix(section).partition(".")[0] for name in known if name.startswith(section)}


def in_section(
    section: str, rules: Mapping[str, Rule], export_if: Callable[[Settings], bool] = always
) -> dict[str, Rule]:
    """Rules of a section by full names, exported only if `export_if` also holds for the settings."""

    def both(rule: Maps) -> Maps:
        own = rule.export_if
        return replace(rule, export_if=lambda settings: export_if(settings) and own(settings))

    return {f"{section}.{name}": both(rule) if isinstance(rule, Maps) else rule for name, rule in rules.items()}


def interpret(table: KeyTable, entries: Iterable[FileEntry], section: str = "") -> Iterator[MappedField]:
    """Yield what becomes of each key, in the order of the file, sections included."""
    spelled: dict[str, str] = {}
    for entry in entries:
        path = f"{section}{entry.key}"
        key = table.aliases.get(path, path)
        found = MappedField(path, key, entry.value, "unknown", line=entry.line)
        # Only alternative names of a key conflict here: the caller knows the lines of duplicate names.
        if spelled.setdefault(key, path) != path:
            yield replace(found, outcome="refused", note=f"{spelled[key]} means the same: keep one of them")
        elif "." in entry.key:  # `section.name` is a name of the table, not of a file
            yield found
        elif key not in table.sections:
            yield map_field(table, found)
        elif isinstance(entry.value, Mapping):
            yield from interpret(table, inner_entries(entry), f"{key}.")
        elif not table.is_off(entry.value):
            yield replace(found, outcome="refused", note="use a JSON object")


def inner_entries(entry: FileEntry) -> Iterator[FileEntry]:
    for name, value in entry.value.items():
        yield FileEntry(name, value, entry.inner_lines.get(name, entry.line))


def map_field(table: KeyTable, found: MappedField) -> MappedField:
    rule = table.rules.get(found.key)
    if rule is None:
        return found
    if isinstance(rule, Ignores) and not rule.warns:
        return replace(found, outcome="neutral", note=rule.reason)
    if is_neutral(table, rule, found.value):
        return replace(found, outcome="neutral", note="asks for nothing special")
    if isinstance(rule, Ignores | Refuses):
        return replace(found, outcome="unused" if isinstance(rule, Ignores) else "refused", note=rule.reason)
    try:
        value = rule.read(found.value)
    except ValueError as error:
        return replace(found, outcome="refused", note=str(error))
    if isinstance(rule, Maps):
        return replace(found, outcome="set", value=value, setting=rule.setting)
    return replace(found, outcome="kept", value=value)


def is_neutral(table: KeyTable, rule: Rule, value: object) -> bool:
    # None and `auto` stand for a key that is not there, whatever its rule.
    if value in table.unset:
        return True
    if isinstance(rule, Ignores | Refuses) and table.is_off(value):
        return True
    neutral = () if isinstance(rule, Keeps) else rule.neutral
    # `accelerate launch` passes numbers as text, so 1 and "1" are the same.
    return value in neutral or normalize_name(value) in map(normalize_name, neutral)


def export(table: KeyTable, settings: Settings) -> dict[str, Any]:
    """Read a table backwards: the keys that these settings fill, nested in their sections."""
    result: dict[str, object] = {}
    for path, rule in table.rules.items():
        if isinstance(rule, Maps) and rule.export_if(settings):
            value = getattr(getattr(settings, SECTION_OF[rule.setting]), rule.setting)
            put(result, path, rule.write(value))
    return result


def put(target: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a dotted path, making the sections on the way."""
    *sections, name = path.split(".")
    for section in sections:
        target = target.setdefault(section, {})
    target[name] = value
