"""Our shard store against one file per sample: records per second, written and read at random.

The page cache is warm: this measures the work of the formats, not of the disk. Writing stops at the page cache on both
sides; ours is brought to the disk when a shard is closed, outside the measurement. Reading counts until every page of a
record has been touched, so that a store cannot gain by returning bytes that were never read; and, in another row,
until records are stacked into batches as prefetching does, a copy that both stores have to make.

Then opening a cache, which reads no record: by its merged index against parsing a JSON line per record, as every rank
did in version 0.1; and what finding records takes, all requests of a run at once and one by one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from interleaved import Rounds, print_table, ratio, seconds_in_turns
from torch import Tensor

from simpletuner.caches.store.records import KeyParts, RecordLocation, record_keys
from simpletuner.caches.store.shard_index import open_index, read_indexes
from simpletuner.caches.store.shards import ShardReader, ShardWriter
from simpletuner.data.prefetch import stack_conditioning

ROUNDS, BATCH_SIZE = 9, 4
PARTS = {"file": "1-1", "VAE": "0123456789abcdef"}
OURS, SMALL, PLAIN = "shards", "compressed", "files"
Record = dict[str, Tensor]

KINDS: dict[str, tuple[Record, int]] = {
    "Flux, 1024 px": ({"latents": torch.randn(16, 128, 128), "text": torch.randn(512, 4096).bfloat16()}, 60),
    "SDXL, 1024 px": (
        {
            "latents": torch.randn(4, 128, 128),
            "text": torch.randn(77, 2048).bfloat16(),
            "pooled": torch.randn(1280).bfloat16(),
        },
        400,
    ),
}
"""A record of each kind, and how many are written: less than 1 GB in both stores together."""


def writing_seconds(folder: Path, record: Record, count: int) -> Rounds:
    """Write both stores again in every round; the last ones stay on the disk."""
    with ExitStack() as open_writers:

        def clear(name: str) -> None:
            """Remove what an earlier round wrote."""
            open_writers.close()
            shutil.rmtree(folder / name, ignore_errors=True)

        def write_shards() -> None:
            """Write with our writer, and leave it open."""
            writer = open_writers.enter_context(ShardWriter(folder / OURS, rank=0))
            for number in range(count):
                writer.write(str(number), PARTS, record)

        def write_files() -> None:
            """Write one file per record."""
            (folder / PLAIN).mkdir()
            for number in range(count):
                torch.save(record, folder / PLAIN / f"{number}.pt")

        return seconds_in_turns({OURS: write_shards, PLAIN: write_files}, ROUNDS, clear)


def reading_seconds(folder: Path, record: Record, count: int, use: Callable[[list[Record]], object]) -> Rounds:
    """Read both stores in turns, and use what was read."""
    reader = ShardReader(folder / OURS)

    def from_shards(number: int) -> Record:
        """Find and read one of ours."""
        location = reader.find(str(number), PARTS)
        assert location is not None
        return reader.read(location)

    def from_files(number: int) -> Record:
        """Load a file."""
        return torch.load(folder / PLAIN / f"{number}.pt", weights_only=True)

    for read in (from_shards, from_files):
        assert all(torch.equal(value, record[name]) for name, value in read(count // 2).items())
    turns = {
        OURS: partial(read_at_random, from_shards, count, use),
        PLAIN: partial(read_at_random, from_files, count, use),
    }
    return seconds_in_turns(turns, ROUNDS)


def touched(records: list[Record]) -> None:
    """Look at one byte of every page."""
    for tensor in (tensor for record in records for tensor in record.values()):
        tensor.view(torch.uint8).flatten()[::4096].max()


def read_at_random(read: Callable[[int], Record], count: int, use: Callable[[list[Record]], object]) -> None:
    """Read every record once, in random order, and use them in batches."""
    order = random.sample(range(count), count)
    for first in range(0, count, BATCH_SIZE):
        use([read(number) for number in order[first : first + BATCH_SIZE]])


def row_of(kind: str, what: str, seconds: Rounds, count: int) -> list[str]:
    """Return records per second of both, and how many times faster ours is."""
    per_second = [f"{count / statistics.median(seconds[name]):.0f}" for name in (OURS, PLAIN)]
    return [f"{kind}, {what}", *per_second, f"{ratio(seconds, PLAIN, OURS):.2f}"]


OPENED, OPENING_ROUNDS, PER_SHARD, RECORD_BYTES = (100_000, 1_000_000), 3, 15_000, 1 << 16


def compressed_row(folder: Path, kind: str, record: Record, count: int) -> list[str]:
    """Return the row of a kind of record for compressed shards: written, read and their size, beside plain ones."""
    folders = {OURS: folder / OURS, SMALL: folder / SMALL}

    def write(name: str) -> None:
        """Write all records into an empty folder."""
        shutil.rmtree(folders[name], ignore_errors=True)
        with ShardWriter(folders[name], 0, compress=name == SMALL) as writer:
            for number in range(count):
                writer.write(str(number), PARTS, record)

    def from_shards(reader: ShardReader, number: int) -> Record:
        """Find and read one of ours."""
        location = reader.find(str(number), PARTS)
        assert location is not None
        return reader.read(location)

    written = seconds_in_turns({name: partial(write, name) for name in folders}, ROUNDS)
    readers = {name: ShardReader(path) for name, path in folders.items()}
    assert all(torch.equal(value, record[name]) for name, value in from_shards(readers[SMALL], 0).items())
    turns = {
        name: partial(read_at_random, partial(from_shards, reader), count, stack_conditioning)
        for name, reader in readers.items()
    }
    read = seconds_in_turns(turns, ROUNDS)
    sizes = [sum(path.stat().st_size for path in folders[name].glob("*.shard")) for name in (SMALL, OURS)]
    rates = [f"{count / statistics.median(each[name]):.0f}" for each in (written, read) for name in (SMALL, OURS)]
    return [kind, f"{sizes[0] / sizes[1]:.2f}", *rates]


def name_and_parts(number: int) -> tuple[str, KeyParts]:
    """Return a record's name and what it depends on, of the usual lengths."""
    parts = {"file": f"{number}-1734567890123456789", "resolution and crop": f"{number % 97:016x}"}
    return f"photos/{number:010d}.jpg", parts | {"VAE": "0123456789abcdef", "dtype": "fp32"}


def write_indexes(folder: Path, count: int) -> None:
    """Write the indexes of a cache whose shards are holes."""
    for first in range(0, count, PER_SHARD):
        shard = folder / f"rank000-{first // PER_SHARD:05d}"
        with shard.with_suffix(".shard").open("wb") as file:
            os.truncate(file.fileno(), PER_SHARD * RECORD_BYTES)
        with shard.with_suffix(".index.jsonl").open("w") as index:
            for number in range(first, min(first + PER_SHARD, count)):
                name, parts = name_and_parts(number)
                place = {"name": name, "offset": (number - first) * RECORD_BYTES, "length": RECORD_BYTES}
                index.write(json.dumps({**place, "parts": parts, "checksum": f"xxh3:{number:032x}"}) + "\n")


def parse_all_lines(folder: Path) -> dict[tuple[str, str], RecordLocation]:
    """Open a cache as version 0.1 did."""
    places = (entry.location for entry in read_indexes(folder))
    return {(place.name, json.dumps(place.parts, sort_keys=True)): place for place in places}


def opening_row(folder: Path, count: int) -> list[str]:
    """Return the row for opening a cache of that many records, and for finding all of them."""
    write_indexes(folder, count)
    began = time.perf_counter()
    open_index(folder)
    merged = time.perf_counter() - began
    turns = {"lines": partial(parse_all_lines, folder), "index": partial(open_index, folder)}
    seconds = seconds_in_turns(turns, OPENING_ROUNDS)
    lines, index = (statistics.median(seconds[name]) * 1000 for name in ("lines", "index"))
    reader, wanted = ShardReader(folder), [name_and_parts(number) for number in range(count)]
    random.shuffle(wanted)
    some = wanted[: count // 100]
    finding = {
        "hashed": lambda: record_keys(wanted),
        "hashed and found": lambda: reader.index.find(record_keys(wanted)),
        "one by one": lambda: [reader.find(name, parts) for name, parts in some],
    }
    found = {name: statistics.median(each) for name, each in seconds_in_turns(finding, OPENING_ROUNDS).items()}
    found["one by one"] *= count / len(some)
    each = [f"{found[name] / count * 1e6:.2f}" for name in finding]
    return [f"{count:,}", f"{merged:.1f} s", f"{lines:.0f} ms", f"{index:.1f} ms", *each]


def main() -> None:
    """Measure each kind of record and print the tables."""
    torch.set_num_threads(1)  # as in a thread that prefetches
    rows = []
    for count in OPENED:
        with tempfile.TemporaryDirectory() as name:
            rows.append(opening_row(Path(name), count))
    finding = ["µs to hash", "to hash and find", "to find one by one"]
    columns = ["records", "merged once in", "opened by lines", "by the index", *finding]
    print_table(f"opening a cache (median of {OPENING_ROUNDS} rounds in turns)", columns, rows)
    rows = []
    for kind, (record, count) in KINDS.items():
        with tempfile.TemporaryDirectory() as name:
            rows.append(row_of(kind, "written", writing_seconds(Path(name), record, count), count))
            rows.append(row_of(kind, "read", reading_seconds(Path(name), record, count, touched), count))
            rows.append(
                row_of(kind, "read and stacked", reading_seconds(Path(name), record, count, stack_conditioning), count)
            )
    title = f"records per second, page cache warm (median of {ROUNDS} rounds in turns; goal: reading at least 2x)"
    print_table(title, ["record", f"our {OURS}", f"one {PLAIN[:-1]} each", "times faster"], rows)
    rows = []
    for kind, (record, count) in KINDS.items():
        with tempfile.TemporaryDirectory() as name:
            rows.append(compressed_row(Path(name), kind, record, count))
    title = "compressed and plain shards, records per second of one core, read until stacked (normal random numbers)"
    print_table(title, ["record", "size", "written compressed", "plain", "read compressed", "plain"], rows)


if __name__ == "__main__":
    main()
