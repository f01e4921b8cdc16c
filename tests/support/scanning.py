"""Find samples in one process, without a world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.data.samples.discovery import Discovery, discover
from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.file_list import list_images
from simpletuner.data.scan.scan import SCANNED, Scan, scan_files
from simpletuner.data.storage.storage import LocalStorage, Storage, open_storage
from simpletuner.settings.values.shape import Shape


def scanned(dataset: ImageDataset, storage: Storage) -> Scan:
    """List and scan the images of one dataset."""
    files = list_images(dataset, storage, lambda: None)
    rows = scan_files(dataset, storage, files.table.to_pylist())
    return Scan(dataset, storage, files.table.from_batches([rows], SCANNED), files.others)


def found(
    datasets: Sequence[ImageDataset],
    outputs: Sequence[Path] = (),
    alignment_px: int = 64,
    seed: int = 0,
    frame_step: int = 1,
) -> Discovery:
    """Find the samples of datasets."""
    scans = [scanned(dataset, open_storage(dataset, outputs)) for dataset in datasets]
    discovery = discover(scans, Shape(frame_step, alignment_px, alignment_px), seed)
    discovery.check()
    return discovery


def drawn(*targets: tuple[int, int], dataset: str = "d", repeats: int = 0, first: int = 0, **keys) -> DatasetSamples:
    """Return samples `first`, `first` + 1, ... of these sizes, without files."""
    names = [f"{number}.png" for number in range(first, first + len(targets))]
    values = {"name": names, "version": ["1"] * len(names), "captions": [["c"]] * len(names)}
    schema = pa.schema([SCANNED.field(name) for name in values])
    sides = np.array(targets, np.int64).reshape(-1, 2)
    rows = np.arange(len(names), dtype=np.int32)
    ones = np.ones_like(rows)
    sizes = Sizes(sides, sides, sides, ones, ones, np.ones(len(rows)), 0 * ones, rows)
    made = LocalImages.model_construct(id=dataset, repeats=repeats, caption_strategy="textfile", **keys)
    return DatasetSamples(made, LocalStorage(Path()), pa.table(values, schema), rows, sizes, 0)
