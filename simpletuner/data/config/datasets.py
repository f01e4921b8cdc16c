"""Datasets: of flags here, of `multidatabackend.json` in `dataset_parsing.py`, which most starts do not import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from simpletuner.data.config.dataset_types import (
    ImageDataset,
    LocalImages,
)
from simpletuner.data.config.embeds import (
    TextEmbeds,
    compression,
    default_texts,
)
from simpletuner.data.config.places import id_of_folder
from simpletuner.errors import SettingsError
from simpletuner.settings.declared.sections import Data, DatasetSettings


def load_datasets(data: Data, model_type: str = "lora") -> tuple[list[ImageDataset], list[TextEmbeds]]:
    """Return the datasets of a run, and its caches of text embeddings, the default one first.

    With `model_type` full, regularisation data is a mistake: there is no base model left to compare with.

    Raises SettingsError that lists every mistake of the file.
    """
    if data.data_backend_config is None:
        assert data.instance_data_dir is not None
        name = id_of_folder(data.instance_data_dir.resolve().name)
        values = {"id": name, "instance_data_dir": data.instance_data_dir, "cache_dir_vae": data.cache_dir_vae}
        try:
            return [LocalImages(**{**inherited(data), **values})], [default_texts(data)]
        except ValidationError as error:
            problems = [" ".join([*map(str, item["loc"]), reason_of(item)]) for item in error.errors()]
            raise SettingsError(
                "\n  ".join(problems),
                "docs/dataset-file.md says what they mean",
            ) from None
    from simpletuner.data.config.dataset_parsing import read_datasets

    datasets, texts = read_datasets(data.data_backend_config, data, model_type)
    return datasets, texts or [default_texts(data)]


def data_facts(datasets: Iterable[ImageDataset]) -> dict[str, bool]:
    """Facts about the datasets that conditions of settings (`when=`) refer to."""
    datasets = list(datasets)
    conditioning = [each for dataset in datasets for each in dataset.conditioning]
    return {
        "references": any(each.are_references for each in conditioning),
        # Where a dataset does not say, the model decides.
        "first_frames": any(each.clips is not None and each.clips.is_i2v is not False for each in datasets),
        "masks": any(each.are_masks for each in conditioning),
        "eval_dataset": any(each.dataset_type == "eval" for each in datasets),
    }


def inherited(data: Data) -> dict[str, object]:
    """Return the global settings that a dataset falls back to."""
    return {name: getattr(data, name) for name in DatasetSettings.model_fields} | compression(data)


def reason_of(item: Any) -> str:
    return str(item.get("ctx", {}).get("error", item["msg"]))
