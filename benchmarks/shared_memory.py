"""Memory that the ranks of one machine have for themselves, before and after they share what all of them compute.

Samples are drawn as in kept_scan.py. Ranks: SHARED_MEMORY_RANKS (4); samples: DATA_SCALE_SAMPLES (10 million).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from interleaved import print_table
from kept_scan import drawn, own_mib

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.buckets import make_buckets
from simpletuner.data.samples.discovery import discover
from simpletuner.data.samples.samples import Samples
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.scan import Scan, intact_files, open_table, write_table
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.parallel.world import joined_world
from simpletuner.preparation.shared_memory import share_arrays
from simpletuner.settings.values.shape import Shape


def settled_mib() -> float:
    """Return own memory once everything that is no longer used has been returned."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return own_mib()


def rank(number: int, ranks: int, port: int, folder: str, put: Callable[[Any], None]) -> None:
    """Plan the data of one rank, and report its own memory before and after sharing."""
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    with joined_world(use_cpu=True) as world:
        before = settled_mib()
        dataset = LocalImages(
            id="drawn", instance_data_dir=Path(folder), minimum_aspect_ratio=None, maximum_aspect_ratio=None
        )
        table, _ = open_table(intact_files(Path(folder), "scan")[0])
        samples = discover(
            [Scan(dataset, LocalStorage(Path(folder)), table, OtherFiles())], Shape(1, 64, 64), 0
        ).samples
        buckets = make_buckets(samples)
        alone = settled_mib() - before
        own = [array for part in samples.parts for array in part.arrays]
        own += [array for bucket in buckets.values() for array in bucket.groups.values()]
        shared = iter(share_arrays(own, "benchmark", world, lambda: None))
        samples = Samples([part.with_arrays(*islice(shared, len(part.arrays))) for part in samples.parts])
        for bucket in buckets.values():
            bucket.groups.update({copies: next(shared) for copies in bucket.groups})
        own.clear()
        put((number, alone, settled_mib() - before))
        world.barrier()


def main() -> None:
    """Print each rank's memory."""
    ranks = int(os.environ.get("SHARED_MEMORY_RANKS", "4"))
    count = int(os.environ.get("DATA_SCALE_SAMPLES", "10000000"))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        write_table(Path(folder), "scan", pa.Table.from_batches(drawn(count)))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        queue: Any = context.Queue()
        processes = [context.Process(target=rank, args=(each, ranks, port, folder, queue.put)) for each in range(ranks)]
        for process in processes:
            process.start()
        rows = sorted(queue.get() for _ in processes)
        for process in processes:
            process.join()
    columns = ["rank", "alone, MiB", "shared, MiB"]
    print_table(f"own memory, {count:,} samples", columns, [[str(n), f"{a:.0f}", f"{b:.0f}"] for n, a, b in rows])


if __name__ == "__main__":
    main()
