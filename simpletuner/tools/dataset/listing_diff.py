"""Differences between the data of two starts: images that came, went or changed, captions, buckets."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from simpletuner.errors import SettingsError
from simpletuner.training.run_folder.data_listing import DataListing, read_listing_of
from simpletuner.training.run_folder.run_times import TIME, Start, read_starts


@dataclass(frozen=True)
class RecordedData:
    """The data of a start, and what to call that start."""

    name: str
    listing: DataListing


@dataclass(frozen=True)
class DataDifference:
    """Ids of images by what happened to them, and the number of images by bucket, before and after."""

    before: str
    after: str
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Size or content, by the version that the storage gives: of a local file size and time of change."""
    recaptioned: list[tuple[str, str, str]] = field(default_factory=list)
    """Id, caption before, caption after: no more than the beginnings."""
    moved: dict[str, int] = field(default_factory=dict)
    """Images that are in another bucket now, by `BEFORE -> AFTER`."""
    held_out: list[str] = field(default_factory=list)
    """Images that are held out now and were not, or the other way round."""
    buckets: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        found = (self.added, self.removed, self.changed, self.recaptioned, self.moved, self.held_out)
        return not any(found)


def recorded_starts(folder: Path) -> list[Start]:
    """Return the starts whose data is recorded. Raises SettingsError where there is none."""
    if starts := [start for start in read_starts(folder) if start.data]:
        return starts
    raise SettingsError(f"{folder} has no record of its data", "each start of a run writes one when it begins to train")


def last_data(folder: Path) -> RecordedData:
    """Return the data of the last start of a run."""
    start = recorded_starts(folder)[-1]
    return RecordedData(f"{folder}, {called(start)}", read_listing_of(folder, start.data))


def last_change(folder: Path) -> tuple[RecordedData, RecordedData] | None:
    """Return the data before and after its last change; None where no start had other data than the one before."""
    starts = recorded_starts(folder)
    for before, after in zip(starts[-2::-1], starts[:0:-1], strict=True):
        if before.data != after.data:
            one, two = (RecordedData(called(each), read_listing_of(folder, each.data)) for each in (before, after))
            return one, two
    return None


def called(start: Start) -> str:
    return f"start of {start.time:{TIME}} at step {start.step:,}"


def compare_data(before: RecordedData, after: RecordedData) -> DataDifference:
    """Return what differs, image by image."""
    one, two = (rows_by_id(each.listing.table) for each in (before, after))
    common = [(name, one[name], two[name]) for name in one if name in two]
    moves = Counter(f"{old['bucket']} -> {new['bucket']}" for _, old, new in common if old["bucket"] != new["bucket"])
    counts = [Counter(row["bucket"] for row in rows.values()) for rows in (one, two)]
    return DataDifference(
        before.name,
        after.name,
        added=sorted(two.keys() - one.keys()),
        removed=sorted(one.keys() - two.keys()),
        changed=[name for name, old, new in common if old["version"] != new["version"]],
        recaptioned=[
            (name, old["caption"], new["caption"])
            for name, old, new in common
            if old["caption_digest"] != new["caption_digest"]
        ],
        moved=dict(moves.most_common()),
        held_out=[name for name, old, new in common if old["held_out"] != new["held_out"]],
        buckets={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
    )


def rows_by_id(table: pa.Table) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in rows_of_table(table)}


def rows_of_table(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches():
        yield from batch.to_pylist()
