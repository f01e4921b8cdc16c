"""`data_listings/`: images of each start with version, caption and bucket, and differences of two starts.

`dataset diff` and the model card read them. A start with the data of an earlier one writes nothing: its line
in `settings_history.jsonl` names the same file.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.buckets import bucket_shapes
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.scan.captions import captions_of
from simpletuner.data.scan.comparison import hash_content
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.runs.facts import TIME, Start, read_starts
from simpletuner.system.files.atomic import refuse_special, write_file
from simpletuner.system.files.cache_files import is_plain_folder

if TYPE_CHECKING:
    from simpletuner.preparation.plan import Plan
    from simpletuner.session import Session

# pyarrow comes without types.


LISTINGS = "data_listings"
# The oldest are removed: of 100,000 images with captions of 30 words, one has 6 MB and takes 0.5 s.
KEPT = 10
# Images of a local dataset whose content is kept: a copy has another time, others may have its name.
WITNESSES = 200
# Letters of a caption that are shown; whether it changed is known by its digest.
SHOWN_LETTERS = 120
ROWS_AT_ONCE = 10_000
COLUMNS = pa.schema(
    {
        "id": pa.large_string(),
        "version": pa.large_string(),
        "caption": pa.large_string(),
        "caption_digest": pa.uint64(),
        "bucket": pa.large_string(),
        "held_out": pa.bool_(),
    }
)


@dataclass(frozen=True)
class DataListing:
    """The data of a start: its file's name, and a digest of names, sizes and captions, without machine."""

    key: str
    digest: str
    places: dict[str, str]
    """Folders or addresses of datasets, by id; earlier versions have local ones alone."""
    contents: dict[str, dict[str, str]]
    """Content digests of some images by name, by id of a local dataset; earlier versions have none."""
    table: pa.Table


def record_data_of(session: Session, plan: Plan) -> DataListing | None:
    """Record the data of a start on rank 0; None on other ranks."""
    if not session.world.is_first:
        return None
    return record_data(session.settings.training.output_dir, plan.samples, plan.held_out)


def record_data(output: Path, samples: Samples, held_out: np.ndarray) -> DataListing:
    """Return the listing of a run's data, from the file of an earlier start or written now."""
    path = output / LISTINGS / f"{listing_key(samples, held_out)}.parquet"
    try:
        listing = read_listing(path)
        os.utime(path)  # the last start's is the newest: what that run was trained on is not removed
        return listing
    except (OSError, EnvironmentNotReady):
        listing = list_data(path.stem, samples, held_out)
    if os.path.lexists(path.parent) and not is_plain_folder(path.parent):
        raise EnvironmentNotReady(f"{path.parent} is no folder", "remove it, or move it away")
    path.parent.mkdir(exist_ok=True)
    write_listing(path, listing)
    kept = sorted(path.parent.glob("*.parquet"), key=lambda each: each.stat().st_mtime_ns)
    for old in kept[:-KEPT]:
        old.unlink()
    return listing


def listing_key(samples: Samples, held_out: np.ndarray) -> str:
    """Return a key of the data on this machine, computed without the rows."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(held_out).data)
    for part in samples.parts:
        digest.update(part.checksum("name", "version", "captions").encode())
    return digest.hexdigest()


def list_data(key: str, samples: Samples, held_out: np.ndarray) -> DataListing:
    """Return the rows of all samples; 100,000 take about a second."""
    shapes, of_samples = bucket_shapes(samples.parts) if samples.parts else ([], [])
    names, out = np.array([*map(str, shapes)], dtype=object), np.zeros(len(samples), dtype=bool)
    out[held_out] = True
    lines, columns = xxhash.xxh3_128(), {name: [] for name in COLUMNS.names}
    for part, buckets in zip(samples.parts, of_samples, strict=True):
        is_local = isinstance(part.dataset, LocalImages)
        for name, version, captions in rows_of(part):
            text = "\n".join(captions)
            # Of a local file the version is its size and time of change, and copies differ in the time.
            size = version.partition("-")[0] if is_local else version
            lines.update(repr((part.dataset.id, name, size, text)).encode("utf-8", "backslashreplace"))
            columns["id"].append(f"{part.dataset.id}/{name}")
            columns["version"].append(version)
            columns["caption"].append(text[:SHOWN_LETTERS])
            columns["caption_digest"].append(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))
        columns["bucket"].extend(names[buckets].tolist())
    places = {part.dataset.id: place_of(part) for part in samples.parts}
    contents = {part.dataset.id: contents_of(part) for part in samples.parts if isinstance(part.dataset, LocalImages)}
    table = pa.table({**columns, "held_out": out}, COLUMNS)
    return DataListing(key, lines.hexdigest(), places, contents, table)


def place_of(part: DatasetSamples) -> str:
    dataset = part.dataset
    return str(dataset.instance_data_dir.absolute()) if isinstance(dataset, LocalImages) else part.storage.describe()


def contents_of(part: DatasetSamples) -> dict[str, str]:
    """Return digests of the content of some images, evenly spread."""
    chosen = part.rows[np.unique(np.linspace(0, len(part) - 1, min(len(part), WITNESSES)).astype(int))]
    names = part.table["name"].take(pa.array(chosen)).to_pylist()
    return {name: digest for name in names if (digest := hash_content(part.storage, name))}


def rows_of(part: DatasetSamples) -> Iterator[tuple[str, str, Sequence[str]]]:
    for start in range(0, len(part), ROWS_AT_ONCE):
        rows = part.table.select(["name", "version", "captions"]).take(
            pa.array(part.rows[start : start + ROWS_AT_ONCE])
        )
        for name, version, lines in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            yield name, version, captions_of(part.dataset, name, lines)


def write_listing(path: Path, listing: DataListing) -> None:
    import pyarrow.parquet as pq

    facts = {
        "digest": listing.digest,
        "places": json.dumps(listing.places),
        "contents": json.dumps(listing.contents),
    }
    content = io.BytesIO()
    pq.write_table(listing.table.replace_schema_metadata(facts), content, compression="zstd")
    write_file(path, content.getvalue())


def read_listing_of(output: Path, key: str) -> DataListing:
    """Return a listing of a run by its key. Raises EnvironmentNotReady where it is gone or damaged."""
    path = output / LISTINGS / f"{Path(key).name}.parquet"
    try:
        return read_listing(path)
    except FileNotFoundError:
        raise EnvironmentNotReady(f"there is no {path} any more", f"the last {KEPT} are kept") from None


def read_listing(path: Path) -> DataListing:
    """Return a listing. Raises OSError, or EnvironmentNotReady for a file that is none."""
    import pyarrow.parquet as pq

    refuse_special(path)
    with path.open("rb") as file:
        try:
            table = pq.read_table(file)
            facts = table.schema.metadata
            digest, places = facts[b"digest"].decode(), json.loads(facts[b"places"])
            contents = {each: dict(some) for each, some in json.loads(facts.get(b"contents", b"{}")).items()}
            return DataListing(path.stem, digest, places, contents, table.select(COLUMNS.names).cast(COLUMNS))
        except (pa.ArrowException, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise EnvironmentNotReady(f"{path} is no listing of data: {error}", "remove it") from error


# pyarrow comes without types.


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
    start = recorded_starts(folder)[-1]
    return RecordedData(f"{folder}, {called(start)}", read_listing_of(folder, start.data))


def last_change(folder: Path) -> tuple[RecordedData, RecordedData] | None:
    """Data before and after its last change; None where no start had other data than the one before."""
    starts = recorded_starts(folder)
    for before, after in zip(starts[-2::-1], starts[:0:-1], strict=True):
        if before.data != after.data:
            one, two = (RecordedData(called(each), read_listing_of(folder, each.data)) for each in (before, after))
            return one, two
    return None


def called(start: Start) -> str:
    return f"start of {start.time:{TIME}} at step {start.step:,}"


def compare_data(before: RecordedData, after: RecordedData) -> DataDifference:
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
