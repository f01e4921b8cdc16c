"""A first look at small datasets, before torch is imported and ranks are started. No torch."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa

from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.config.folders import latents_folder
from simpletuner.data.config.participation import Window
from simpletuner.data.samples.buckets import fill_buckets, make_buckets
from simpletuner.data.samples.discovery import discover
from simpletuner.data.samples.held_out import held_out_indices
from simpletuner.data.scan.file_list import list_images
from simpletuner.data.scan.scan import Scan, scan_files
from simpletuner.data.storage.storage import open_storage
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape

# Ranks read all headers again, which takes a second for so many on a slow disk. Larger datasets seldom lack
# images.
MOST_FILES = 2000


def check_few_images(settings: Settings) -> None:
    """Raise DataError for local datasets of few images whose buckets cannot fill the effective batch.

    Ranks find the same in any data, but each of them imports torch before.
    """
    datasets, _ = load_datasets(settings.data, settings.model.model_type)
    outputs = [settings.training.output_dir, *(latents_folder(dataset, settings) for dataset in datasets)]
    folders = [dataset.instance_data_dir for dataset in datasets if isinstance(dataset, LocalImages)]
    # Of a video the first frame is decoded as well, which takes 20 times as long as an image's header.
    is_plain = all(not (each.parquet or each.clips) and each.window == Window() for each in datasets)
    has_few = len(list(islice(files_in(folders), MOST_FILES + 1))) <= MOST_FILES
    if len(folders) < len(datasets) or not (is_plain and has_few):
        return
    scans = [scan_of(dataset, outputs) for dataset in datasets]
    side_px = settings.data.aspect_bucket_alignment
    found = discover(scans, Shape(1, side_px, side_px), settings.training.seed)
    if any(found.errors()):  # the ranks say these, and what is wrong with the buckets as well
        return
    samples = found.samples
    buckets = make_buckets(samples, held_out_indices(samples, settings.validation.eval_split))
    if buckets:  # else the ranks say why no image is left
        fill_buckets(buckets, settings.effective_batch_size, settings.data.allow_dataset_oversubscription)


def files_in(folders: Sequence[Path]) -> Iterator[str]:
    for folder in folders:
        for _, _, files in os.walk(folder):
            yield from files


def scan_of(dataset: ImageDataset, outputs: Sequence[Path]) -> Scan:
    storage = open_storage(dataset, outputs)
    files = list_images(dataset, storage, lambda: None)
    rows = scan_files(dataset, storage, files.table.to_pylist())
    return Scan(dataset, storage, pa.Table.from_batches([rows]), files.others)
