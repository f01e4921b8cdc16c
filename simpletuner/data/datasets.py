"""What a dataset is: from flags, or from `multidatabackend.json` with the keys that users already have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from simpletuner.errors import SettingsError
from simpletuner.settings.knob import Section
from simpletuner.settings.loading import nearest
from simpletuner.settings.sections import Data, Pictures
from simpletuner.settings.spelling import normalised

LATER = "not supported by this version"
UNSUPPORTED: dict[str, str] = {
    "vae_cache_disable": LATER,
    "vae_cache_ondemand": LATER,
    "metadata_backend": LATER + " beyond `discovery`",
    "parquet": LATER,
    "probability": "every sample is seen equally often; use `repeats` to weigh datasets",
    "conditioning_data": LATER,
    "conditioning_type": LATER,
    "video": LATER,
    "audio": LATER,
    "delete_unwanted_images": "your pictures are never deleted",
    "delete_problematic_images": "your pictures are never deleted",
    "delete_nsfw_images": "your pictures are never deleted",
    "hash_filenames": "caches are keyed by content; drop this key",
    "compress_cache": LATER,
    "preserve_data_backend_cache": LATER,
    "caption_filter_list": LATER,
    "only_instance_prompt": "set caption_strategy to instanceprompt",
    "maximum_image_size": LATER,
    "target_downsample_size": LATER,
    "skip_file_discovery": "sizes are read from headers, so discovery is fast",
    "write_batch_size": "records are written one by one; nothing to tune",
    "text_embeds": "there is one text cache: the dataset of type text_embeds",
    "image_embeds": LATER,
    "csv_file": LATER,
    "dataset_name": LATER,
    "aws_bucket_name": LATER,
    "caption_shuffle": LATER,
}


class ImageDataset(Pictures):
    """A folder of pictures and how they are captioned, sized and cropped."""

    id: str
    type: Literal["local"] = "local"
    dataset_type: Literal["image"] = "image"
    instance_data_dir: Path
    disabled: bool = False
    cache_dir_vae: Path | None = None
    minimum_aspect_ratio: float | None = Field(None, gt=0)
    maximum_aspect_ratio: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def check_captions(self) -> ImageDataset:
        """Ask for the phrase that the caption strategy needs."""
        if self.caption_strategy == "instanceprompt" and not self.instance_prompt:
            raise ValueError("caption_strategy instanceprompt needs instance_prompt")
        return self


class TextEmbeds(Section):
    """Where text embeddings are cached."""

    id: str
    type: Literal["local"] = "local"
    dataset_type: Literal["text_embeds"]
    default: bool = True
    disabled: bool = False
    cache_dir: Path


def datasets_of(data: Data) -> tuple[list[ImageDataset], Path | None]:
    """Return the datasets of a run, and the text cache folder if the dataset file names one.

    Raises SettingsError that lists every mistake of the file.
    """
    if data.data_backend_config is None:
        assert data.instance_data_dir is not None
        name = data.instance_data_dir.resolve().name or "pictures"
        values = {"id": name, "instance_data_dir": data.instance_data_dir, "cache_dir_vae": data.cache_dir_vae}
        return [ImageDataset(**{**inherited(data), **values})], data.cache_dir_text
    path = data.data_backend_config
    entries = [entry for entry in read_entries(path) if not (entry.get("disabled") or entry.get("disable"))]
    mistakes: list[str] = []
    parsed = [parse_entry(f"{path}[{index}]", entry, data, mistakes) for index, entry in enumerate(entries)]
    images = [entry for entry in parsed if isinstance(entry, ImageDataset)]
    texts = [entry for entry in parsed if isinstance(entry, TextEmbeds)]
    mistakes += [f"{path}: two datasets share the id `{twice}`" for twice in duplicates([entry.id for entry in images])]
    if not images and not mistakes:
        mistakes.append(f"{path} names no dataset of pictures")
    if mistakes:
        raise SettingsError("\n  ".join(mistakes), "docs/data.md lists the keys of a dataset")
    return images, texts[0].cache_dir if texts else data.cache_dir_text


def inherited(data: Data) -> dict[str, Any]:
    """Return the global settings that a dataset falls back to."""
    return {name: getattr(data, name) for name in Pictures.model_fields}


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Read the list of datasets. Raises SettingsError with the place where it does not parse."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", "check data_backend_config") from None
    except ValueError as error:
        raise SettingsError(f"{path} does not parse: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"{path} must hold a list of datasets: [{{...}}, {{...}}]")
    return entries


def parse_entry(
    place: str, entry: Mapping[str, Any], data: Data, mistakes: list[str]
) -> ImageDataset | TextEmbeds | None:
    """Return one dataset, or None after adding its mistakes."""
    kind = TextEmbeds if entry.get("dataset_type") == "text_embeds" else ImageDataset
    values = {key: value for key, value in entry.items() if key != "disable"}
    for key in [key for key in values if key not in kind.model_fields]:
        harmless = (key, values.pop(key)) == ("metadata_backend", "discovery")
        if not harmless:
            mistakes.append(
                f"{place}: `{key}`: {UNSUPPORTED.get(key) or 'unknown key' + nearest(key, kind.model_fields)}"
            )
    values = {key: normalised(key, kind.model_fields[key], value) for key, value in values.items()}
    try:
        return kind(**{**(inherited(data) if kind is ImageDataset else {}), **values})
    except ValidationError as error:
        mistakes += [
            f"{place}: `{'.'.join(map(str, item['loc'])) or 'entry'}`: {item['msg']}" for item in error.errors()
        ]
        return None


def duplicates(names: list[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted({name for name in names if names.count(name) > 1})
