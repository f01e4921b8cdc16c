"""A downloaded dataset of the Hugging Face hub as a store: each row of its Parquet files is an image or a
video.

Rows are files by name, `train-00000-of-00002/00000017.jpg` and `.txt`, so all else works as for a folder. A
row group is read as a whole, since Parquet compresses it so; a few of them stay in memory.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import codecs
import io
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from simpletuner.data.config.dataset_parts import FORMATS
from simpletuner.data.config.dataset_types import SnapshotImages, belongs_to_split
from simpletuner.data.storage.storage import CAPTION_SUFFIX, Listing, StoredFile, UnreadableFileError
from simpletuner.errors import DataError, first_line
from simpletuner.settings.declared.errors import did_you_mean

# Row groups in memory, of most datasets 50 to 200 MB each.
GROUPS = 4
READ_ERRORS = (pa.ArrowException, OSError, ValueError)


@dataclass(frozen=True)
class RowGroup:
    """The images or videos (encoded, as bytes) and captions of some consecutive rows."""

    first: int
    images: pa.ChunkedArray
    captions: pa.ChunkedArray | None
    paths: pa.ChunkedArray | None = None

    def lacking(self, index: int) -> str:
        """Description of a row without an image."""
        why, path = "has no bytes in its row", self.paths[index].as_py() if self.paths is not None else None
        if not path or "/" not in path:  # else the name that a file had, which any row may keep
            return why
        return (
            f"{why}, but the path {path[:200]}, which is not followed: `push_to_hub` of datasets embeds images, "
            "`to_parquet` of an imagefolder does not"
        )


class SnapshotStorage:
    """The Parquet files of one split below a folder."""

    concurrent_reads = 1

    def __init__(self, dataset: SnapshotImages) -> None:
        self.dataset, self.folder = dataset, dataset.dataset_name
        self._groups: OrderedDict[tuple[str, int], RowGroup] = OrderedDict()
        self._lock = threading.Lock()

    def list_files(self, suffixes: Collection[str]) -> Listing:
        if not self.folder.is_dir():
            raise FileNotFoundError(self.folder)
        files = sorted((path.relative_to(self.folder) for path in self._parquet_files()), key=lambda path: path.parts)
        if not files:
            raise DataError(
                f"dataset `{self.dataset.id}`: no Parquet file of the split `{self.dataset.split}` is in {self.folder}",
                self._hint_of_other_forms()
                or "set `split` to what the names of the files begin with, such as train or 0; an empty one takes all",
            )
        return Listing(self._rows(files, suffixes))

    def _hint_of_other_forms(self) -> str:
        """Hint for other forms of a dataset: images beside a table, other forms on the hub, save_to_disk."""
        if any(self.folder.rglob("*.arrow")):
            split = self.dataset.split or "train"
            part = f'["{split}"]' if (self.folder / "dataset_dict.json").exists() else ""
            return (
                "it was written by `save_to_disk` of datasets, whose .arrow files are not read: "
                f'`load_from_disk("{self.folder}"){part}.to_parquet("OTHER/{split}.parquet")` writes what is'
            )
        table = next((path for path in sorted(self.folder.glob("metadata.*")) if path.suffix in FORMATS), None)
        if table is None:
            return ""
        columns = f'{{"path": "{table}", "filename_column": "file_name", "caption_column": "text"}}'
        return (
            f"images beside a table have type local, instance_data_dir, caption_strategy parquet and parquet {columns}"
        )

    def list_folder(self, name: str, suffixes: Collection[str]) -> list[str]:
        return []  # rows have no folders

    def open(self, name: str) -> BinaryIO:
        group, index = self._find(name)
        content = group.images[index].as_py()
        if content is None:
            raise UnreadableFileError(group.lacking(index))
        return io.BytesIO(content)

    def open_header(self, name: str) -> BinaryIO:
        return self.open(name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        group, index = self._find(name)
        if group.captions is None:
            raise FileNotFoundError(name)
        value = group.captions[index].as_py()
        text = "\n".join(map(str, value)) if isinstance(value, list) else str(value or "")
        if len(content := text.encode()) > limit_bytes:
            raise UnreadableFileError(f"has {len(content):,} bytes; at most {limit_bytes:,} are read")
        return codecs.BOM_UTF8 + content  # whatever caption_encoding says of files

    def describe(self, name: str = "") -> str:
        return str(self.folder / name)

    def _parquet_files(self) -> Iterator[Path]:
        for path in self.folder.rglob("*.parquet"):
            if belongs_to_split(path.relative_to(self.folder), self.dataset.split):
                yield path

    def _rows(self, files: list[Path], suffixes: Collection[str]) -> Iterator[StoredFile]:
        default = ".mp4" if self.dataset.clips else ".png"
        for file in files:
            found = (self.folder / file).stat()
            stem, version = file.with_suffix("").as_posix(), f"{found.st_size}-{found.st_mtime_ns}"
            for row, named in enumerate(self._suffixes(file)):
                # Content decides what a file is; a row must not be lost for the name that its file once had.
                suffix = named if named in suffixes else default
                for each in (suffix, CAPTION_SUFFIX) if self.dataset.caption_column else (suffix,):
                    if each in suffixes:
                        yield StoredFile(f"{stem}/{row:08}{each}", 0, version)

    def _suffixes(self, file: Path) -> list[str]:
        """Suffix of each row, from the file's own name; empty if it has none."""
        column = self.dataset.content_column
        try:
            opened = self._opened(file)
            if f"{column}.path" not in leaf_names(opened):
                return [""] * opened.metadata.num_rows
            table = opened.read(columns=[f"{column}.path"], use_threads=False)
            paths = table[column].combine_chunks().field("path").to_pylist()
        except READ_ERRORS as error:
            raise self._error(file, error) from None
        return [PurePosixPath(path or "").suffix.lower() for path in paths]

    def _opened(self, file: Path) -> pq.ParquetFile:
        """Raises DataError for a file without the columns that are asked for."""
        # pre_buffer reads in Arrow's threads, which may abort a process at its exit (scan/scan.py).
        opened = pq.ParquetFile(self.folder / file, pre_buffer=False)
        names = opened.schema_arrow.names
        column = self.dataset.content_column
        wanted = {self.dataset.content_key: column, "caption_column": self.dataset.caption_column}
        for key, name in wanted.items():
            if name and name not in names:
                hint = did_you_mean(name, names) or f"set {key} to one of {', '.join(names)}"
                raise DataError(f"dataset `{self.dataset.id}`: {self.folder / file} has no column `{name}`", hint)
        kind, noun, key = opened.schema_arrow.field(column).type, self.dataset.noun, self.dataset.content_key
        if not holds_files(kind):
            addresses = "; one of addresses is read by type csv" if is_text(kind) else ""
            raise DataError(
                f"dataset `{self.dataset.id}`: column `{column}` of {self.folder / file} holds no {noun}s",
                f"a column of {noun}s holds their bytes, or `bytes` and `path`; name it in {key}{addresses}",
            )
        return opened

    def _find(self, name: str) -> tuple[RowGroup, int]:
        """Return the row group of a file by name, and the row's place in it. Raises UnreadableFileError."""
        stem, _, number = name.rpartition("/")
        row = int(PurePosixPath(number).stem)
        with self._lock:
            try:
                return self._group(stem, row)
            except READ_ERRORS as error:
                raise UnreadableFileError(f"cannot be read: {first_line(error)}") from None

    def _group(self, stem: str, row: int) -> tuple[RowGroup, int]:
        for key, group in self._groups.items():
            if key[0] == stem and 0 <= row - group.first < len(group.images):
                self._groups.move_to_end(key)
                return group, row - group.first
        opened = self._opened(Path(f"{stem}.parquet"))
        starts = [0, *accumulate(opened.metadata.row_group(n).num_rows for n in range(opened.num_row_groups))]
        number = bisect_right(starts, row) - 1
        image, caption = self.dataset.content_column, self.dataset.caption_column
        leaf = f"{image}.bytes" if f"{image}.bytes" in leaf_names(opened) else image
        path = f"{image}.path" if f"{image}.path" in leaf_names(opened) and leaf != image else ""
        columns = [*filter(None, (leaf, path, caption))]
        table = opened.read_row_group(number, columns=columns, use_threads=False)
        images = table[image].combine_chunks()
        paths = pa.chunked_array([images.field("path")]) if path else None
        images = pa.chunked_array([images.field("bytes") if pa.types.is_struct(images.type) else images])
        group = RowGroup(starts[number], images, table[caption] if caption else None, paths)
        self._groups[stem, number] = group
        if len(self._groups) > GROUPS:
            self._groups.popitem(last=False)
        return group, row - group.first

    def _error(self, file: Path, error: Exception) -> DataError:
        return DataError(
            f"dataset `{self.dataset.id}`: cannot read {self.folder / file}: {first_line(error)}", "download it again"
        )


def leaf_names(opened: pq.ParquetFile) -> list[str]:
    """Return the columns of a file, those within a struct as `image.bytes`."""
    return [opened.schema.column(number).path for number in range(len(opened.schema))]


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def holds_files(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and holds_files(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
