"""Explain settings: the value of each, where it came from, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simpletuner.settings.declared.optimizer_defaults import own_defaults
from simpletuner.settings.declared.sections import Settings, setting_fields
from simpletuner.settings.files.raw_values import Origin
from simpletuner.settings.resolving.loading import NO_ORIGIN, Loaded, settings_as_json
from simpletuner.settings.values.spelling import as_text, normalize_name


@dataclass(frozen=True)
class ExplainedSetting:
    """A setting with its value, its source, and why that won."""

    name: str
    value: Any
    default: Any
    origin: str
    because: str

    @property
    def is_set(self) -> bool:
        """Return whether a source gives it, or it is not at its default."""
        return self.origin != str(NO_ORIGIN) or self.value != self.default

    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table."""
        is_auto = self.value is None and setting_fields()[self.name].annotation == bool | None
        return self.name, "auto" if is_auto else as_text(self.value), self.origin, self.because

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "default": self.default, "from": self.origin, "because": self.because}


def explain_settings(loaded: Loaded) -> Iterator[ExplainedSetting]:
    """Explain every setting, in the order of the sections."""
    defaults = settings_as_json(Loaded(Settings(), {}))
    optimizer = loaded.settings.optimizer.optimizer
    own = own_defaults(optimizer)
    own_origin = Origin("default", None, reason=f"{optimizer}'s own")
    for name, value in settings_as_json(loaded).items():
        origin = loaded.origins.get(name, own_origin if name in own else NO_ORIGIN)
        default = own.get(name, defaults[name])
        yield ExplainedSetting(name, value, default, str(origin), because(value, origin))


def because(value: Any, origin: Origin) -> str:
    """Say why a value is as it is: another spelling, a rule, weaker sources."""
    reasons = [origin.reason] if origin.reason else []
    respelled = isinstance(origin.given, str) and isinstance(value, str) and origin.given != value
    if not reasons and respelled and normalize_name(origin.given) != normalize_name(value):
        reasons.append(f"written `{origin.given}`")
    reasons += [f"outranks {weaker} (= {as_text(weaker.given)})" for weaker in origin.outranks]
    return "; ".join(reasons)
