"""Make a dataset file of the original one of ours: what this version refuses is left out, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.data.config.dataset_file import NO_EFFECT, RULES, DatasetEntry, name_of_key
from simpletuner.data.config.dataset_parsing import BLOCKS, DatasetFile, is_disabled, parse_datasets, parse_entry
from simpletuner.data.config.dataset_parts import PARQUET
from simpletuner.data.config.dataset_types import as_list
from simpletuner.errors import Mistake, SettingsError
from simpletuner.importing.folders import has_caches
from simpletuner.importing.foreign_trainer import CACHES
from simpletuner.importing.original import Effect, UnmappedValue
from simpletuner.importing.sorting import relocated
from simpletuner.settings.declared.errors import is_secret
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.foreign.key_table import Ignores
from simpletuner.settings.foreign.original_names import TABLE, is_off
from simpletuner.settings.values.spelling import normalize_name

PATHS = ("instance_data_dir", "cache_dir", "cache_dir_vae", "csv_file", "csv_cache_dir", "caption_filter_list")
CACHE_FOLDERS = ("cache_dir", "cache_dir_vae")
HINT = "docs/dataset-file.md lists the keys of a dataset"
# Keys without which an entry would be another dataset.
ESSENTIAL = (
    "id",
    "type",
    "dataset_type",
    "instance_data_dir",
    "aws_bucket_name",
    "gcs_bucket_name",
    "azure_container_name",
    "csv_file",
    "csv_cache_dir",
    "dataset_name",
    "instance_prompt",
    "resolution",
)
BUCKETS = ("aws", "gcs", "azure")
"""Values of `type` with which the path of a table is that of an object."""
NOT_COPIED = "a secret is not copied: write it into the new file, or use the environment or a profile in ~/.aws"
HARMLESS = ("image_embeds", "default", "cache_dir", *NO_EFFECT)
"""Keys without an effect here, besides settings of the same name without one."""
# Keys that do not change what is trained on.
KEEPS_RESULT = (
    *("vae_cache_clear_each_epoch", "delete_unwanted_images", "delete_problematic_images", "delete_nsfw_images"),
    *("text_encoder_batch_size", "conditioning_image_embed_batch_size", "streaming", "num_proc", "hf_token"),
    "parquet.audio_duration_column",
)
KEEPS_ZERO = ("repeats", "crop", "disabled", "disable", "prepend_instance_prompt", "default")


@dataclass(frozen=True)
class ImportedDatasets:
    """The entries of the new file, and what is left out of the original's."""

    entries: list[dict[str, Any]]
    left_out: list[UnmappedValue]
    is_changed: bool


def import_datasets(
    entries: Sequence[DatasetEntry], path: Path, data: Data, root: Path, names: Mapping[str, str]
) -> ImportedDatasets:
    """Return the entries that can be trained on. `names` are what `{name}` in a path stands for.

    Raises SettingsError where none is left, or where the datasets do not fit together.
    """
    left_out: list[UnmappedValue] = []
    found = [import_entry(entry, data, root, names, left_out) for entry in entries]
    taken = [new for new in found if new is not None]
    paired = {str(new.get("id")) for new in taken if "conditioning_type" in new}
    for entry, new in zip(entries, found, strict=True):
        wanted = as_list(new.get("conditioning_data")) if new is not None else None
        if new is not None and wanted and (gone := [each for each in wanted if each not in paired]):
            why = f"dataset `{gone[0]}` is left out"
            left_out.append(
                UnmappedValue("conditioning_data", new.pop("conditioning_data"), entry.place(), why, "lost")
            )
    if not any(entry.get("dataset_type", "image") in ("image", "video") for entry in taken):
        reasons = [f"\n  {item}" for item in left_out if item.name in ESSENTIAL]
        raise SettingsError(
            f"{path} has no dataset of images or videos that this version can train on{''.join(reasons)}", HINT
        )
    parse_datasets([DatasetEntry.of(entry, path) for entry in taken], path, data).check()
    return ImportedDatasets(taken, left_out, taken != [entry.as_dict for entry in entries])


def import_entry(
    entry: DatasetEntry, data: Data, root: Path, names: Mapping[str, str], left_out: list[UnmappedValue]
) -> dict[str, Any] | None:
    """Return an entry without what is refused; None, with the reason, where the dataset itself is."""
    old, place = entry.as_dict, entry.place()
    if is_disabled(entry):
        left_out.append(UnmappedValue("disabled", True, place, "it is left out of the run there, too", "none"))
        return None
    new = {key: value for key, value in old.items() if key in (*ESSENTIAL, *KEEPS_ZERO) or not is_off(value)}
    for key in PATHS:
        if isinstance(new.get(key), str):
            new[key] = relocated(fill_in(new[key], {**names, **texts_of(old)}), root)
    new |= {name: dict(new[name]) for name in BLOCKS if isinstance(new.get(name), dict)}
    path = new[PARQUET].get("path") if isinstance(new.get(PARQUET), dict) else None
    if isinstance(path, str) and normalize_name(new.get("type")) not in BUCKETS:
        new[PARQUET]["path"] = relocated(fill_in(path, {**names, **texts_of(old)}), root)
    cached = [key for key in CACHE_FOLDERS if has_caches(new.get(key))]
    left_out += [UnmappedValue(key, new[key], place, CACHES) for key in cached]
    idle = {key: rule for key in new if isinstance(rule := RULES.get(name_of_key(key)), Ignores)}
    left_out += [UnmappedValue(key, new.pop(key), place, rule.reason, effect_of(key)) for key, rule in idle.items()]
    # In rounds: without a key, another one may be the mistake.
    while problems := problems_of(new, entry, data):
        # Without an essential key, or with one that is missing, nothing is left to take.
        fatal = next((each for each in problems if each.setting in ESSENTIAL or not has_key(new, each.setting)), None)
        for problem in [fatal] if fatal else problems:
            key = problem.setting
            hint = f"; {problem.hint}" if problem.hint else ""
            reason = f"{problem.message}{hint}" + (f"; dataset `{old.get('id')}` is left out" if fatal else "")
            (given, name), (holder, _) = holder_of(old, key), holder_of(new, key)
            left_out.append(UnmappedValue(key, given.get(name), place, reason, "lost" if fatal else effect_of(key)))
            holder.pop(name, None)
        if fatal:
            return None
    left_out += [UnmappedValue(key, new.pop(key), place, NOT_COPIED) for key in [*new] if is_secret(key)]
    return new


def holder_of(values: dict[str, Any], key: str) -> tuple[dict[str, object], str]:
    """Mapping that holds a key, and the key's name in it: `parquet.path` is inside of `parquet`."""
    outer, _, inner = key.partition(".")
    is_inner = inner and key not in values and isinstance(values.get(outer), dict)
    return (values[outer], inner) if is_inner else (values, key)


def has_key(values: dict[str, object], key: str) -> bool:
    holder, name = holder_of(values, key)
    return name in holder


def problems_of(values: Mapping[str, object], entry: DatasetEntry, data: Data) -> list[Mistake]:
    parsed = DatasetFile()
    parse_entry(DatasetEntry.of(values, entry.file, entry.line), data, parsed)
    return parsed.mistakes


def effect_of(key: str) -> Effect:
    if key in HARMLESS or isinstance(TABLE.rules.get(key), Ignores):
        return "none"
    return "look" if key in KEEPS_RESULT else "lost"


def texts_of(entry: Mapping[str, object]) -> dict[str, str]:
    return {key: value for key, value in entry.items() if isinstance(value, str)}


def fill_in(path: str, names: Mapping[str, str]) -> str:
    # Other braces stay, such as `{env:HOME}`.
    return re.sub(r"\{([^{}]+)\}", lambda found: names.get(found[1], found[0]), path)
