"""Explain every setting: its value, where it came from, and why it won."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simpletuner.settings.export import as_text
from simpletuner.settings.loading import Loaded, Origin, knobs, settings_as_json
from simpletuner.settings.spelling import normalize_name

NO_ORIGIN = Origin("default", None)


@dataclass(frozen=True)
class Row:
    """One setting, explained."""

    name: str
    value: Any
    default: Any
    origin: str
    because: str

    def cells(self) -> tuple[str, str, str, str]:
        """Return the row of a table."""
        return self.name, as_text(self.value), self.origin, self.because

    def as_json(self) -> dict[str, Any]:
        """Return the row for scripts."""
        return {"value": self.value, "default": self.default, "from": self.origin, "because": self.because}


def explain_settings(loaded: Loaded) -> Iterator[Row]:
    """Yield every setting, in the order of the sections."""
    defaults = {name: as_json(field.default) for name, field in knobs().items()}
    for name, value in settings_as_json(loaded).items():
        origin = loaded.origins.get(name, NO_ORIGIN)
        yield Row(name, value, defaults[name], str(origin), because(value, origin))


def as_json(value: Any) -> Any:
    """Return a default as JSON holds it."""
    return value if value is None or isinstance(value, bool | int | float | str | list | dict) else str(value)


def because(value: Any, origin: Origin) -> str:
    """Say why a value is as it is: another spelling, a rule, weaker sources."""
    reasons = [origin.reason] if origin.reason else []
    respelled = isinstance(origin.given, str) and isinstance(value, str) and origin.given != value
    if not reasons and respelled and normalize_name(origin.given) != normalize_name(value):
        reasons.append(f"written `{origin.given}`")
    reasons += [f"outranks {weaker} (= {as_text(weaker.given)})" for weaker in origin.outranks]
    return "; ".join(reasons)
