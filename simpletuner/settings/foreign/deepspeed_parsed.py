"""Parsed form of DeepSpeed's JSON: values of settings, keys passed on to DeepSpeed, mistakes and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner.errors import MAX_MISTAKES, Mistake
from simpletuner.settings.declared.errors import did_you_mean, shorten
from simpletuner.settings.files.config_files import FileEntry
from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.foreign.key_table import KeyTable, interpret, put
from simpletuner.settings.foreign.recognition import foreign_hint

BLOCKS = ("optimizer", "scheduler")
"""Keys that modules of their own read."""


@dataclass
class ParsedConfig:
    """Content of a JSON that was given at `place`, or read from `file`."""

    place: str
    file: str = ""
    settings: list[RawValue] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left_out: list[RawValue] = field(default_factory=list)
    """DeepSpeed's own value of settings, by the key that would say it and is not there."""

    def read(self, values: Mapping[str, object], table: KeyTable, section: str = "") -> None:
        """Read the keys at the top level, or of a section (`optimizer.params.`) with a table of its own.

        The rules of such a section know its keys by their whole names.
        """
        for found in interpret(table, [FileEntry(name, value) for name, value in values.items()], section):
            if found.outcome == "set":
                self.set(found.setting, found.value, found.path)
            elif found.outcome == "kept":
                put(self.kept, found.key, found.value)
            elif found.outcome == "unused":
                self.warn_unused(found.path, found.value, found.note)
            elif found.outcome == "refused":
                self.refuse(found.path, found.value, found.note)
            elif found.outcome == "unknown":
                parent = found.path.rpartition(".")[0]
                # Looking for a like name takes time, and only so many mistakes are shown.
                known = table.names_in(f"{parent}." if parent else "") if len(self.mistakes) < MAX_MISTAKES else ()
                self.refuse_unknown(found.path, known if parent else {*known, *BLOCKS})

    def set(self, setting: str, value: object, path: str) -> None:
        # Several keys may give the same.
        # Both offload sections may name the path, and the schedule repeats the optimizer's learning rate.
        if not any(given.name == setting and given.value == value for given in self.settings):
            self.settings.append(RawValue(setting, value, self.place_of(path)))

    def leave_out(self, setting: str, value: object, path: str, written: object) -> None:
        """Record DeepSpeed's default for a missing key."""
        self.left_out.append(RawValue(setting, value, self.name_of(path), written=written))

    def place_of(self, path: str) -> str:
        """The place of a key, as the origin of a setting."""
        return f"{self.file} {path}" if self.file else f"{self.place} deepspeed_config.{path}"

    def name_of(self, path: str) -> str:
        """Return the name of a key in messages: a file's keys by themselves, inline ones with the setting
        before them."""
        return path if self.file else f"deepspeed_config.{path}"

    @property
    def where(self) -> str:
        # The user has just typed a flag.
        place = self.file or self.place
        return "" if place == "flag" else f" ({place})"

    def refuse(self, path: str, value: object, message: str, hint: str = "") -> None:
        self.mistakes.append(Mistake(self.name_of(path), message, self.file or self.place, shorten(value), hint))

    def refuse_unknown(self, path: str, siblings: Iterable[str]) -> None:
        section, _, name = path.rpartition(".")
        siblings = list(siblings)
        if name in siblings:  # `zero_optimization.stage` as one key
            hint = f"write `{name}` into the object `{section}`: keys are nested, not dotted"
        else:
            hint = foreign_hint(name) or did_you_mean(name, siblings) or "leave it out"
        mistake = Mistake(self.name_of(path), "DeepSpeed knows no such key", self.file or self.place, hint=hint)
        self.mistakes.append(mistake)

    def warn_unused(self, path: str, value: object, reason: str) -> None:
        self.warnings.append(f"{self.name_of(path)} = {shorten(value)}{self.where} is not used: {reason}")
