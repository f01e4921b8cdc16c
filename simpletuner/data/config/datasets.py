"""Datasets: from flags, or from `multidatabackend.json` with the keys that users already have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from simpletuner.data.config.class_images import OF_CAPTIONS
from simpletuner.data.config.dataset_file import RULES, VALUES, DatasetEntry, dataset_entries
from simpletuner.data.config.dataset_parts import PARQUET, TABLE_RULES, VIDEO, TableSettings, VideoSettings
from simpletuner.data.config.dataset_types import (
    PLACES,
    ImageDataset,
    LocalImages,
    mistakes_of_class_images,
    mistakes_of_pairs,
    paired,
)
from simpletuner.data.config.embeds import (
    EMBEDS,
    BucketEmbeds,
    Embeds,
    ImageEmbeds,
    TextEmbeds,
    compression,
    default_texts,
)
from simpletuner.data.config.places import find_nested_ids, id_of_folder
from simpletuner.errors import BrokenRule, Mistake, SettingsError
from simpletuner.settings.declared.errors import allowed, broken, did_you_mean, shorten
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.declared.sections import Data, DatasetSettings
from simpletuner.settings.files.raw_values import Origin
from simpletuner.settings.foreign.key_table import Keeps, KeyTable, Refuses, Rule, interpret, put
from simpletuner.settings.foreign.original_names import is_off, zero_as
from simpletuner.settings.resolving.places import with_places
from simpletuner.settings.rules.effects import has_effect, why_without_effect
from simpletuner.settings.values.spelling import choices_of, normalize_name, normalize_value
from simpletuner.system.files.paths import shown_path

# Keys with another value than null for "not set" in the original.
KEEPS_OFF: dict[str, Rule] = {
    **dict.fromkeys(("minimum_image_size", "maximum_image_size", "target_downsample_size"), Keeps(zero_as(None))),
    **dict.fromkeys(("max_num_samples", "end_epoch", "end_step"), Keeps(zero_as(None))),
    "start_epoch": Keeps(zero_as(1)),
    "prior_images": Keeps(zero_as(None)),
    "caption_shuffle": Keeps(lambda value: None if is_off(value) else value),
    "caption_filter_list": Keeps(lambda value: () if is_off(value) else value),
    "crop_aspect_buckets": Keeps(lambda value: None if is_off(value) else value),
}

BLOCKS: dict[str, type[Section]] = {PARQUET: TableSettings, VIDEO: VideoSettings}
"""Keys of a dataset that are blocks of keys."""

Kind = TypeVar("Kind", ImageDataset, TextEmbeds, ImageEmbeds)


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
    parsed = parse_file(data.data_backend_config, data)
    if model_type == "full":
        parsed.mistakes += regularisation_mistakes(parsed)
    parsed.check()
    texts = sorted(parsed.of_kind(TextEmbeds), key=lambda texts: not texts.default)
    caches = {embeds.id: embeds for embeds in parsed.of_kind(ImageEmbeds)}
    datasets = [
        dataset.cached_in(caches[dataset.image_embeds]) if dataset.image_embeds else dataset
        for dataset in parsed.of_kind(ImageDataset)
    ]
    return paired(datasets), texts or [default_texts(data)]


def unused_keys(data: Data, origins: Mapping[str, Origin] | None = None) -> list[str]:
    """Return a sentence for each key of the dataset file that has no effect, and that may be missed; and
    for each of the settings of `origins` that no dataset of the file takes up."""
    if data.data_backend_config is None:
        return []
    parsed = parse_file(data.data_backend_config, data)
    more = {key: f" and {len(places) - 1} more" if len(places) > 1 else "" for key, places in parsed.unused.items()}
    keys = [f"{key} ({places[0]}{more[key]})" for key, places in parsed.unused.items()]
    origins = origins or {}
    return [*keys, *(str(with_places(rule, origins)) for rule in unused_defaults(parsed, data, origins))]


def unused_defaults(parsed: DatasetFile, data: Data, given: Collection[str]) -> Iterator[BrokenRule]:
    """Yield a sentence for each dataset default in the settings that no dataset uses."""
    entries = [(each, entry) for each, entry in parsed.datasets if isinstance(each, ImageDataset)]
    for name, declared in DatasetSettings.model_fields.items():
        if name in given and getattr(data, name) != declared.default and entries:
            taking = [each for each, entry in entries if name not in entry.names.values()]
            if not taking:
                yield broken(
                    f"{name} has no effect: each dataset of {shown_path(entries[0][1].file)} has its own", name
                )
            elif not any(has_effect(name, partial(getattr, each)) for each in taking):
                why = why_without_effect(name, partial(getattr, taking[0]))
                yield broken(
                    f"{name} = {shorten(getattr(data, name))} {why}, in {shown_path(entries[0][1].file)}", name
                )


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


@dataclass
class DatasetFile:
    datasets: list[tuple[ImageDataset | Embeds, DatasetEntry]] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)
    """Keys without effect, each with the reason, and where they stand."""
    refused: set[str] = field(default_factory=set)
    """Ids of entries with mistakes of their own: that nothing has such an id would follow from these."""

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [dataset for dataset, _ in self.datasets if isinstance(dataset, kind)]

    def check(self) -> None:
        """Raise SettingsError that lists every mistake."""
        if self.mistakes:
            raise SettingsError(mistakes=self.mistakes, hint="docs/dataset-file.md lists the keys of a dataset")


def parse_file(path: Path, data: Data) -> DatasetFile:
    """Read a dataset file with all its mistakes. Raises SettingsError where it does not parse."""
    return parse_datasets(dataset_entries(path), path, data)


def parse_datasets(entries: Iterable[DatasetEntry], path: Path, data: Data) -> DatasetFile:
    parsed = DatasetFile()
    for entry in entries:
        if not is_disabled(entry):
            parse_entry(entry, data, parsed)
    parsed.mistakes.extend(mistakes_between(parsed, shown_path(path)))
    return parsed


def regularisation_mistakes(parsed: DatasetFile) -> Iterator[Mistake]:
    message = "the base model that gives the targets is kept only by model_type=lora: set it, or leave the key out"
    for dataset, entry in parsed.datasets:
        if isinstance(dataset, ImageDataset) and dataset.is_regularisation_data:
            yield entry.mistake("is_regularisation_data", message)


def is_disabled(entry: DatasetEntry) -> bool:
    return normalize_value("disabled", ImageDataset.model_fields["disabled"], entry.value("disabled")) is True


def mistakes_between(parsed: DatasetFile, name: str) -> Iterator[Mistake]:
    """Yield what is wrong with datasets that are right by themselves."""
    images = parsed.of_kind(ImageDataset)
    for twice in duplicates([dataset.id for dataset in images]):
        lines = [str(entry.line) for dataset, entry in parsed.datasets if dataset.id == twice]
        yield Mistake("id", "two datasets share it", f"{name}:{' and '.join(lines)}", shorten(twice))
    own = [dataset.id for dataset in images if dataset.cache_dir_vae is None and dataset.image_embeds is None]
    for problem in find_nested_ids(own):
        yield Mistake("id", problem, name)
    yield from mistakes_of_embeds(parsed, name)
    entries = [(dataset, entry) for dataset, entry in parsed.datasets if isinstance(dataset, ImageDataset)]
    yield from mistakes_of_pairs(entries, parsed.refused, parsed.unused)
    yield from mistakes_of_class_images(entries, parsed.refused)
    if all(dataset.dataset_type in ("eval", "conditioning") for dataset in images) and not parsed.mistakes:
        yield BrokenRule("data_backend_config", f"{name} names no dataset of images or videos to train on")


def mistakes_of_embeds(parsed: DatasetFile, name: str) -> Iterator[Mistake]:
    """Yield what is wrong between datasets and the caches that they name."""
    for kind, places in EMBEDS.items():
        ids = [dataset.id for dataset, _ in parsed.datasets if isinstance(dataset, places["local"])]
        for twice in duplicates(ids):
            yield Mistake("id", f"two datasets of type {kind} share it", name, shorten(twice))
        for dataset, entry in parsed.datasets:
            wanted = getattr(dataset, kind, None)
            if wanted is not None and wanted not in (*ids, *parsed.refused):
                message = f"no dataset of dataset_type {kind} has this id"
                yield entry.mistake(kind, message, did_you_mean(wanted, ids))
    texts = [(dataset, entry) for dataset, entry in parsed.datasets if isinstance(dataset, TextEmbeds)]
    defaults = [dataset for dataset, _ in texts if dataset.default or (len(texts) == 1 and dataset.default is None)]
    if texts and len(defaults) != 1:
        lines = " and ".join(str(entry.line) for _, entry in texts)
        message = f"{len(defaults)} of {len(texts)} text caches have default true: one has, for validation prompts"
        yield Mistake("default", message, f"{name}:{lines}")


def inherited(data: Data) -> dict[str, object]:
    """Return the global settings that a dataset falls back to."""
    return {name: getattr(data, name) for name in DatasetSettings.model_fields} | compression(data)


def fallbacks(kind: type[ImageDataset | Embeds], data: Data) -> dict[str, Any]:
    """Defaults of an entry in the dataset file, from the flags."""
    if issubclass(kind, ImageDataset):
        return inherited(data)
    return compression(data) if issubclass(kind, TextEmbeds) else {}


def parse_entry(entry: DatasetEntry, data: Data, parsed: DatasetFile) -> None:
    kind = kind_of_entry(entry)
    fields = fields_with_blocks(kind)
    keys = dict.fromkeys(fields, Keeps()) | {key: rule for key, rule in KEEPS_OFF.items() if key in fields}
    table = KeyTable(RULES | TABLE_RULES | keys_of_other_places(kind) | keys, entry.names, is_off=is_off)
    values: dict[str, object] = {}
    mistakes: list[Mistake] = []
    for found in interpret(table, entry.keys):
        if found.outcome == "kept" and found.key in fields:
            put(values, found.key, normalize_value(found.key, fields[found.key], found.value))
        elif found.outcome == "unused":
            parsed.unused.setdefault(f"{found.key} has no effect: {found.note}", []).append(entry.place(found.line))
        elif found.outcome == "refused":
            mistakes.append(entry.mistake(found.path, found.note))
        elif found.outcome != "neutral":
            hint = did_you_mean(normalize_name(found.path), {*table.rules, *table.sections})
            mistakes.append(entry.mistake(found.path, "unknown key", hint, show_value=False))
    try:
        own = OF_CAPTIONS if values.get("prior_images") else {}
        dataset = kind(**{**fallbacks(kind, data), **own, **values})
    except ValidationError as error:
        mistakes += [mistake_of(item, fields, entry) for item in error.errors()]
        parsed.refused.add(str(entry.value("id")))
    else:
        parsed.datasets.append((dataset, entry))
        if isinstance(dataset, ImageDataset) and not dataset.are_masks:
            note_without_effect(dataset, values, entry, parsed)
    parsed.mistakes += mistakes


def note_without_effect(
    dataset: ImageDataset, values: Mapping[str, object], entry: DatasetEntry, parsed: DatasetFile
) -> None:
    lookup = partial(getattr, dataset)
    for key in DatasetSettings.model_fields.keys() & values.keys():
        if (value := lookup(key)) != DatasetSettings.model_fields[key].default and not has_effect(key, lookup):
            sentence = f"{key} = {shorten(value)} {why_without_effect(key, lookup)}"
            parsed.unused.setdefault(sentence, []).append(entry.place())


def fields_with_blocks(kind: type[Section]) -> dict[str, FieldInfo]:
    """Fields of a dataset entry, with blocks flattened: `parquet.path`, `video.fps`."""
    fields = dict(kind.model_fields)
    for block, section in BLOCKS.items():
        if fields.pop(block, None):
            fields |= {f"{block}.{name}": field for name, field in section.model_fields.items()}
    if issubclass(kind, BucketEmbeds):
        del fields["cache_dir"]
    return fields


def kind_of_entry(entry: DatasetEntry) -> type[ImageDataset | Embeds]:
    places = EMBEDS.get(normalize_name(entry.value("dataset_type")), PLACES)
    return places.get(normalize_name(entry.value("type")), places["local"])


def keys_of_other_places(kind: type[ImageDataset | Embeds]) -> dict[str, Rule]:
    """Return a rule for each key that only images, or caches of this sort, of another `type` have."""
    own = fields_with_blocks(kind).keys()
    rules: dict[str, Rule] = {}
    for name, places in {"images": PLACES, **EMBEDS}.items():
        if places is PLACES or kind in places.values():
            keys = {place: fields_with_blocks(other).keys() for place, other in places.items()}
            common = frozenset.intersection(*map(frozenset, keys.values())) | own
            for key in frozenset.union(*map(frozenset, keys.values())) - common:
                types = ", ".join(place for place in keys if key in keys[place])
                rules[key] = Refuses(f"only {name} of type {types} have it: change `type`, or leave it out")
    return rules


def mistake_of(item: Any, fields: Mapping[str, FieldInfo], entry: DatasetEntry) -> Mistake:
    path = ".".join(str(part) for part in item["loc"] if isinstance(part, str))
    key = path if path in fields else item["type"]  # a rule between keys names the one to change
    if item["type"] == "missing":
        return Mistake(key, "is missing", entry.place())
    if item["type"] == "value_error" or path not in fields:
        return entry.mistake(key, reason_of(item))
    value = item["input"]
    reason = VALUES.get(key, {}).get(normalize_name(value), "") if isinstance(value, str) else ""
    close = did_you_mean(str(value), map(str, choices_of(fields[key].annotation)))
    return entry.mistake(key, f"{f'{reason}; ' if reason else ''}use {allowed(fields[key])}", close)


def reason_of(item: Any) -> str:
    return str(item.get("ctx", {}).get("error", item["msg"]))


def duplicates(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
