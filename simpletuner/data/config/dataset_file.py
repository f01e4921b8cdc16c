"""Read the dataset file as written: entries with their lines, so that mistakes name their place.

Keys and values of the original's dataset file that are not supported are answered here. All other keys are
fields of a dataset (`datasets.py`), which check their values themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import Mistake, SettingsError
from simpletuner.settings.declared.errors import shown_value
from simpletuner.settings.declared.table import canonical_name, plain_name
from simpletuner.settings.files.config_files import (
    FileEntry,
    NotParsed,
    check_depth,
    explain_parsing,
    file_place,
    json_mistake,
)
from simpletuner.settings.files.formats import json_lines, read_text
from simpletuner.settings.files.formats import parse_entries as parse_settings
from simpletuner.settings.foreign.key_table import Ignores, Refuses, Rule, inner_entries
from simpletuner.settings.foreign.recognition import import_hint, is_dataset_file, trainer_of
from simpletuner.settings.values.parsed import ONLY_LISTS
from simpletuner.system.files.paths import shown_path

OTHER_NAMES = {
    "disable": "disabled",
    "disable_after_epoch_step": "end_step",
    "is_regularization_data": "is_regularisation_data",
}


@dataclass(frozen=True)
class DatasetEntry:
    file: Path
    line: int
    keys: list[FileEntry]

    @classmethod
    def of(cls, values: Mapping[str, object], file: Path, line: int = 0) -> DatasetEntry:
        return cls(file, line, [FileEntry(key, value) for key, value in values.items()])

    @property
    def as_dict(self) -> dict[str, Any]:
        return {entry.key: entry.value for entry in self.keys}

    @property
    def names(self) -> dict[str, str]:
        # Dashes and case are free, as for settings.
        return {entry.key: name_of_key(entry.key) for entry in self.keys}

    def value(self, name: str) -> Any:
        """Return the value of a key; None if the entry does not have it."""
        return next((entry.value for entry in self.keys if name_of_key(entry.key) == name), None)

    def place(self, line: int = 0) -> str:
        name = self.value("id")
        where = file_place(self.file, line or self.line)
        return f"{where}, dataset `{name}`" if isinstance(name, str) and name.strip() and name.isprintable() else where

    def mistake(self, name: str, message: str, hint: str = "", show_value: bool = True) -> Mistake:
        """Mistake about a key, with the line and the spelling that the file has, if it has the key."""
        found = next((entry for entry in self.keys if name in (entry.key, name_of_key(entry.key))), None)
        if not found and "." in name:
            return self._mistake_inside(name, message, hint, show_value)
        given = shown_value(name_of_key(found.key), found.value) if found and show_value else ""
        return Mistake(found.key if found else name, message, self.place(found.line if found else 0), given, hint)

    def _mistake_inside(self, name: str, message: str, hint: str, show_value: bool) -> Mistake:
        """Mistake about a key inside another one, such as `parquet.path`, with the line of the outer one."""
        outer, _, inner = name.partition(".")
        found = next((entry for entry in self.keys if name_of_key(entry.key) == outer), None)
        values = found.value if found and isinstance(found.value, dict) else {}
        given = shown_value(inner, values[inner]) if inner in values and show_value else ""
        return Mistake(name, message, self.place(found.line if found else 0), given, hint)


def name_of_key(key: str) -> str:
    name = canonical_name(key) or plain_name(key)
    return OTHER_NAMES.get(name, name)


def dataset_entries(path: Path) -> list[DatasetEntry]:
    """Read the list of datasets. Raises SettingsError with the place where it does not parse."""
    with explain_parsing(path, "check data_backend_config", "docs/dataset-file.md shows such a file"):
        text = read_text(path)
        try:
            return list(parse_entries(path, text))
        except NotParsed:
            refuse_foreign(path, text)
            raise


def refuse_foreign(path: Path, text: str) -> None:
    if path.suffix.lower() not in (".toml", ".yaml", ".yml"):
        return
    values: dict[str, object] = {}
    with suppress(SettingsError):  # a list, or what is none of these either
        values = {each.key: each.value for each in parse_settings(path, text)}
    if trainer := trainer_of(values):
        hint = import_hint(path, is_dataset_file(values), trainer)
        raise SettingsError(f"{shown_path(path)} is a file of {trainer}", hint)
    raise SettingsError(f"{shown_path(path)} is no JSON file", "docs/dataset-file.md shows a list of datasets")


def parse_entries(path: Path, text: str) -> Iterator[DatasetEntry]:
    """Yield the datasets of a text.

    Raises NotParsed for a text that is not JSON, and SettingsError for one that is not a list of datasets.
    """
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise json_mistake(error) from None
    check_depth(entries)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        hint = "docs/dataset-file.md shows such a file"
        raise SettingsError(f"{shown_path(path)} must hold a list of datasets: [{{...}}, {{...}}]", hint)
    for entry, (line, lines) in zip(entries, json_lines(text), strict=True):
        keys = [FileEntry(key, value, lines[key]) for key, value in entry.items()]
        yield DatasetEntry(path, line, [each for key in keys for each in without_block(key)])


def without_block(entry: FileEntry) -> Iterable[FileEntry]:
    """Flatten the original's block `huggingface`, with top-level keys here; other keys stay as they are."""
    is_block = name_of_key(entry.key) == "huggingface" and isinstance(entry.value, Mapping)
    return inner_entries(entry) if is_block else [entry]


LATER = "not supported by this version"
ONE_FOR_ALL = "one value holds for all datasets: set --{}"
GONE = "your images are never deleted"
LOCAL = LATER + ": only folders (local), buckets (aws, gcs, azure) and lists of addresses (csv)"
ONLY_SNAPSHOTS = "it is for images of type huggingface"
BY_READING = "files that are new or changed are read at every start"
VERIFIED = "caches are checked record by record, and what changed is made again"
NO_COLUMN = LATER + ": only sizes, lengths and captions"
NO_CONDITIONING = LATER + ": a model is trained on images, captions, masks and reference images alone"

REASONS: dict[str, str] = {
    "ignore_epochs": LATER + ": set start_epoch, end_epoch, start_step or end_step",
    "slider_strength": LATER + ": sliders are pairs of signed datasets; train one LoRA per direction",
    "timestep_sampling_offset": LATER + ": one density of timesteps holds for all datasets",
    "train_batch_size": ONE_FOR_ALL.format("train_batch_size"),
    "text_encoder_batch_size": "captions of all datasets are encoded together: set --text_encoder_batch_size",
    **dict.fromkeys(("conditioning_image_embed_batch_size", "conditioning_image_embeds"), NO_CONDITIONING),
    "cache_dir_conditioning_image_embeds": NO_CONDITIONING,
    **dict.fromkeys(("conditioning", "conditioning_config"), NO_CONDITIONING),
    **dict.fromkeys(("grounding", "grounding_data", "distillation_type"), NO_CONDITIONING),
    **dict.fromkeys(("memory_filesystem_path", "memory_filesystem_size", "memory_filesystem_sudo"), LOCAL),
    "hf_token": "a token is read from HF_TOKEN, or from what `hf auth login` has kept",
    **dict.fromkeys(("description_column", "quality_column"), LATER + ": caption_column names the one that is read"),
    "config": "a dataset of several configs has a folder for each: name that one with dataset_name",
    **dict.fromkeys(("quality_thresholds", "filter_func"), LATER + ": all rows of a dataset are trained on"),
    "composite_image_config": LATER + ": images are taken whole",
    **dict.fromkeys(("source", "metadata", "subfolder", "webshart"), LOCAL),
    **dict.fromkeys(("webshart_optimize_captions", "webshart_optimise_captions"), LOCAL),
    "bucket_resolutions": LATER + ": buckets come from resolution and aspect_bucket_alignment",
    **dict.fromkeys(("delete_unwanted_images", "delete_problematic_images", "delete_nsfw_images"), GONE),
    "audio": "the sound of videos is trained with sound_loss_weight, from their own tracks: leave it out",
    **dict.fromkeys(("audio_column", "s2v_datasets"), LATER + ": only images and videos"),
    **dict.fromkeys(("audio_caption_fields", "lyrics_column"), LATER + ": only images and videos"),
    "is_i2v": "it belongs into the block `video`",
}  # fmt: skip

NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(("write_batch_size", "read_batch_size"), "records are written one by one; nothing to tune"),
    **dict.fromkeys(("streaming", "num_proc"), "a dataset of the hub is fetched once"),
    "image_processing_batch_size": "max_workers threads decode one image each",
    **dict.fromkeys(("metadata_update_interval", "skip_file_discovery"), BY_READING),
    **dict.fromkeys(("scan_for_errors", "vae_cache_scan_behaviour"), VERIFIED),
    **dict.fromkeys(("csv_hash_filenames", "csv_shorten_filenames"), "files are named by a hash of their address"),
    **dict.fromkeys(("hash_filenames", "cache_file_suffix"), "caches are keyed by content"),
    "disable_validation": "validation draws from text alone",
}
"""Keys that ask for the default, or for something that nobody misses."""
# Keys that have no effect here, though the original's result may depend on them.
MISSED: dict[str, str] = {
    "vae_cache_clear_each_epoch": "random crops are chosen once per image",
}

RULES: dict[str, Rule] = {
    **{key: Refuses(reason) for key, reason in REASONS.items()},
    **{key: Ignores(reason, warns=False) for key, reason in NO_EFFECT.items()},
    **{key: Ignores(reason) for key, reason in MISSED.items()},
    **{f"parquet.{key}": Refuses(NO_COLUMN) for key in ("bbox_column", "audio_duration_column", "lyrics_column")},
}

# Values that the original accepts and this program does not, by key.
VALUES: dict[str, dict[str, str]] = {
    "type": {**dict.fromkeys(("memory", "webshart"), LOCAL), **dict.fromkeys(("http", "https"), ONLY_LISTS)},
    "dataset_type": {
        "audio": LATER + ": only images and videos",
        **dict.fromkeys(("conditioning_image_embeds", "distillation_cache"), NO_CONDITIONING),
        "caption": LATER + ": captions belong to images and videos",
    },
    "conditioning_type": {
        "controlnet": NO_CONDITIONING,
        "segmentation": "write masks, white where the loss counts, and conditioning_type mask",
    },
    "caption_strategy": {"huggingface": ONLY_SNAPSHOTS, "webshart": LATER + ": name a table in `parquet`"},
    "metadata_backend": {"huggingface": ONLY_SNAPSHOTS, "webshart": LATER + ": name a table in `parquet`"},
    "crop_style": {"face": LATER},
}
