"""Folders of images with a table of them, and what a scan finds."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from PIL import Image

from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.samples.dataset_warnings import dataset_warnings
from simpletuner.data.samples.discovery import Discovery, discover
from simpletuner.data.scan.file_list import list_images
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.parallel.world import joined_world
from simpletuner.preparation.shared_scan import SharedScan
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.values.shape import Shape

Rows = Sequence[Mapping[str, Any]]


def write_rows(path: Path, rows: Rows) -> Path:
    """Write rows in the format that the name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def add_images(folder: Path, *names: str) -> Path:
    """Add images, each 16 px wider than the one before."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64 + 16 * number, 64), "red").save(folder / name)
    return folder


def dataset_file(folder: Path, table: Path | None, columns: Mapping[str, Any], **values: Any) -> Path:
    """Write a dataset of the images in `folder`, whose table has these columns."""
    block = {"parquet": {"path": str(table), "filename_column": "file", **columns}} if table else {}
    entry = {"id": "d", "instance_data_dir": str(folder), "resolution": 64, **block, **values}
    path = folder.parent / "datasets.json"
    path.write_text(json.dumps([entry]))
    return path


@dataclass(frozen=True)
class OpenedFiles(LocalStorage):
    """A folder that remembers which images were opened."""

    opened: list[str] = field(default_factory=list, hash=False, compare=False)

    def open(self, name: str) -> BinaryIO:
        self.opened.append(name)
        return super().open(name)


@dataclass(frozen=True)
class Scanned:
    """What a run would train on, what it says, and which images were opened."""

    found: Discovery
    opened: list[str]
    warnings: list[str]

    @property
    def captions(self) -> dict[str, tuple[str, ...]]:
        return {sample.id.removeprefix("d/"): sample.captions for sample in self.found.samples}


def scan_table(folder: Path, table: Path | None, columns: Mapping[str, Any], **values: Any) -> Scanned:
    """Scan a folder with its table; what was scanned is kept beside it."""
    (dataset,), _ = load_datasets(Data(data_backend_config=dataset_file(folder, table, columns, **values)))
    storage = OpenedFiles(folder)
    try:
        with joined_world({}, use_cpu=True) as world:
            shared = SharedScan(dataset, storage, folder.parent / "scans", "scan", world, lambda: None)
            files = list_images(dataset, storage, lambda: None)
            scan = shared.open(kept) if (kept := shared.preserved()) else shared.run(files, Report(quiet=True))
    finally:
        if dist.is_initialized():  # after an error, with which a run ends
            dist.destroy_process_group()
    found = discover([scan], Shape(1, 16, 16), 0)
    found.check()
    return Scanned(found, storage.opened, list(dataset_warnings(found, 16)))
