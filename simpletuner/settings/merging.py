"""Values gathered from sources, the place of each, and what each outranked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from simpletuner.settings.mistakes import shortened
from simpletuner.settings.sections import SECTION_OF, SECTIONS, knobs
from simpletuner.settings.sources import RawValue
from simpletuner.settings.spelling import normalize_value


@dataclass(frozen=True)
class Origin:
    """Where a value came from, what was written there, and what it outranked."""

    place: str
    given: Any
    source: str = ""
    outranks: tuple[Origin, ...] = ()
    reason: str = ""
    file: str = ""
    """The JSON file that the value was read from, where a source only names one."""

    def __str__(self) -> str:
        return self.place


@dataclass
class Merged:
    """What sources say together, by knob; `mistakes` are sentences."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def take(self, given: RawValue, source: str) -> None:
        """Take a value from a source that outranks those before it."""
        before = self.origins.get(given.name)
        outranks = (replace(before, outranks=()), *before.outranks) if before else ()
        self.values[given.name] = normalize_value(given.name, knobs()[given.name], given.value)
        self.origins[given.name] = Origin(given.place, given.value, source, outranks, file=given.file)

    def agree(self, given: RawValue, source: str, reason: str = "") -> None:
        """Take what the value of one setting says of another; it is a mistake if a source says otherwise."""
        before = self.origins.get(given.name)
        if before is None:
            self.values[given.name] = normalize_value(given.name, knobs()[given.name], given.value)
            self.origins[given.name] = Origin(given.place, given.value, source, reason=reason)
        elif not alike(self.value(given.name), typed(given.name, given.value)):
            said = f"{shortened(before.given)} ({before}), but {shortened(given.value)} ({given.place})"
            self.mistakes.append(f"{given.name} = {said}: keep one of them")

    def value(self, name: str) -> Any:
        """Return a knob's value in its type, or its default; as it was written if it is none of its type."""
        return typed(name, self.values[name]) if name in self.values else knobs()[name].default


def typed(name: str, value: Any) -> Any:
    """Return a value as its knob would hold it, or as it came if the knob refuses it."""
    try:
        return checked(name, value)
    except ValidationError:
        return value


def checked(name: str, value: Any) -> Any:
    """Return a value as its knob would hold it. Raises pydantic's ValidationError if the knob refuses it."""
    section = SECTIONS[SECTION_OF[name]]
    return getattr(section(**{name: normalize_value(name, knobs()[name], value)}), name)


def alike(one: Any, other: Any) -> bool:
    """Return whether two values are the same, numbers up to what a computer rounds."""
    both_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-9) if both_numbers else one == other
