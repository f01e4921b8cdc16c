"""Datasets: from flags, or from `multidatabackend.json` with the keys that users already have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from simpletuner.data.dataset_keys import RULES, VALUES
from simpletuner.data.folders import check_id, find_nested_ids, id_of_folder
from simpletuner.errors import SettingsError
from simpletuner.settings.errors import allowed, nearest, shorten
from simpletuner.settings.file_entries import FileEntry
from simpletuner.settings.formats import read_text
from simpletuner.settings.key_table import Keeps, KeyTable, interpret
from simpletuner.settings.knob import Section
from simpletuner.settings.loading import parse_json
from simpletuner.settings.sections import Data, DatasetSettings
from simpletuner.settings.spelling import choices_of, normalize_name, normalize_value

LARGEST_PIXELS = 1 << 28
TOO_LARGE = "at most 16384x16384 px"


class ImageDataset(DatasetSettings):
    """A folder of images and how they are captioned, resized and cropped."""

    id: Annotated[str, AfterValidator(check_id)]
    type: Literal["local"] = "local"
    dataset_type: Literal["image"] = "image"
    instance_data_dir: Path
    disabled: bool = False
    cache_dir_vae: Path | None = None
    minimum_aspect_ratio: float | None = Field(None, gt=0)
    maximum_aspect_ratio: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def check_captions(self) -> ImageDataset:
        if self.caption_strategy == "instanceprompt" and not self.instance_prompt:
            raise ValueError("caption_strategy instanceprompt needs instance_prompt")
        return self

    @model_validator(mode="after")
    def check_resolution(self) -> ImageDataset:
        area = self.resolution * (1_000_000 if self.resolution_type == "area" else self.resolution)  # `**` raises
        if area > LARGEST_PIXELS:
            raise ValueError(f"resolution={self.resolution:g} ({self.resolution_type}) is too large: {TOO_LARGE}")
        return self


class TextEmbeds(Section):
    """Where text embeddings are cached: an entry of the dataset file."""

    id: str
    type: Literal["local"] = "local"
    dataset_type: Literal["text_embeds"]
    default: bool = True
    disabled: bool = False
    cache_dir: Path

    @field_validator("default")
    @classmethod
    def check_default(cls, default: bool) -> bool:
        if not default:
            raise ValueError("there is one text cache, which also holds validation prompts: drop this key")
        return default


def load_datasets(data: Data) -> tuple[list[ImageDataset], Path | None]:
    """Return the datasets of a run, and the text cache folder if the dataset file names one.

    Raises SettingsError that lists every mistake of the file.
    """
    if data.data_backend_config is None:
        assert data.instance_data_dir is not None
        name = id_of_folder(data.instance_data_dir.resolve().name)
        values = {"id": name, "instance_data_dir": data.instance_data_dir, "cache_dir_vae": data.cache_dir_vae}
        try:
            return [ImageDataset(**{**inherited(data), **values})], data.cache_dir_text
        except ValidationError as error:
            problems = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
            raise SettingsError("\n  ".join(problems), "docs/data.md says what resolution_type means") from None
    return parse_datasets(read_entries(data.data_backend_config), data.data_backend_config, data)


def parse_datasets(
    entries: Sequence[Mapping[str, Any]], path: Path, data: Data
) -> tuple[list[ImageDataset], Path | None]:
    """Return the datasets of a file, and its text cache. Raises SettingsError that lists every mistake."""
    mistakes: list[str] = []
    enabled = [entry for entry in entries if not is_disabled(entry)]
    parsed = [parse_entry(f"{path}[{index}]", entry, data, mistakes) for index, entry in enumerate(enabled)]
    images = [entry for entry in parsed if isinstance(entry, ImageDataset)]
    texts = [entry for entry in parsed if isinstance(entry, TextEmbeds)]
    ids = [entry.id for entry in images]
    mistakes += [f"{path}: two datasets share the id `{twice}`" for twice in duplicates(ids)]
    sharing_root = [entry.id for entry in images if entry.cache_dir_vae is None]
    mistakes += [f"{path}: {problem}" for problem in find_nested_ids(sharing_root)]
    if len(texts) > 1:
        mistakes.append(
            f"{path}: {len(texts)} datasets of type text_embeds: there is one text cache, leave the others out"
        )
    if not images and not mistakes:
        mistakes.append(f"{path} names no dataset of images")
    if mistakes:
        raise SettingsError("\n  ".join(mistakes), "docs/data.md lists the keys of a dataset")
    return images, texts[0].cache_dir if texts else data.cache_dir_text


def is_disabled(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("disabled") or entry.get("disable"))


def inherited(data: Data) -> dict[str, Any]:
    """Return the global settings that a dataset falls back to."""
    return {name: getattr(data, name) for name in DatasetSettings.model_fields}


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Read the list of datasets. Raises SettingsError with the place where it does not parse."""
    try:
        entries = parse_json(read_text(path))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", "check data_backend_config") from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"{path} does not parse: {error}", json_hint(error)) from None
    except ValueError as error:
        raise SettingsError(f"{path} does not parse: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"{path} must hold a list of datasets: [{{...}}, {{...}}]")
    return entries


def json_hint(error: json.JSONDecodeError) -> str:
    """Return what is wrong with JSON where people write it by hand."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    comma = (before + after[:1]).replace(" ", "")[-2:]
    if comma in (",]", ",}") or re.match(r",\s*[\]}]", error.doc[error.pos :]):
        return "JSON allows no comma before a closing bracket: take it away"
    if after.startswith(("//", "/*", "#")):
        return "JSON has no comments: take it away"
    return "JSON takes double quotes, true, false and null, and a comma between entries"


def parse_entry(
    place: str, entry: Mapping[str, Any], data: Data, mistakes: list[str]
) -> ImageDataset | TextEmbeds | None:
    """Return one dataset, or None after adding its mistakes."""
    dataset, problems = read_entry(entry, data)
    mistakes += [f"{place}: `{key}`{problem}" for key, problem in problems]
    return dataset


def read_entry(entry: Mapping[str, Any], data: Data) -> tuple[ImageDataset | TextEmbeds | None, list[tuple[str, str]]]:
    """Return one dataset, or None, and what is wrong with which of its keys."""
    kind = TextEmbeds if entry.get("dataset_type") == "text_embeds" else ImageDataset
    fields = kind.model_fields
    table = KeyTable(RULES | dict.fromkeys(fields, Keeps()), unset=(), is_off=lambda value: False)
    problems: list[tuple[str, str]] = []
    values: dict[str, Any] = {}
    for found in interpret(table, [FileEntry(key, value) for key, value in entry.items()]):
        if found.outcome == "kept":
            values[found.key] = found.value
        elif found.outcome != "neutral":
            problems.append((found.path, f": {found.note or 'unknown key' + nearest(found.path, fields)}"))
    values = {key: normalize_value(key, fields[key], value) for key, value in values.items()}
    try:
        return kind(**{**(inherited(data) if kind is ImageDataset else {}), **values}), problems
    except ValidationError as error:
        return None, problems + [problem_of(item, fields) for item in error.errors()]


def problem_of(item: Any, fields: Mapping[str, FieldInfo]) -> tuple[str, str]:
    """Return a key of a dataset and what is wrong with it."""
    key = str(item["loc"][0]) if item["loc"] else "entry"
    if item["type"] == "missing":
        return key, ": is missing"
    if item["type"] == "value_error":
        return key, f": {item['ctx']['error']}"
    value = item["input"]
    reason = VALUES.get(key, {}).get(normalize_name(value), "") if isinstance(value, str) else ""
    close = nearest(str(value), map(str, choices_of(fields[key].annotation)))
    return key, f" = {shorten(value)}: {f'{reason}; ' if reason else ''}use {allowed(fields[key])}{close}"


def duplicates(names: list[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted({name for name in names if names.count(name) > 1})
