"""From a kept scan to the first batch: seconds and memory of one rank, by the number of samples.

Drawn columns instead of images: names and captions of 55 and 70 letters, sides of 512 to 2047 px, so two thirds of a
million sizes are different. `caches` is what a warm start does to know that nothing is missing, `by
keys` what it did in version 0.1. Each count runs in a process of its own. Largest number: DATA_SCALE_SAMPLES.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from interleaved import print_table

from simpletuner.caches.store.keys import latents_parts, short_hash, text_parts
from simpletuner.caches.store.records import record_keys
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.samples.buckets import digest_buckets, make_buckets
from simpletuner.data.samples.dataset_warnings import dataset_warnings
from simpletuner.data.samples.discovery import discover
from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.scan import SCANNED, Scan
from simpletuner.data.scan.scan_cache import ROWS, intact_files, open_table, write_table
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape

COUNTS = (100_000, 1_000_000, 10_000_000)
BATCH_SIZE, BATCHES = 8, 500
KEYS = 20_000
VERSION = "-1763840000000000000"

T = TypeVar("T")


def drawn(count: int) -> Iterator[Any]:
    """Yield the rows of images that do not exist."""
    random = np.random.default_rng(0)
    for start in range(0, count, ROWS):
        numbers = range(start, min(start + ROWS, count))
        sides = random.integers(512, 2048, (2, len(numbers)), np.int32)
        columns = [
            [f"a_folder_of_ten_thousand_{each // 10_000:06}/an_image_{each:010}.jpeg" for each in numbers],
            np.full(len(numbers), 123_456),
            [f"{each}{VERSION}" for each in numbers],
            [""] * len(numbers),
            [f"70{VERSION}"] * len(numbers),
            *sides,
            np.zeros(len(numbers), bool),
            [[f"what a picture with the number {each:010} shows, in some more words"] for each in numbers],
            [""] * len(numbers),
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCANNED, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=SCANNED)


def own_mib() -> float:
    """Return the memory that this process shares with no file."""
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Anonymous"].split()[0]) / 1024


def row(count: int) -> list[str]:
    """Return the figures of one number of samples."""
    seconds: list[float] = []

    def timed(function: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - began)
        return result

    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder), "scan", pa.Table.from_batches(drawn(count)))
        pa.default_memory_pool().release_unused()
        (path,) = timed(lambda: intact_files(Path(folder), "scan"))
        before, storage = own_mib(), LocalStorage(Path(folder))
        dataset = LocalImages(
            id="drawn", instance_data_dir=Path(folder), minimum_aspect_ratio=None, maximum_aspect_ratio=None
        )
        table, _ = open_table(path)
        found = timed(lambda: discover([Scan(dataset, storage, table, OtherFiles())], Shape(1, 64, 64), 0))
        timed(lambda: list(dataset_warnings(found, 64)))
        buckets = timed(lambda: make_buckets(found.samples))
        timed(lambda: digest_buckets(buckets, found.samples))
        (part,) = found.samples.parts
        timed(lambda: [part.checksum("name", "version"), part.checksum("name", "captions")])
        sampler = GlobalBatchSampler(buckets, 0)
        steps = sampler.batches(sampler.start(BATCH_SIZE))
        timed(lambda: [found.samples[index] for _ in range(BATCHES) for index in next(steps)[0].samples])
        pa.default_memory_pool().release_unused()
        by_keys = looked_up(part)
        size, own = path.stat().st_size / 2**20, own_mib() - before
    *start, reading = seconds
    times = [f"{each:.2f}" for each in (*start, sum(start))]
    microseconds = f"{1e6 * reading / BATCHES / BATCH_SIZE:.0f}"
    return [f"{count:,}", f"{size:,.0f}", *times, microseconds, f"{own:,.0f}", f"{by_keys:.1f}"]


def looked_up(samples: DatasetSamples) -> float:
    """Return the seconds that making the keys of all latents and captions takes, from those of a part of them."""
    some = range(0, len(samples), max(1, len(samples) // KEYS))
    began = time.perf_counter()
    chosen = [samples[index] for index in some]
    record_keys((each.id, latents_parts(each, "0123456789abcdef", "fp32")) for each in chosen)
    text = text_parts("0123456789abcdef", "bf16", 512)
    record_keys((short_hash(caption), text) for each in chosen for caption in each.captions)
    return (time.perf_counter() - began) * len(samples) / len(some)


def main() -> None:
    """Print how each cost grows."""
    largest = int(os.environ.get("DATA_SCALE_SAMPLES", COUNTS[-1]))
    columns = ["samples", "file, MiB", "verified, s", "chosen", "warnings", "buckets", "digest", "caches", "all"]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.map(row, [count for count in COUNTS if count <= largest], chunksize=1)
    columns += ["us per sample", "own memory, MiB", "caches by keys, s"]
    print_table("a kept scan, up to the first batch", columns, rows)


if __name__ == "__main__":
    main()
