"""Parse the dataset file (`multidatabackend.json`): every mistake of it, and keys without effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from simpletuner.data.config.dataset_file import RULES, VALUES, DatasetEntry, dataset_entries
from simpletuner.data.config.dataset_parts import OF_CAPTIONS, PARQUET, VIDEO, TableSettings, VideoSettings
from simpletuner.data.config.dataset_types import (
    PLACES,
    ImageDataset,
    LocalImages,
)
from simpletuner.data.config.datasets import inherited, reason_of
from simpletuner.data.config.embeds import (
    EMBEDS,
    BucketEmbeds,
    Embeds,
    ImageEmbeds,
    TextEmbeds,
    compression,
)
from simpletuner.data.config.places import find_nested_ids
from simpletuner.errors import BrokenRule, Mistake, SettingsError
from simpletuner.settings.declared.errors import allowed, broken, did_you_mean, shorten
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.declared.sections import Data, DatasetSettings
from simpletuner.settings.files.raw_values import Origin, with_places
from simpletuner.settings.foreign.key_table import Keeps, KeyTable, Refuses, Rule, interpret, put
from simpletuner.settings.foreign.original_names import is_off, zero_as
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


def read_datasets(path: Path, data: Data, model_type: str) -> tuple[list[ImageDataset], list[TextEmbeds]]:
    """Return the datasets of a file, and its caches of text embeddings, the default one first.

    Raises SettingsError that lists every mistake of the file.
    """
    parsed = parse_file(path, data)
    if model_type == "full":
        parsed.mistakes += regularisation_mistakes(parsed)
    parsed.check()
    texts = sorted(parsed.of_kind(TextEmbeds), key=lambda texts: not texts.default)
    caches = {embeds.id: embeds for embeds in parsed.of_kind(ImageEmbeds)}
    datasets = [
        dataset.cached_in(caches[dataset.image_embeds]) if dataset.image_embeds else dataset
        for dataset in parsed.of_kind(ImageDataset)
    ]
    return paired(datasets), texts


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


def paired(datasets: Sequence[ImageDataset]) -> list[ImageDataset]:
    """Training and held-out datasets, and the masks and references that they name."""
    by_id = {dataset.id: dataset for dataset in datasets if dataset.conditioning_type}
    own = [dataset for dataset in datasets if not dataset.conditioning_type]
    return [each.paired_with([by_id[name] for name in conditioning_of(each, datasets)]) for each in own]


def conditioning_of(dataset: ImageDataset, datasets: Iterable[ImageDataset]) -> list[str]:
    """Return the ids that a dataset names in `conditioning_data`, and of those that name it themselves."""
    named_by = [each.id for each in datasets if each.source_dataset_id == dataset.id]
    return list(dict.fromkeys((*dataset.conditioning_data, *named_by)))


def mistakes_of_class_images(
    entries: Sequence[tuple[ImageDataset, DatasetEntry]], refused: Collection[str]
) -> Iterator[Mistake]:
    """Yield mistakes in the names and folders of datasets whose captions are prompts of class images."""
    scanned = [
        (each.id, each.instance_data_dir.resolve())
        for each, _ in entries
        if isinstance(each, LocalImages) and not each.prior_images
    ]
    captioned = [each.id for each, _ in entries if not (each.conditioning_type or each.prior_images)]
    for dataset, entry in entries:
        source = dataset.prior_captions_of
        if source is not None and source not in (*captioned, *refused):
            message = "no dataset of images with captions has this id"
            yield entry.mistake("prior_captions_of", message, did_you_mean(source, captioned))
        if dataset.prior_images and isinstance(dataset, LocalImages):
            folder = dataset.instance_data_dir.resolve()
            if within := next((name for name, each in scanned if folder.is_relative_to(each)), None):
                message = (
                    f"class images would be taken for images of dataset `{within}`: give them a folder of their own"
                )
                yield entry.mistake("instance_data_dir", message)


def mistakes_of_pairs(
    entries: Sequence[tuple[ImageDataset, DatasetEntry]], refused: Collection[str], unused: dict[str, list[str]]
) -> Iterator[Mistake]:
    """Yield the mistakes in references between datasets of images, masks and references.

    `refused` are ids of entries with mistakes of their own; keys without effect are added to `unused`.
    """
    images = [dataset for dataset, _ in entries]
    by_id = {dataset.id: dataset for dataset in images if dataset.conditioning_type}
    own = [dataset.id for dataset in images if not dataset.conditioning_type]
    for dataset, entry in entries:
        for wanted in dataset.conditioning_data:
            if wanted not in (*by_id, *refused):
                message = "no dataset of dataset_type conditioning has this id"
                yield entry.mistake("conditioning_data", message, did_you_mean(wanted, by_id))
        if (source := dataset.source_dataset_id) is not None and source not in (*own, *refused):
            message = "no dataset of images has this id"
            yield entry.mistake("source_dataset_id", message, did_you_mean(source, own))
        masks = [name for name in conditioning_of(dataset, images) if name in by_id and by_id[name].are_masks]
        if len(masks) > 1:
            yield entry.mistake("conditioning_data", "it names more than one dataset of masks")
    named = Counter(name for dataset in images for name in conditioning_of(dataset, images))
    for dataset, entry in entries:
        if dataset.conditioning_type and not named[dataset.id]:
            why = f"{dataset.id} has no effect: no dataset names it in conditioning_data"
            unused.setdefault(why, []).append(entry.place())
        if dataset.are_references and named[dataset.id] > 1:  # its latents are cached as one dataset's
            message = f"{named[dataset.id]} datasets of images name it as theirs: write an entry with an id for each"
            yield entry.mistake("id", message)


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


def fallbacks(kind: type[ImageDataset | Embeds], data: Data) -> dict[str, Any]:
    """Defaults of an entry in the dataset file, from the flags."""
    if issubclass(kind, ImageDataset):
        return inherited(data)
    return compression(data) if issubclass(kind, TextEmbeds) else {}


def parse_entry(entry: DatasetEntry, data: Data, parsed: DatasetFile) -> None:
    kind = kind_of_entry(entry)
    fields = fields_with_blocks(kind)
    keys = dict.fromkeys(fields, Keeps()) | {key: rule for key, rule in KEEPS_OFF.items() if key in fields}
    table = KeyTable(RULES | keys_of_other_places(kind) | keys, entry.names, is_off=is_off)
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


def duplicates(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
