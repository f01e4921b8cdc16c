"""The images of checked datasets as Arrow tables, which a reader maps instead of keeping them in memory."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner import __version__
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.geometry import crop_position
from simpletuner.data.samples.buckets import bucket_shapes
from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.data.scan.captions import caption_file, captions_of
from simpletuner.data.scan.scan import SUFFIX, write_table
from simpletuner.data.storage.snapshot_storage import SnapshotStorage
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.system.files.atomic import write_json
from simpletuner.tools.dataset.findings import DatasetFinding

if TYPE_CHECKING:
    from simpletuner.tools.dataset.check import CheckedDataset, CheckResult

LISTING = "datasets.json"


class ListedFacts(TypedDict):
    """A dataset in `datasets.json`."""

    id: str
    address: str
    noun: str
    folder: str
    """Empty where its files are in no folder of this machine."""
    places: list[str]
    not_editable: str
    """Reason why its captions cannot be edited; empty if they can."""
    caption_encoding: str
    tables: dict[str, str]
    """Files of the tables `images` and `found`."""
    buckets: list[dict[str, object]]
    findings: list[dict[str, object]]


class DatasetListing(TypedDict):
    """Content of `datasets.json`."""

    version: str
    checked: float
    """Time of the check, in seconds since 1970."""
    decoded: bool
    errors: list[dict[str, str]]
    not_checked: dict[str, str]
    datasets: list[ListedFacts]


# Columns: resized size of an image, its bucket, and the crop's corner; 0 of what is left out.
CROP = ("resized_width", "resized_height", "target_width", "target_height", "left", "top")


def bucket_names(parts: Sequence[DatasetSamples]) -> list[pa.Array]:
    shapes, of_samples = bucket_shapes(parts) if parts else ([], [])
    names = pa.array(map(str, shapes), pa.large_string())
    return [names.take(pa.array(own)) for own in of_samples]


def write_tables(
    samples: DatasetSamples, buckets: pa.Array, findings: Sequence[DatasetFinding], folder: Path
) -> dict[str, str]:
    images = images_table(samples, buckets)
    found = pa.Table.from_pylist([*finding_rows(images["name"].to_pylist(), findings)], FOUND)
    return {"images": write_table(folder, "images", images), "found": write_table(folder, "found", found)}


def images_table(samples: DatasetSamples, buckets: pa.Array) -> pa.Table:
    """Row for each image that was found, in the order of a run; those that are left out have no bucket."""
    table, sizes = samples.table, samples.sizes
    places = np.zeros((len(table), len(CROP)), np.int32)
    room = (sizes.resized - sizes.targets)[sizes.index]
    places[samples.rows, :2], places[samples.rows, 2:4] = sizes.resized[sizes.index], sizes.targets[sizes.index]
    ids = (f"{samples.dataset.id}/{name}" for name in samples.names.to_pylist())
    left_top = [
        crop_position(samples.dataset, sample_id, (width, height), samples.seed)
        for sample_id, (width, height) in zip(ids, room.tolist(), strict=True)
    ]
    places[samples.rows, 4:] = np.array(left_top, np.int32).reshape(-1, 2)
    of_rows = np.full(len(table), -1)
    of_rows[samples.rows] = np.arange(len(samples.rows))
    in_bucket = pc.fill_null(buckets.take(pa.array(of_rows, mask=of_rows < 0)), "")
    columns = {name: table[name] for name in ("name", "version", "problem", "width", "height")}
    columns |= {"bucket": in_bucket, "caption": without_links(samples, caption_texts(samples.dataset, table))}
    return pa.table({**columns, **dict(zip(CROP, map(pa.array, places.T), strict=True))})


def caption_texts(dataset: ImageDataset, table: pa.Table) -> pa.Array:
    """Captions of each image, one per line: of a text file its own lines, else as a run would read them."""
    if dataset.caption_strategy == "textfile":
        lists = table["captions"].to_pylist()
    else:
        pairs = zip(table["name"].to_pylist(), table["captions"].to_pylist(), strict=True)
        lists = (captions_of(dataset, name, lines) for name, lines in pairs)
    return pa.array(("\n".join(lines) for lines in lists), pa.large_string())


def without_links(samples: DatasetSamples, captions: pa.Array) -> pa.Array:
    """Captions except those behind links: a reader may not be allowed to see what is there."""
    storage = samples.storage
    if samples.dataset.caption_strategy != "textfile" or not isinstance(storage, LocalStorage):
        return captions
    root, inside = os.path.realpath(storage.folder), dict[str, bool]()

    def is_linked(name: str) -> bool:
        folder = name.rpartition("/")[0]
        if folder not in inside:
            inside[folder] = f"{os.path.realpath(f'{root}/{folder}')}/".startswith(f"{root.rstrip('/')}/")
        return not inside[folder] or Path(f"{root}/{name}").is_symlink()

    names = map(caption_file, samples.table["name"].to_pylist())
    linked = pa.array(map(is_linked, names), pa.bool_())
    return pc.if_else(linked, "", captions)


# Columns of an image with a finding: the finding's number, the row of the image, the group of duplicates that
# it is in, and the reason or the measure.
FOUND = pa.schema(
    {"finding": pa.int32(), "row": pa.int32(), "group": pa.int32(), "why": pa.large_string()},
)


def finding_rows(names: Sequence[str], findings: Sequence[DatasetFinding]) -> Iterator[dict[str, object]]:
    """Yield the rows of FOUND; files that are no images have none."""
    rows = {name: row for row, name in enumerate(names)}
    by_caption = {caption_file(name): row for name, row in rows.items()}  # findings about a file name that
    for number, each in enumerate(findings):
        for group, (first, why) in enumerate(each.images.items()):
            members = [first, *why] if isinstance(why, list) else [first]
            said = "" if isinstance(why, list) else str(why)
            for name in members:
                if (row := rows.get(name, by_caption.get(name))) is not None:
                    yield {"finding": number, "row": row, "group": group, "why": said}


def write_listing(folder: Path, result: CheckResult, decoded: bool) -> None:
    datasets = [as_listed(each) for each in result.datasets]
    found = DatasetListing(
        version=__version__,
        checked=time.time(),
        decoded=decoded,
        errors=[{"message": error.message, "hint": error.hint} for error in result.errors],
        not_checked=dict(result.not_checked),
        datasets=datasets,
    )
    write_json(folder / LISTING, found)
    # Last: a reader that has opened the former ones keeps them.
    named = {name for each in datasets for name in each["tables"].values()}
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in named:
            path.unlink(missing_ok=True)


def as_listed(checked: CheckedDataset) -> ListedFacts:
    samples = checked.samples
    storage, summary = samples.storage, checked.summary
    return {
        "id": summary.id,
        "address": summary.address,
        "noun": samples.dataset.noun,
        "folder": str(storage.folder.absolute()) if isinstance(storage, LocalStorage) else "",
        "places": places_of(samples),
        "not_editable": why_not_editable(samples),
        "caption_encoding": samples.dataset.caption_encoding,
        "tables": checked.tables,
        "buckets": [asdict(bucket) for bucket in [*summary.buckets, summary.total]],
        "findings": [without_images(each) for each in checked.findings],
    }


def places_of(samples: DatasetSamples) -> list[str]:
    """Return all folders and tables of this machine from which names and captions are read."""
    storages = [samples.storage, *(each.scan.storage for each in samples.conditioning)]
    folders = [each.folder for each in storages if isinstance(each, LocalStorage | SnapshotStorage)]
    table = samples.dataset.parquet
    return [str(path.absolute()) for path in (*folders, *([table.path] if table else []))]


def without_images(finding: DatasetFinding) -> dict[str, object]:
    return {name: value for name, value in finding.as_json().items() if name != "images"}


def why_not_editable(samples: DatasetSamples) -> str:
    """Return the reason if the captions of a dataset are in no text files of this machine; else empty."""
    dataset = samples.dataset
    if not isinstance(samples.storage, LocalStorage):
        return "its files are not in a folder of this machine"
    if dataset.prior_images:
        return "they are the prompts by which the base model makes the images"
    return {
        "textfile": "",
        "filename": "they are the names of the files (caption_strategy is filename)",
        "instanceprompt": "all are instance_prompt (caption_strategy is instanceprompt)",
    }.get(dataset.caption_strategy, "they are in a table" + (f", {dataset.parquet.path}" if dataset.parquet else ""))
