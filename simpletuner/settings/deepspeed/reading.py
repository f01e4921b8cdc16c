"""Read DeepSpeed's JSON: each key becomes a setting, is kept, is left out with a warning, or is a mistake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner.settings.deepspeed.keys import KEYS, OTHER_NAMES, SECTIONS, Key
from simpletuner.settings.deepspeed.kinds import Kind
from simpletuner.settings.mistakes import nearest, shortened
from simpletuner.settings.sources import RawValue

AUTO = "auto"
"""What accelerate and transformers call a value that is to be filled in."""


@dataclass
class Found:
    """What a JSON says: values of settings, what is kept for DeepSpeed, mistakes and warnings as sentences."""

    place: str
    file: str = ""
    settings: list[RawValue] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def say(self, knob: str, value: Any, path: str) -> None:
        """Note what the JSON says of a setting; the same value may stand in several places."""
        if not any(given.name == knob and given.value == value for given in self.settings):
            self.settings.append(RawValue(knob, value, self.at(path)))

    def at(self, path: str) -> str:
        """Return the place of a key, as origins of settings are told."""
        return f"{self.file} {path}" if self.file else f"{self.place} deepspeed_config.{path}"

    def keep(self, path: str, value: Any) -> None:
        """Keep a value for DeepSpeed at its place."""
        *sections, name = path.split(".")
        target = self.kept
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value

    def keep_if(self, kind: Kind, path: str, value: Any) -> None:
        """Keep a value for DeepSpeed if it is of a kind."""
        try:
            self.keep(path, kind.read(value))
        except (ValueError, OverflowError):
            self.wrong(path, value, f"use {kind.name}")

    def wrong(self, path: str, value: Any, what: str) -> None:
        """Note a mistake in a value."""
        self.mistakes.append(f"{self.name(path)} = {shortened(value)} ({self.file or self.place}): {what}")

    def unknown(self, path: str, siblings: Iterable[str]) -> None:
        """Note a key that DeepSpeed does not know."""
        near = nearest(path.rpartition(".")[2], siblings)
        self.mistakes.append(f"{self.name(path)} ({self.file or self.place}): DeepSpeed knows no such key{near}")

    def leave_out(self, path: str, value: Any, reason: str) -> None:
        """Warn that a value has no effect."""
        self.warnings.append(f"{self.name(path)} = {shortened(value)} is not used: {reason}")

    def name(self, path: str) -> str:
        """Return how sentences call a key."""
        return path if self.file else f"deepspeed_config.{path}"


def read_keys(values: Mapping[str, Any], found: Found, section: str = "") -> None:
    """Account for every key of a section, at any depth."""
    written: dict[str, str] = {}
    for name, value in values.items():
        path = f"{section}{name}"
        known = OTHER_NAMES.get(path, path)
        if known in written:
            found.wrong(path, value, f"{written[known]} means the same: keep one of them")
        elif known in SECTIONS:
            read_section(path, known, value, found)
        elif known not in KEYS:
            found.unknown(path, names_in(section))
        elif value is not None and value != AUTO:
            read_key(KEYS[known], path, known, value, found)
        written[known] = path


def read_section(path: str, known: str, value: Any, found: Found) -> None:
    """Account for a key that holds keys."""
    if isinstance(value, Mapping):
        read_keys(value, found, f"{known}.")
    elif not is_off(value):
        found.wrong(path, value, "use a JSON object")


def read_key(key: Key, path: str, known: str, value: Any, found: Found) -> None:
    """Account for a key that holds a value."""
    if (key.refused or key.unused) and (is_off(value) or value in key.idle):
        return
    if key.refused:
        found.wrong(path, value, key.refused)
    elif key.unused:
        found.leave_out(path, value, key.unused)
    elif key.knob:
        read_setting(key, path, value, found)
    elif key.kind:
        found.keep_if(key.kind, known, value)


def read_setting(key: Key, path: str, value: Any, found: Found) -> None:
    """Note a value that a setting can say."""
    try:
        found.say(key.knob, key.becomes(key.kind.read(value) if key.kind else value), path)
    except ValueError as error:
        found.wrong(path, value, f"use {key.kind.name}" if key.kind else str(error))


def is_off(value: Any) -> bool:
    """Return whether a value turns something off: nothing, false, none, or an object that is not enabled."""
    if isinstance(value, Mapping):
        return value.get("enabled") in (False, AUTO) or all(map(is_off, value.values()))
    return value is None or value is False or value in ([], "none", AUTO)


def names_in(section: str) -> set[str]:
    """Return the names that a section may hold."""
    known = {*KEYS, *SECTIONS, *OTHER_NAMES, "optimizer", "scheduler"}
    return {name.removeprefix(section).partition(".")[0] for name in known if name.startswith(section)}
