"""A config file with what a person has typed over it, as a source of settings.

Nothing is kept between requests: what was typed comes with each of them, and the file is read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from simpletuner.errors import SettingsError
from simpletuner.runs.folder import Folders, is_of_run
from simpletuner.settings import Loaded
from simpletuner.settings.declared.errors import is_secret, shorten
from simpletuner.settings.declared.knob import kind_of
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.editors.editing import change_text, setting_of, text_of
from simpletuner.settings.editors.text_editors import REMOVED
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG
from simpletuner.settings.files.formats import parse_entries
from simpletuner.settings.files.raw_values import RawValue, Source, file_of_reference
from simpletuner.settings.resolving.loading import parse_json, resolve, without_point
from simpletuner.settings.resolving.sources import collect_sources, is_accelerate_config, validate_value
from simpletuner.settings.values.spelling import WORDS_FOR_NOTHING, choices_of, normalize_name, parse_list
from simpletuner.system.files.checksums import value_checksum
from simpletuner.system.files.paths import shown_path

# The place of a value that is not saved yet.
TYPED = "this page"
READ_AS_TEXT = ("data_backend_config", "validation_prompt_file")
"""Settings whose files the checks read, in addition to tables."""


@dataclass(frozen=True)
class Document:
    """A config file on disk, and the fields that differ from it; an empty field removes the setting."""

    path: Path
    """Path in messages: relative to the current folder where it is below it."""
    text: str
    typed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folders: Folders, name: str, typed: Mapping[str, str] | None = None) -> Document:
        """Raises SettingsError for a file outside the folders, in a run's folder, or that does not parse."""
        path = folders.resolve(name)
        if is_of_run(folders, path):
            hint = "copy it to where your own files are"
            raise SettingsError(f"{shorten(name)} is in the folder of a run, which may be somebody else's", hint)
        return cls(Path(folders.shown(path)), text_of(path), typed or {})

    @property
    def checksum(self) -> str:
        return value_checksum({}, self.text.encode())

    @cached_property
    def values(self) -> dict[str, Any]:
        entries = parse_entries(self.path, self.text.removeprefix("\ufeff"))
        named = [(setting_of(self.path, entry), entry.value) for entry in reversed(entries)]
        return {name: value for name, value in named if name is not None}

    @cached_property
    def changes(self) -> dict[str, object]:
        """Return the typed changes, converted to the types of the settings where they are valid."""
        return {name: parse_typed(name, text) for name, text in self.typed.items()}

    def changed_text(self) -> str:
        """Return the file's text with the changes. Raises SettingsError where it cannot be edited safely."""
        return change_text(self.path, self.text, self.changes)

    def sources(self, environment: Mapping[str, str]) -> list[Source]:
        """All sources of a run with this file, weakest first; changes replace the file's values."""
        name = shown_path(self.path)
        return [
            replace(source, values=self._changed(source.values)) if source.name == name else source
            for source in collect_sources({}, self.path, environment)
        ]

    def _changed(self, values: list[RawValue]) -> list[RawValue]:
        kept = [given for given in values if canonical_name(given.name) not in self.changes]
        typed = [
            RawValue(name, value, TYPED, written=self.typed[name])
            for name, value in self.changes.items()
            if value is not REMOVED
        ]
        return kept + typed


def parse_typed(name: str, text: str) -> object:
    """Convert a field's text to what a file holds; what is not valid stays text, for the mistake about it."""
    annotation = setting_fields()[name].annotation
    if not text.strip():
        return REMOVED
    if get_origin(annotation) is list:
        # An empty line is no item; a list that has one is shown, and typed, as JSON.
        lines = [line for line in text.split("\n") if line.strip()]
        return parse_list(text) if text.lstrip().startswith("[") else lines
    kind = kind_of(annotation)
    if kind is dict:
        return parse_table(text.strip())
    if annotation == bool | None and normalize_name(text) == "auto":
        return "auto"
    try:
        value = validate_value(name, text.strip())
    except ValidationError:
        return text.strip()
    # Text and paths stay as typed: `~` and {env:NAME} mean something else on another machine.
    is_plain = value is None or kind in (bool, int, float) or choices_of(annotation)
    return without_point(value) if is_plain else text.strip()


def parse_table(text: str) -> object:
    """Return a JSON object, or the path or pairs that were typed instead."""
    try:
        return parse_json(text) if text.startswith("{") else text
    except ValueError:
        return text


def holds_table(name: str) -> bool:
    return name in setting_fields() and kind_of(setting_fields()[name].annotation) is dict


def load_document(
    document: Document, folders: Folders, environment: Mapping[str, str], complete: bool = False
) -> Loaded:
    """Return the settings of a document, which may be incomplete unless `complete`.

    Raises SettingsError that lists every mistake.
    """
    find_outside(document, folders)
    return resolve(document.sources(environment), complete=complete)


def find_outside(document: Document, folders: Folders) -> dict[str, SettingsError]:
    """Typed settings that name a file outside the folders. Raises SettingsError if the file itself does."""
    outside = dict(named_outside(document, folders))
    if in_file := [error for name, error in outside.items() if name not in document.typed]:
        raise in_file[0]  # the settings layer would read it
    return outside


def named_outside(document: Document, folders: Folders) -> Iterator[tuple[str, SettingsError]]:
    """Yield the settings that name a file to be read which is not in the folders, with the sentence."""
    entries = parse_entries(document.path, document.text.removeprefix("\ufeff"))
    accelerate = [(ACCELERATE_CONFIG, entry.value) for entry in entries if is_accelerate_config(entry.key)]
    for name, value in [*accelerate, *(document.values | document.changes).items()]:
        if isinstance(value, str) and (file := read_for(name, value)):
            try:
                folders.resolve(file)
            except SettingsError as error:
                yield name, error


def read_for(name: str, value: str) -> str:
    """File that the settings layer or a check would read for a setting's text; empty where there is none."""
    if normalize_name(value) in WORDS_FOR_NOTHING:
        return ""
    if is_secret(name):
        return str(file_of_reference(value) or "")
    is_table_itself = value.lstrip().startswith("{") or (name == "model_families" and "=" in value)
    return value if (holds_table(name) and not is_table_itself) or name in (*READ_AS_TEXT, ACCELERATE_CONFIG) else ""


def shown_value(value: object) -> str:
    """Write a value of a file into a field, from which `parse_typed` reads the same."""
    if isinstance(value, list):
        texts = [item if isinstance(item, str) else json.dumps(item) for item in value]
        is_odd = any("\n" in text or not text.strip() for text in texts) or "".join(texts[:1]).lstrip().startswith("[")
        return json.dumps(value, ensure_ascii=False) if texts != value or not value or is_odd else "\n".join(texts)
    if isinstance(value, dict):
        return json.dumps(value, indent=2, ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool) else "none" if value is None else str(value)
