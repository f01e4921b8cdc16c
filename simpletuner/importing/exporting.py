"""Write a run as a file of another trainer: what its own import reads back decides what the file says.

A writer makes the parts of a file that no table holds: model, network, noise levels, folders. Values that
differ after this file is read back are written by the trainer's table of keys; what differs still cannot be
said there. So a file is as true as the import, which has the trainer's meanings and defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.foreign_trainer import ForeignTrainer, Translation
from simpletuner.importing.original import Original
from simpletuner.importing.sorting import ALSO_ASIDE, ASIDE, take_translated
from simpletuner.importing.toml_document import sources_of
from simpletuner.models.catalog.registry import repository_named
from simpletuner.models.catalog.support import family_defaults
from simpletuner.settings.declared.sections import SECTION_OF, Settings
from simpletuner.settings.foreign.key_table import Maps, put
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.resolving.loading import Loaded, resolve, settings_as_json
from simpletuner.settings.values.spelling import normalize_name

Values = dict[str, Any]
ELSEWHERE = {"model_flavour", "pretrained_model_name_or_path", "output_dir", "data_backend_config", "instance_data_dir"}
"""Settings that are compared otherwise, or name a folder of this run."""
OF_DATA = ("repeats", "resolution", "resolution_type", "crop", "crop_style", "crop_aspect", "caption_strategy")
OF_DATA += ("caption_lines", "skip_uncaptioned", "instance_prompt", "caption_dropout_probability", "minimum_image_size")
"""Settings that an entry of a dataset has for itself."""
NOWHERE = Path("exported")


@dataclass
class ForeignRun:
    """A run as another trainer has it: its file, its dataset file, and what neither says."""

    values: Values
    keys: Values
    """Table within `values` that keys of the run stand in."""
    datasets: Values = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    """Settings that the writer has said in words which are read back as others of the same meaning."""
    unsaid: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Writer:
    trainer: ForeignTrainer
    write: Callable[[Settings, Sequence[Mapping[str, Any]]], ForeignRun]
    """Makes what the table of keys cannot: model, network, noise levels, folders."""
    suffix: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of settings that functions of meaning read; empty for those of which the trainer has none."""

    def key_of(self, setting: str) -> str:
        rules = self.trainer.table.rules.items()
        named = (key for key, rule in rules if isinstance(rule, Maps) and rule.setting == setting)
        return self.keys[setting] if setting in self.keys else next(named, "")


def foreign_run(writer: Writer, loaded: Loaded, entries: Sequence[Mapping[str, object]]) -> ForeignRun:
    """Return a run in another trainer's words. Raises SettingsError for a model that it does not train."""
    ours = comparable(loaded)
    entries, others = trained_folders(entries)
    run = writer.write(with_family_defaults(loaded).settings, entries)
    theirs, _ = read_back(writer, run, ours)
    for name in differing(ours, theirs):
        if (key := writer.key_of(name)) and ours[name] is not None:
            put(run.keys, key, ours[name])
    theirs, found = read_back(writer, run, ours)
    wrong = [name for name in differing(ours, theirs) if name not in run.said]
    run.unsaid += [f"{name} = {json.dumps(ours[name])}: it would be {json.dumps(theirs[name])}" for name in wrong]
    if (base := theirs["pretrained_model_name_or_path"]) and base != repository_named(loaded.settings.model):
        run.unsaid.append(f"the base model: it would be {base}")
    run.unsaid += [*unsaid_of(entries, found, ours, theirs), *others]
    return run


def trained_folders(entries: Sequence[Mapping[str, object]]) -> tuple[list[Mapping[str, object]], list[str]]:
    """Return the datasets that are folders of images, and a sentence on each other one that a run uses.

    As a folder, masks and held-out images would be trained on. Raises SettingsError without any left.
    """
    used = [entry for entry in entries if is_off(entry.get("disabled"))]
    kinds = [normalize_name(entry.get("dataset_type") or "image") for entry in used]
    folders = [
        entry for entry, kind in zip(used, kinds, strict=True) if kind == "image" and entry.get("instance_data_dir")
    ]
    others = [
        f"dataset `{entry.get('id')}` ({'no folder' if kind == 'image' else kind}): folders of images alone are written"
        for entry, kind in zip(used, kinds, strict=True)
        if entry not in folders
    ]
    if not folders:
        raise SettingsError("no dataset of this run is a folder of images", "name one with --instance_data_dir")
    return folders, others


def with_family_defaults(loaded: Loaded) -> Loaded:
    """Return settings with the family's values for empty ones: there, silence is another value."""
    settings = loaded.settings
    for name, (value, _) in family_defaults(settings).items():
        section = getattr(settings, SECTION_OF[name]).model_copy(update={name: value})
        settings = settings.model_copy(update={SECTION_OF[name]: section})
    return replace(loaded, settings=settings)


def comparable(loaded: Loaded) -> dict[str, Any]:
    """Return settings with those written out that follow from others."""
    values = settings_as_json(with_family_defaults(loaded))
    if values["max_train_steps"]:
        values["num_train_epochs"] = None  # which it outranks; there 0 epochs may be none
    if values["lr_scheduler"] == "constant_with_warmup":
        values["lr_scheduler"] = "constant"  # which warms up here, too
    if values["lora_alpha"] is None:
        values["lora_alpha"] = float(values["lora_rank"])
    return values


def differing(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Return the settings that differ and change what is trained."""
    aside = {*ELSEWHERE, *OF_DATA, *ALSO_ASIDE}
    names = (name for name in ours if name not in aside and SECTION_OF[name] not in (*ASIDE, "parallel"))
    return [name for name in names if not is_same(ours[name], theirs[name]) and (name not in OF_LORA or is_lora(ours))]


def is_same(one: object, other: object) -> bool:
    """True for equal values, and for numbers that differ by what a quotient is rounded by."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


OF_LORA = {name for name, section in SECTION_OF.items() if section == "lora"}


def is_lora(values: Mapping[str, Any]) -> bool:
    return values["model_type"] == "lora"


def read_back(
    writer: Writer, run: ForeignRun, ours: Mapping[str, object]
) -> tuple[dict[str, object], list[Translation]]:
    """Return the settings and datasets that the import makes of a file.

    Raises SettingsError where the trainer has no word for what decides there, such as an optimizer.
    """
    trainer = writer.trainer
    read = trainer.begin(NOWHERE, next(trainer.jobs(run.values)))
    read.values.pop(trainer.dataset_file, None)
    found = list(trainer.entries(read, run.datasets or run.values))
    read.answer(trainer.table)
    original = Original(NOWHERE, [], is_simpletuner=False)
    take_translated(original, read)
    lost = [item for item in original.left_out if item.effect == "lost"]
    if lost:
        names = {writer.key_of(name): name for name in ours}
        name = names.get(lost[0].name)
        what = f"{name} = {json.dumps(ours[name])}" if name else f"it: {lost[0].reason}"
        raise SettingsError(f"{trainer.name} has no word for {what}", OTHER_PROGRAM)
    return comparable(resolve(sources_of(original, {}), complete=False)), found


OTHER_PROGRAM = "choose another format: `simpletuner config export --help` lists them"


def unsaid_of(
    entries: Sequence[Mapping[str, Any]],
    found: Sequence[Translation],
    settings: Mapping[str, Any],
    settings_there: Mapping[str, Any],
) -> list[str]:
    """Return what the file of another trainer does not give back of our datasets."""
    by_folder: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        by_folder.setdefault(str(each.as_entry().get("instance_data_dir")), []).append(each.as_entry())
    unsaid = []
    for entry in entries:
        name, theirs = entry.get("id"), by_folder.get(str(entry.get("instance_data_dir")))
        if not theirs:
            unsaid.append(f"dataset `{name}`: it has no place there")
            continue
        given = theirs.pop(0)  # those of one folder stand in order
        wanted = {key: settings[key] for key in OF_DATA} | dict(entry)
        if given.get("crop_aspect") == "closest" and is_off(wanted.get("crop")):
            aspects = len(given.get("crop_aspect_buckets", ()))
            unsaid.append(f"dataset `{name}`: buckets of any aspect: they would be the nearest of {aspects}")
            wanted = {key: value for key, value in wanted.items() if not key.startswith("crop")}
        for key, value in wanted.items():
            there = given.get(key, settings_there.get(key))
            if key not in ("id", "type", "instance_data_dir") and there != value:
                unsaid.append(f"dataset `{name}`: {key} = {json.dumps(value)}: it would be {json.dumps(there)}")
    return unsaid
