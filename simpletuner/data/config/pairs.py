"""Datasets of masks and references, and the datasets of images that they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from simpletuner.data.config.dataset_file import DatasetEntry
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.errors import Mistake
from simpletuner.settings.declared.errors import did_you_mean


def paired(datasets: Sequence[ImageDataset]) -> list[ImageDataset]:
    """Return the datasets that are trained on or held out, with those of masks and references that they name."""
    by_id = {dataset.id: dataset for dataset in datasets if dataset.conditioning_type}
    own = [dataset for dataset in datasets if not dataset.conditioning_type]
    return [each.paired_with([by_id[name] for name in conditioning_of(each, datasets)]) for each in own]


def conditioning_of(dataset: ImageDataset, datasets: Iterable[ImageDataset]) -> list[str]:
    """Return the ids that a dataset names in `conditioning_data`, and of those that name it themselves."""
    named_by = [each.id for each in datasets if each.source_dataset_id == dataset.id]
    return list(dict.fromkeys((*dataset.conditioning_data, *named_by)))


def mistakes_of_pairs(
    entries: Sequence[tuple[ImageDataset, DatasetEntry]], refused: Collection[str], unused: dict[str, list[str]]
) -> Iterator[Mistake]:
    """Yield what is wrong between datasets of images and those of their masks and references.

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
