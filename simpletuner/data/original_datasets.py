"""Make a dataset file of the original one of ours: what this version refuses is left out, with the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.data.datasets import is_disabled, parse_datasets, read_entry
from simpletuner.errors import SettingsError
from simpletuner.settings.key_table import Ignores
from simpletuner.settings.original import TABLE, is_off
from simpletuner.settings.original_import import LeftOut, relocated
from simpletuner.settings.sections import Data
from simpletuner.settings.spelling import normalize_name

PATHS = ("instance_data_dir", "cache_dir", "cache_dir_vae")
ESSENTIAL = ("entry", "id", "type", "dataset_type", "instance_data_dir", "instance_prompt", "resolution")
"""Keys without which an entry would be another dataset."""
HARMLESS = (
    *("text_embeds", "image_embeds", "hash_filenames", "vae_cache_clear_each_epoch", "compress_cache"),
    *("scan_for_errors", "probability", "read_batch_size", "default", "cache_dir"),
)
"""Keys that change nothing here, besides those whose setting of the same name has no effect."""
KEEPS_ZERO = ("repeats", "crop", "disabled", "disable", "prepend_instance_prompt", "default")


@dataclass(frozen=True)
class ImportedDatasets:
    """The entries of the new file, and what is left out of the original's."""

    entries: list[dict[str, Any]]
    left_out: list[LeftOut]
    is_changed: bool


def import_datasets(
    entries: Sequence[Mapping[str, Any]], path: Path, data: Data, root: Path, names: Mapping[str, str]
) -> ImportedDatasets:
    """Return the entries that can be trained on. `names` are what `{name}` in a path stands for.

    Raises SettingsError where none is left, or where the datasets do not fit together.
    """
    left_out: list[LeftOut] = []
    taken = [
        new
        for index, entry in enumerate(entries)
        if (new := import_entry(entry, f"{path}[{index}]", data, root, names, left_out)) is not None
    ]
    taken = with_one_text_cache(taken, path, left_out)
    if not any(entry.get("dataset_type", "image") == "image" for entry in taken):
        reasons = [f"\n  {item}" for item in left_out if item.name in ESSENTIAL]
        raise SettingsError(f"{path} has no dataset of images that this version can train on{''.join(reasons)}")
    parse_datasets(taken, path, data)
    return ImportedDatasets(taken, left_out, taken != list(entries))


def import_entry(
    entry: Mapping[str, Any], place: str, data: Data, root: Path, names: Mapping[str, str], left_out: list[LeftOut]
) -> dict[str, Any] | None:
    """Return an entry without what is refused; None, with the reason, where the dataset itself is."""
    if is_disabled(entry):
        left_out.append(LeftOut("disabled", True, place, "it is left out of the run there, too", needs_look=False))
        return None
    new = {key: value for key, value in entry.items() if key in (*ESSENTIAL, *KEEPS_ZERO) or not is_off(value)}
    for key in PATHS:
        if isinstance(new.get(key), str):
            new[key] = relocated(fill_in(new[key], {**names, **texts_of(entry)}), root)
    if normalize_name(new.pop("only_instance_prompt", "")) == "true":
        new["caption_strategy"] = "instanceprompt"
    while problems := read_entry(new, data)[1]:
        # Without an essential key, or with one that is missing, nothing is left to take.
        fatal = next((problem for problem in problems if problem[0] in ESSENTIAL or problem[0] not in new), None)
        for key, problem in [fatal] if fatal else problems:
            reason = problem.partition(": ")[2] + (f"; dataset `{entry.get('id')}` is left out" if fatal else "")
            left_out.append(LeftOut(key, entry.get(key), place, reason, asks(key)))
            new.pop(key, None)
        if fatal:
            return None
    return new


def asks(key: str) -> bool:
    """Whether a refused key asks for something."""
    return key not in HARMLESS and not isinstance(TABLE.rules.get(key), Ignores)


def texts_of(entry: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in entry.items() if isinstance(value, str)}


def fill_in(path: str, names: Mapping[str, str]) -> str:
    """Replace `{model_family}`, `{env:HOME}` and the like as the original does; other braces stay."""
    values = {**names, **{f"env:{name}": value for name, value in os.environ.items()}}
    return re.sub(r"\{([^{}]+)\}", lambda found: values.get(found[1], found[0]), path)


def with_one_text_cache(entries: list[dict[str, Any]], path: Path, left_out: list[LeftOut]) -> list[dict[str, Any]]:
    """Keep one text cache: the default one."""
    texts = [entry for entry in entries if entry.get("dataset_type") == "text_embeds"]
    kept = next((entry for entry in texts if entry.get("default") is True), texts[0] if texts else None)
    others = [entry for entry in texts if entry is not kept]
    left_out += [
        LeftOut("id", entry.get("id"), str(path), "there is one text cache", needs_look=False) for entry in others
    ]
    return [entry for entry in entries if not any(entry is other for other in others)]
