"""From a table of images to buckets: CPU seconds and memory of rank 0, by the number of rows.

Drawn columns instead of images: names of 26 letters, captions of 68, sides of 512 to 2047 px, one row per image, in the
order of the files or shuffled. Each count runs in a process of its own. Largest number: DATA_SCALE_SAMPLES.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from interleaved import print_table

from simpletuner.data.config.dataset_parts import TableSettings
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.buckets import make_buckets
from simpletuner.data.samples.discovery import discover
from simpletuner.data.scan.file_list import FILE, OtherFiles, with_caption_versions
from simpletuner.data.scan.scan import ROWS, SCANNED, Scan
from simpletuner.data.scan.table_join import describe_files, with_described
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.data.tables.table_files import TableFile
from simpletuner.settings.values.shape import Shape

COUNTS = (100_000, 1_000_000, 10_000_000)

T = TypeVar("T")


def write_drawn(path: Path, count: int, shuffled: bool) -> None:
    """Write the rows of images that do not exist, as Parquet."""
    random = np.random.default_rng(0)
    numbers = random.permutation(count) if shuffled else np.arange(count)
    schema = pa.schema({"file": pa.string(), "caption": pa.string(), "width": pa.int32(), "height": pa.int32()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 16 * ROWS):
            part = numbers[start : start + 16 * ROWS].tolist()
            sides = random.integers(512, 2048, (2, len(part)), np.int32)
            captions = [f"what a picture with the number {each:010} shows, in some more words" for each in part]
            writer.write_table(pa.table([[name_of(each) for each in part], captions, *sides], schema))


def name_of(number: int) -> str:
    return f"an_image_{number:010}"


def list_drawn(count: int, version: str) -> pa.Table:
    """Return the list of these images, which takes a walk through folders otherwise."""
    batches = []
    for start in range(0, count, ROWS):
        numbers = range(start, min(start + ROWS, count))
        names = [f"{name_of(each)}.jpeg" for each in numbers]
        columns = [names, np.full(len(names), 123_456), [f"123456-{each}" for each in numbers], [""] * len(names)]
        batches.append(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, FILE, strict=True)], schema=FILE))
    return with_caption_versions(pa.Table.from_batches(batches), FILE.empty_table(), None, version)


def row(given: tuple[int, bool]) -> list[str]:
    """Return the figures of one number of rows."""
    count, shuffled = given
    cpu: list[float] = []
    wall: list[float] = []

    def timed(function: Callable[[], T]) -> T:
        began = time.process_time(), time.perf_counter()
        result = function()
        cpu.append(time.process_time() - began[0])
        wall.append(time.perf_counter() - began[1])
        return result

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        write_drawn(path, count, shuffled)
        block = TableSettings(
            path=path, filename_column="file", caption_column=["caption"], width_column="width", height_column="height"
        )
        both = {"caption_strategy": "parquet", "metadata_backend": "parquet", "parquet": block}
        dataset = LocalImages(id="drawn", instance_data_dir=Path(folder), **both)
        storage = LocalStorage(Path(folder))
        table = TableFile(dataset, storage, block)
        files = list_drawn(count, "version")
        pa.default_memory_pool().release_unused()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        timed(table.version)
        rows = timed(table.rows)
        described = timed(lambda: describe_files(table, rows, files["name"]))
        nothing = SCANNED.empty_table().take(pa.nulls(count, pa.int32()))
        scanned, _ = timed(lambda: with_described(dataset, files, nothing, described))
        found = timed(lambda: discover([Scan(dataset, storage, scanned, OtherFiles())], Shape(1, 64, 64), 0))
        timed(lambda: make_buckets(found.samples))
        assert len(found.samples) == count
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        size = path.stat().st_size / 2**20
    order = "shuffled" if shuffled else "as the files"
    times = [f"{each:.2f}" for each in (*cpu, sum(cpu), sum(wall))]
    return [f"{count:,}", order, f"{size:,.0f}", *times, f"{peak:,.0f}"]


def main() -> None:
    """Print how each cost grows."""
    largest = int(os.environ.get("DATA_SCALE_SAMPLES", COUNTS[-1]))
    cases = [(count, shuffled) for count in COUNTS if count <= largest for shuffled in (False, True)]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.map(row, cases, chunksize=1)
    columns = [
        "rows",
        "order",
        "file, MiB",
        "checksum",
        "read",
        "join",
        "columns",
        "chosen",
        "buckets",
        "CPU s",
        "wall s",
    ]
    print_table("a table of images, up to buckets", [*columns, "peak, MiB"], rows)


if __name__ == "__main__":
    main()
