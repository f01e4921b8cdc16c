"""From a kept scan to the first batch: seconds and memory of one rank, by the number of samples.

Drawn columns instead of images: names and captions of 55 and 70 letters, sides of 512 to 2047 px, so two thirds of a
million sizes are different; clips also have 60 to 600 frames and one of six rates, so nearly all of them are different.
`caches` is what a warm start does to know that nothing is missing, `by keys` what it did in version 0.1. Each count
runs in a process of its own. Largest number: DATA_SCALE_SAMPLES. `--ratio` compares clips with images, in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from interleaved import print_table

from simpletuner.caches.store.records import latents_parts, record_keys, short_hash, text_parts
from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.buckets import digest_buckets, make_buckets
from simpletuner.data.samples.dataset_warnings import dataset_warnings
from simpletuner.data.samples.discovery import discover
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.scan import ROWS, SCANNED, Scan, intact_files, open_table, write_table
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape

COUNTS = (100_000, 1_000_000, 10_000_000)
BATCH_SIZE, BATCHES = 8, 500
KEYS = 20_000
VERSION = "-1763840000000000000"
RATES = (24000 / 1001, 24.0, 25.0, 30000 / 1001, 30.0, 60.0)
PHASES = ("verified, s", "chosen", "warnings", "buckets", "digest", "caches")
RATIO_COUNT, ROUNDS = 1_000_000, 5

T = TypeVar("T")


def drawn(count: int, clips: bool = False) -> Iterator[Any]:
    """Yield the rows of images or videos that do not exist."""
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
            random.integers(60, 601, len(numbers), np.int32) if clips else np.ones(len(numbers), np.int32),
            random.choice(RATES, len(numbers)) if clips else np.zeros(len(numbers)),
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


def dataset_of(folder: Path, clips: bool) -> LocalImages:
    limits = {"minimum_aspect_ratio": None, "maximum_aspect_ratio": None}
    rules = {"num_frames": 49, "fps": 16, "clip_position": "random"}
    kind = {"dataset_type": "video", "video": VideoSettings.model_validate(rules)} if clips else {}
    return LocalImages(id="drawn", instance_data_dir=folder, **limits, **kind)


def start(folder: Path, clips: bool, clock: Callable[[], float]) -> tuple[list[float], dict[str, Bucket], Samples]:
    """Return the seconds of each phase of a start, and what it has found."""
    seconds: list[float] = []

    def timed(function: Callable[[], T]) -> T:
        began = clock()
        result = function()
        seconds.append(clock() - began)
        return result

    (path,) = timed(lambda: intact_files(folder, "scan"))
    table, _ = open_table(path)
    scan = Scan(dataset_of(folder, clips), LocalStorage(folder), table, OtherFiles())
    found = timed(lambda: discover([scan], Shape(4 if clips else 1, 64, 64), 0))
    timed(lambda: list(dataset_warnings(found, 64)))
    buckets = timed(lambda: make_buckets(found.samples))
    timed(lambda: digest_buckets(buckets, found.samples))
    (part,) = found.samples.parts
    timed(lambda: [part.checksum("name", "version"), part.checksum("name", "captions")])
    return seconds, buckets, found.samples


def row(count: int) -> list[str]:
    """Return the figures of one number of images."""
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder), "scan", pa.Table.from_batches(drawn(count)))
        pa.default_memory_pool().release_unused()
        before = own_mib()
        seconds, buckets, samples = start(Path(folder), False, time.perf_counter)
        began = time.perf_counter()
        sampler = GlobalBatchSampler(buckets, 0)
        steps = sampler.batches(sampler.start(BATCH_SIZE))
        assert [samples[index] for _ in range(BATCHES) for index in next(steps)[0].samples]
        reading = time.perf_counter() - began
        pa.default_memory_pool().release_unused()
        by_keys = looked_up(samples.parts[0])
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
        own = own_mib() - before
    times = [f"{each:.2f}" for each in (*seconds, sum(seconds))]
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


def print_ratio(count: int) -> None:
    """Print how much longer each phase takes for clips, and for one sample of a batch, by CPU time in turns."""
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder, name) for name in ("images", "clips")}
        found: dict[str, list[list[float]]] = {name: [] for name in places}
        for name, place in places.items():
            write_table(place, "scan", pa.Table.from_batches(drawn(count, name == "clips")))
        for _ in range(ROUNDS + 1):
            for name, place in places.items():
                seconds, _, samples = start(place, name == "clips", time.process_time)
                began = time.process_time()
                assert [samples[index] for index in range(0, len(samples), max(1, len(samples) // KEYS))]
                found[name].append([*seconds, sum(seconds), time.process_time() - began])
    rounds = {name: np.array(each[1:]) for name, each in found.items()}  # the first one warms up
    figures = [np.median(rounds["images"], 0), np.median(rounds["clips"], 0)]
    figures.append(np.median(rounds["clips"] / rounds["images"], 0))
    rows = [[name, *(f"{each:.2f}" for each in own)] for name, own in zip((*places, "ratio"), figures, strict=True)]
    print_table(f"{count:,} of each, CPU seconds", ["", *PHASES, "all", f"{KEYS:,} samples"], rows)


def main() -> None:
    """Print how each cost grows."""
    if sys.argv[1:] == ["--ratio"]:
        print_ratio(min(RATIO_COUNT, int(os.environ.get("DATA_SCALE_SAMPLES", RATIO_COUNT))))
        return
    largest = int(os.environ.get("DATA_SCALE_SAMPLES", COUNTS[-1]))
    columns = ["samples", "file, MiB", *PHASES, "all"]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.map(row, [count for count in COUNTS if count <= largest], chunksize=1)
    columns += ["us per sample", "own memory, MiB", "caches by keys, s"]
    print_table("a kept scan, up to the first batch", columns, rows)


if __name__ == "__main__":
    main()
