"""Values as they were written, and the sources that they stand in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.errors import Mistake
from simpletuner.settings.files.file_entries import FileEntry, file_place
from simpletuner.settings.files.secret_values import file_reference


@dataclass(frozen=True)
class RawValue:
    """A value as it was written."""

    name: str
    value: Any
    place: str
    file: str = ""
    """The JSON file that was read for the value, if there was one."""
    written: Any = None
    """Value for messages, from which `value` was converted."""
    reference: str = ""
    """Reference that replaces a secret value: `{env:NAME}` or `{file:PATH#KEY}`."""

    @property
    def as_written(self) -> Any:
        return self.value if self.written is None else self.written


@dataclass(frozen=True)
class Source:
    """A source of settings; `warnings` name what it holds that is not used."""

    name: str
    values: list[RawValue]
    warnings: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    needs_ranks: str = ""
    """Place of a request for several ranks without their number."""
    implicit: bool = False
    """Found rather than named by the user: the run's summary says what it decided."""
    is_file: bool = False
    """A config file or config.env, which may be one of the original's."""
    is_outranked: bool = False
    """config/config.env where a config file is named: what is no setting in it is a warning."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of other programs in config.env, which ranks are given."""
    left_out: list[RawValue] = field(default_factory=list)
    """Another program's values of keys that its file leaves out."""


def raw_value(path: Path, entry: FileEntry) -> RawValue:
    place, reference = file_place(path, entry.line), file_reference(path, entry.key)
    return RawValue(entry.key, entry.value, place, written=entry.written, reference=reference)


@dataclass(frozen=True)
class Origin:
    """Origin of a value: its place, the text there, and the values that it outranked."""

    place: str
    given: Any
    """Of a secret, a reference to it."""
    source: str = ""
    outranks: tuple[Origin, ...] = ()
    reason: str = ""
    file: str = ""
    """The JSON file that the value was read from, where a source only names one."""

    def __str__(self) -> str:
        return self.place
