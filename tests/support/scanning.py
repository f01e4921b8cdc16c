"""Find samples in one process, without a world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Discovery, discover
from simpletuner.data.file_list import list_images
from simpletuner.data.scan import SCANNED, Scan, scan_files
from simpletuner.data.storage import Storage, open_storage


def scanned(dataset: ImageDataset, storage: Storage) -> Scan:
    """List and scan the images of one dataset."""
    files = list_images(dataset, storage, lambda: None)
    rows = scan_files(dataset, storage, files.table.to_pylist())
    return Scan(dataset, storage, files.table.from_batches([rows], SCANNED), files.others)


def found(datasets: Sequence[ImageDataset], outputs: Sequence[Path] = (), alignment_px: int = 64) -> Discovery:
    """Find the samples of datasets."""
    return discover([scanned(dataset, open_storage(dataset, outputs)) for dataset in datasets], alignment_px, 0)
