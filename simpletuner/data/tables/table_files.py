"""Read a table of images: its columns, whatever its format, as identifiers, captions and sizes.

Arrow's threads are never used: now and then they abort a process at its exit. Parts of a table are read in
our own.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from simpletuner.data.config.caption_rules import BLANK_TEXT
from simpletuner.data.config.dataset_parts import FORMATS, PARQUET, TABLE_STRATEGIES, TableSettings, table_files
from simpletuner.data.config.dataset_types import LARGEST_PIXELS, BucketImages, ImageDataset
from simpletuner.data.storage.storage import Storage, UnreadableFileError
from simpletuner.errors import DataError
from simpletuner.settings.declared.errors import nearest
from simpletuner.system.files.checksums import stream_checksum, value_checksum
from simpletuner.system.files.regular_files import check_regular
from simpletuner.system.processes.threads import map_in_threads

ROWS = 65_536
# A longer line is refused; pyarrow's own limit is 1 MiB.
JSON_BLOCK_BYTES = 16 << 20
# Of what pyarrow says.
MAX_LETTERS = 200
MAX_COLUMNS = 20
CAPTION_COLUMN = "caption"
SIZE_COLUMNS = {"width_column": "width", "height_column": "height"}
LENGTH_COLUMNS = {"num_frames_column": "num_frames", "fps_column": "fps"}
"""Default columns of video lengths, read if the dataset names none."""

# Columns of a table row; sizes in px, 0 if unusable; an image has 1 frame and 0 per second.
ROW = pa.schema(
    {
        "identifier": pa.large_string(),
        "captions": pa.large_list(pa.large_string()),
        "width": pa.int32(),
        "height": pa.int32(),
        "frames": pa.int32(),
        "fps": pa.float64(),
    }
)


@dataclass(frozen=True)
class TableFile:
    """Table of a dataset: a local file, or, for images in a bucket and a relative path, an object there."""

    dataset: ImageDataset
    storage: Storage
    settings: TableSettings
    keys: Mapping[str, str] = field(default_factory=dict)
    """Names of settings, if they differ from the keys of `parquet`."""

    @property
    def address(self) -> str:
        return self.storage.describe(self.name) if self.is_stored else str(self.settings.path)

    @property
    def name(self) -> str:
        return self.settings.path.as_posix()

    @property
    def is_stored(self) -> bool:
        """True if the table is in the same store as the images."""
        return isinstance(self.dataset, BucketImages) and not self.settings.path.is_absolute()

    def settings_id(self) -> str:
        values = self.settings.model_dump(mode="json", exclude={"path"})
        return value_checksum({"columns": values, "metadata_backend": self.dataset.metadata_backend})[-8:]

    def version(self) -> str:
        """Text that changes with the table's content, and with what is taken from it. Raises DataError."""
        checksums = []
        for part in self.parts():
            with part._opened() as file:
                checksums.append(stream_checksum(file)[-16:])
        whole = checksums[0] if len(checksums) == 1 else value_checksum({"files": checksums})[-16:]
        return f"{self.settings_id()}-{whole}"

    def parts(self) -> list[TableFile]:
        """Files in the order of their names, each as a table. Raises DataError where there is none."""
        files = [self.settings.path] if self.is_stored else table_files(self.settings.path)
        if not files:
            raise self.error("names no file", f"correct the pattern in {self.keys.get('path', 'parquet.path')}")
        return [replace(self, settings=self.settings.model_copy(update={"path": each})) for each in files]

    def is_file(self, name: str) -> bool:
        if self.is_stored:
            return name == self.name
        return Path(self.storage.describe(name)).resolve() in {each.settings.path.resolve() for each in self.parts()}

    def with_own_columns(self) -> TableFile:
        """Return this table with names of columns if none are given: those that it has. Raises DataError."""
        settings, chosen = self.settings, dict[str, object]()
        if self.dataset.caption_strategy in TABLE_STRATEGIES and not settings.caption_columns:
            chosen["caption_column"] = [CAPTION_COLUMN]
        if self.dataset.metadata_backend == PARQUET and not settings.size_columns:
            with self.parts()[0]._opened() as file:
                schema = SCHEMAS[self.kind](file)
            numbers = {name for name in schema.names if is_number(schema.field(name).type)}
            chosen |= SIZE_COLUMNS if numbers.issuperset(SIZE_COLUMNS.values()) else {}
            if self.dataset.clips:
                own = settings.model_dump(include={*LENGTH_COLUMNS})
                chosen |= {key: name for key, name in LENGTH_COLUMNS.items() if not own[key] and name in numbers}
        return replace(self, settings=settings.model_copy(update=chosen))

    @property
    def gives_sizes(self) -> bool:
        """True if the table replaces image headers, for a table with named columns."""
        settings, clips = self.settings, self.dataset.clips
        has_lengths = not clips or (settings.num_frames_column and (settings.fps_column or not clips.fps))
        return self.dataset.may_have_sizes_from_table and bool(settings.size_columns and has_lengths)

    @property
    def kind(self) -> str:
        return FORMATS[self.settings.path.suffix.lower()]

    def rows(self) -> pa.Table:
        """Read the table (ROW), whose columns are named. Raises DataError."""
        files = self.parts()
        if len(files) > 1:
            return pa.concat_tables([each.rows() for each in files])
        return files[0]._rows()

    def _rows(self) -> pa.Table:
        with self._opened() as file:
            parts = map_in_threads(
                lambda part: [self._row_batch(each) for each in part],
                READERS[self.kind](file, self.settings, self._require),
            )
            return pa.Table.from_batches([batch for part in parts for batch in part], ROW)

    def error(self, why: str, hint: str = "") -> DataError:
        return DataError(
            f"dataset `{self.dataset.id}`: the table {self.address} {why}",
            hint or "see `Tables` in docs/tables-and-stores.md",
        )

    @contextmanager
    def _opened(self) -> Iterator[pa.NativeFile]:
        """Open the table; what is raised while it is read becomes a DataError."""
        try:
            yield self._open()
        except FileNotFoundError:
            where = "below the prefix, or an absolute local one" if self.is_stored else "as it is seen from here"
            raise self.error(
                "does not exist", f"set {self.keys.get('path', 'parquet.path')} to its path, {where}"
            ) from None
        except UnreadableFileError as error:
            raise self.error(str(error)) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            why = f"cannot be read as {self.kind}: {plain_reason(error)}"
            raise self.error(why, HINTS.get(self.kind, "")) from None

    def _open(self) -> pa.NativeFile:
        if self.is_stored:
            return pa.BufferReader(self.storage.open(self.name).read())
        check_regular(self.settings.path)
        return pa.OSFile(self.address)

    def _require(self, names: Sequence[str]) -> list[str]:
        """Columns that are asked for. Raises DataError where the table lacks one, or has it twice."""
        asked = wanted_columns(self.settings)
        for key, name in asked:
            if name not in names:
                shown = ", ".join(f"`{each}`" for each in names[:MAX_COLUMNS]) or "none"
                more = f" and {len(names) - MAX_COLUMNS:,} more" * (len(names) > MAX_COLUMNS)
                raise self.error(
                    f"has no column `{name}`{nearest(name, names)}",
                    f"correct {self.keys.get(key, f'parquet.{key}')}; its columns: {shown}{more}",
                )
            if names.count(name) > 1:
                raise self.error(f"has two columns `{name}`", "rename one of them")
        return list(dict.fromkeys(name for _, name in asked))

    def _row_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        batch.validate(full=True)  # Parquet's texts may hold anything
        settings = self.settings
        identifiers = self._texts(batch, settings.filename_column, or_number=True)
        captions = [self._captions(batch, name) for name in settings.caption_columns]
        sizes = [self._sides(batch, name) for name in settings.size_columns] or [np.zeros(len(batch), np.int32)] * 2
        # A size that is missing or absurd is read from the header instead.
        usable = (sizes[0] > 0) & (sizes[1] > 0) & (sizes[0].astype(np.int64) * sizes[1] <= LARGEST_PIXELS)
        frames, fps = np.ones(len(batch), np.int32), np.zeros(len(batch))
        if (clips := self.dataset.clips) and settings.num_frames_column:
            frames = self._sides(batch, settings.num_frames_column)
            fps = self._rates(batch, settings.fps_column) if settings.fps_column else fps
            usable &= (frames > 0) & ((fps > 0) | (clips.fps is None))
        columns = [identifiers, first_captions(captions, len(batch)), *(np.where(usable, side, 0) for side in sizes)]
        columns += [frames, fps]
        return pa.record_batch(
            [pa.array(each, field.type) for each, field in zip(columns, ROW, strict=True)], schema=ROW
        )

    def _texts(self, batch: pa.RecordBatch, name: str, or_number: bool = False) -> pa.Array:
        column = plain(batch.column(name))
        if not is_text(column.type) and not (or_number and pa.types.is_integer(column.type)):
            raise self.error(f"has {column.type} in column `{name}`, not text")
        return pc.fill_null(column.cast(pa.large_string()), "")

    def _captions(self, batch: pa.RecordBatch, name: str) -> pa.LargeListArray:
        """Return the captions of each row in one column: a text, or a list of them."""
        column = batch.column(name)
        if is_list(column.type):
            values, parents = pc.list_flatten(column), pc.list_parent_indices(column).to_numpy()
            texts = self._texts(pa.record_batch([values], [name]), name)
        else:
            texts, parents = self._texts(batch, name), np.arange(len(batch))
        texts = pc.utf8_trim_whitespace(texts)
        texts = pc.if_else(pc.match_substring_regex(texts, BLANK_TEXT.pattern), "", texts)
        return captions_by_row(texts, parents, len(batch))

    def _rates(self, batch: pa.RecordBatch, name: str) -> np.ndarray:
        """Return frames per second, 0 where they are missing or no number."""
        rates = self._numbers(batch, name)
        return np.where(np.isfinite(rates) & (rates > 0), rates, 0.0)

    def _numbers(self, batch: pa.RecordBatch, name: str) -> np.ndarray:
        column = plain(batch.column(name))
        if not is_number(column.type):
            raise self.error(f"has {column.type} in column `{name}`, not whole numbers")
        return pc.fill_null(column.cast(pa.float64(), safe=False), 0).to_numpy(zero_copy_only=False)

    def _sides(self, batch: pa.RecordBatch, name: str) -> np.ndarray:
        """Side of each image, or how many frames each video has; 0 where it is missing or no size."""
        sides = self._numbers(batch, name)
        return np.where((sides > 0) & (sides <= LARGEST_PIXELS) & (sides == np.floor(sides)), sides, 0).astype(np.int32)


def wanted_columns(settings: TableSettings) -> list[tuple[str, str]]:
    return [
        ("filename_column", settings.filename_column),
        *(("caption_column", name) for name in settings.caption_column),
        *(("fallback_caption_column", name) for name in settings.caption_columns[len(settings.caption_column) :]),
        *zip(("width_column", "height_column"), settings.size_columns, strict=False),
        *((key, name) for key in LENGTH_COLUMNS if (name := getattr(settings, key))),
    ]


Require = Callable[[Sequence[str]], list[str]]


Parts = Iterator[Iterable[pa.RecordBatch]]
"""The batches of a table, in parts that may be read at the same time."""


def read_parquet(file: pa.NativeFile, settings: TableSettings, require: Require) -> Parts:
    opened = pq.ParquetFile(file, pre_buffer=False)
    columns = require(opened.schema_arrow.names)
    for group in range(opened.num_row_groups):
        reader = pq.ParquetFile(file, metadata=opened.metadata, pre_buffer=False)  # one is for one thread
        # In batches: reused memory costs less than new memory, gigabytes for a whole table.
        yield reader.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False)


def read_csv(file: pa.NativeFile, settings: TableSettings, require: Require) -> Parts:
    """Read texts as they are written: `0001` is a name, not a number."""
    texts = dict.fromkeys([settings.filename_column, *settings.caption_columns], pa.string())
    numbers = filter(None, [*settings.size_columns, settings.num_frames_column, settings.fps_column])
    return with_columns(
        pa_csv.read_csv(
            file,
            pa_csv.ReadOptions(use_threads=False),
            pa_csv.ParseOptions(newlines_in_values=True),
            pa_csv.ConvertOptions(column_types=texts | dict.fromkeys(numbers, pa.float64())),
        ),
        require,
    )


def read_json(file: pa.NativeFile, settings: TableSettings, require: Require) -> Parts:
    return with_columns(pa_json.read_json(file, pa_json.ReadOptions(False, JSON_BLOCK_BYTES)), require)


def with_columns(table: pa.Table, require: Require) -> Parts:
    return ([each] for each in table.select(require(table.column_names)).to_batches(ROWS))


READERS: Mapping[str, Callable[[pa.NativeFile, TableSettings, Require], Parts]] = {
    "Parquet": read_parquet,
    "CSV": read_csv,
    "JSON lines": read_json,
}
SCHEMAS: Mapping[str, Callable[[pa.NativeFile], pa.Schema]] = {
    "Parquet": pq.read_schema,
    "CSV": lambda file: (
        pa_csv.open_csv(
            file, pa_csv.ReadOptions(use_threads=False), pa_csv.ParseOptions(newlines_in_values=True)
        ).schema
    ),
    "JSON lines": lambda file: pa_json.open_json(file, pa_json.ReadOptions(False, JSON_BLOCK_BYTES)).schema,
}
"""The columns of a table by its first rows."""
HINTS = {
    "CSV": "commas between columns, a first line with their names, quotes around texts with commas, UTF-8",
    "JSON lines": "write one JSON object per line, not a list of them",
}


def plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind) or kind == pa.string_view()
    )


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def captions_by_row(texts: pa.Array, parents: np.ndarray, rows: int) -> pa.LargeListArray:
    """Non-empty texts as one list per row; `parents` (texts,) are the rows, in order."""
    filled = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)
    counts = np.bincount(parents[filled], minlength=rows)
    texts = texts if filled.all() else texts.filter(pa.array(filled))
    return pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]), texts)


def first_captions(columns: Sequence[pa.LargeListArray], rows: int) -> pa.LargeListArray:
    chosen = pa.LargeListArray.from_arrays(np.zeros(rows + 1, np.int64), pa.array([], pa.large_string()))
    for column in reversed(columns):
        has_some = pc.greater(pc.list_value_length(column), 0)
        chosen = column if pc.all(has_some).as_py() else pc.if_else(has_some, column, chosen)
    return chosen


def plain_reason(error: object) -> str:
    """pyarrow's message in one line of printable characters."""
    line = " ".join((error.strerror if isinstance(error, OSError) and error.strerror else str(error)).split())
    shown = line if line.isprintable() else json.dumps(line)
    return shown if len(shown) <= MAX_LETTERS else f"{shown[:MAX_LETTERS]}..."
