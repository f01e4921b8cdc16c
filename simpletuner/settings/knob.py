"""One line per knob: from it come the flag, the file key, validation, help, and `settings.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


def knob(default: Any, sentence: str, *, unit: str = "", aliases: tuple[str, ...] = (), **bounds: float) -> Any:
    """Declare a setting: its default, what it does, its unit, older names, and bounds (`ge`, `gt`, `le`, `lt`)."""
    return Field(default, description=sentence, json_schema_extra={"unit": unit, "aliases": list(aliases)}, **bounds)  # pyright: ignore[reportCallIssue, reportArgumentType]


def extra_of(field: FieldInfo, name: Literal["unit", "aliases"]) -> Any:
    """Return what a knob's declaration adds to pydantic's: its unit, or its older names."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


class Section(BaseModel):
    """A group of knobs that one part of the program is given; frozen, and strict about unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
