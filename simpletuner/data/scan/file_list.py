"""Image files of a dataset as columns: the listing of its store, before any file is opened.

A folder of frames is one row: it holds images and no videos.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from simpletuner.data.config.dataset_types import ImageDataset, SnapshotImages
from simpletuner.data.images.frame_folders import frame_suffixes, is_frame_folder
from simpletuner.data.images.image_formats import UNREAD_BESIDE_VIDEOS, VIDEO_SUFFIXES, read_suffixes, unread_suffixes
from simpletuner.data.scan.other_programs import (
    CAPTION_SUFFIXES,
    TABLE_SUFFIXES,
    captions_beside,
    columns_of,
    folders_of_others,
    is_caption_table,
    shared_captions,
)
from simpletuner.data.storage.storage import CAPTION_SUFFIX, Storage, StoredFile, list_local_folder, stored_file
from simpletuner.errors import DataError

if TYPE_CHECKING:
    from simpletuner.data.tables.table_files import TableFile


@dataclass
class OpenFolder:
    name: str
    frames: list[StoredFile] = field(default_factory=list)
    has_videos: bool = False


def with_folder_rows(
    files: Iterable[StoredFile], note: Callable[[Sequence[StoredFile]], object]
) -> Iterator[StoredFile]:
    """Yield files sorted by the parts of their names, and instead of frames their folders, each after what is
    in it.

    `note` is called with images that are no frames: those next to videos, or in no folder.
    """
    suffixes, open_folders = frame_suffixes(), [OpenFolder("")]

    def leave(until: str) -> Iterator[StoredFile]:
        while not until.startswith(open_folders[-1].name):
            yield from row_of(open_folders.pop())

    def row_of(folder: OpenFolder) -> Iterator[StoredFile]:
        if folder.frames and folder.name and not folder.has_videos:
            yield folder_row(folder.name, folder.frames)
        else:
            note(folder.frames)

    for file in files:
        name = file.name[: file.name.rfind("/") + 1]
        yield from leave(name)
        if name != open_folders[-1].name:
            open_folders.append(OpenFolder(name))
        if (suffix := file.suffix) in suffixes:
            open_folders[-1].frames.append(file)
            continue
        open_folders[-1].has_videos |= suffix in VIDEO_SUFFIXES
        yield file
    for folder in reversed(open_folders):
        yield from row_of(folder)


def folder_row(name: str, frames: Sequence[StoredFile]) -> StoredFile:
    """Folder of frames as one file: its largest frame's size, and a version over all frames."""
    digest = xxhash.xxh3_128()
    for frame in frames:
        digest.update(f"{frame.name}\0{frame.version}\0{frame.problem}\0".encode("utf-8", "surrogateescape"))
    problem = next((f"frame {each.name[len(name) :]}: {each.problem}" for each in frames if each.problem), "")
    return StoredFile(name, max(each.size_bytes for each in frames), f"{len(frames)}-{digest.hexdigest()}", problem)


def local_folder_version(root: Path, name: str) -> str:
    """Return the version that a folder of frames below `root` has now; empty where there is none any more."""
    names = list_local_folder(root, name, frame_suffixes())
    frames = [stored_file(each, partial((root / each).stat)) for each in names]
    return folder_row(name, frames).version if frames else ""


# pyarrow comes without types.


BLOCK_FILES = 65_536
# Columns of a file; `problem` is why it is not opened, or empty.
FILE = pa.schema(
    {"name": pa.large_string(), "size_bytes": pa.int64(), "version": pa.large_string(), "problem": pa.large_string()},
)
CAPTION_VERSION = "caption_version"


@dataclass
class OtherFiles:
    """Files of a store that are not images; plain values, which are kept as JSON."""

    undecodable: list[str] = field(default_factory=list)
    """Names of images that are not UTF-8, with surrogates."""
    not_read: dict[str, int] = field(default_factory=dict)
    """Number of files of other formats, by suffix."""
    example: str = ""
    """Address of one of them."""
    written: list[str] = field(default_factory=list)
    """Addresses of what this run writes among the images."""
    system_folders: dict[str, int] = field(default_factory=dict)
    """Number of folders of other programs that are left out, by name."""
    by_others: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of images from other programs, or with another meaning to them, by kind and folder."""
    beside: dict[str, list[Any]] = field(default_factory=dict)
    """Images with a caption under another name, by how that differs: their number, and the first ones."""
    caption_tables: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of tables of captions that nothing reads, with their columns."""
    shared_captions: list[Any] = field(default_factory=list)
    """Number of caption files that several images share, of these images, and the first ones."""
    table: str = ""
    """Version of the table with captions or sizes."""
    table_remarks: list[str] = field(default_factory=list, compare=False)
    """Sentences about mistakes in the table."""
    unmatched_rows: int = field(default=0, compare=False)
    """Number of its rows without an image."""
    first_unmatched: str = field(default="", compare=False)
    unused_captions: int = 0
    """Number of images with a caption file beside them that caption_strategy passes over."""

    def note(self, files: Sequence[StoredFile], storage: Storage) -> None:
        """Count files that are not read."""
        for file in files:
            self.example = self.example or storage.describe(file.name)
            self.not_read[file.suffix] = self.not_read.get(file.suffix, 0) + 1


@dataclass
class FileList:
    """The image files of a dataset, in the order of their names."""

    table: pa.Table
    """FILE, and the version of what else decides the row: the caption file, or the table that sizes come
    from; empty where there is none."""
    others: OtherFiles
    folders: dict[str, int] = field(default_factory=dict)
    """As in `Listing`."""


def list_images(dataset: ImageDataset, storage: Storage, stop: Callable[[], None]) -> FileList:
    """List a dataset's images, and its caption files if any. Raises DataError for a missing folder."""
    reads_captions = dataset.caption_strategy == "textfile"
    # Where they are not read, they are counted: whoever wrote them expects them to be used.
    own = {CAPTION_SUFFIX} if dataset.caption_strategy in ("textfile", "instanceprompt", "filename") else frozenset()
    # Of a file that is a row of a table the suffix is made up.
    of_files = reads_captions and not isinstance(dataset, SnapshotImages)
    near = CAPTION_SUFFIXES | TABLE_SUFFIXES if of_files else frozenset()
    videos = (VIDEO_SUFFIXES, UNREAD_BESIDE_VIDEOS)
    read, unread = videos if dataset.clips else (read_suffixes(), unread_suffixes())
    try:
        listing = storage.list_files(read | unread | own | near)
    except FileNotFoundError:
        raise DataError(
            f"dataset `{dataset.id}`: there is no folder {storage.describe()}",
            f"set instance_data_dir to your {dataset.noun}s",
        ) from None
    table = table_of(dataset, storage)
    others, images, captions = OtherFiles(table=table.version() if table else ""), [], []
    beside, tables = [], []
    by_ending = any(each.name_ending for each in (dataset, *dataset.conditioning))
    files = iter(listing.files)
    if has_folders := bool(dataset.clips and dataset.clips.frame_folders_fps):
        files = with_folder_rows(files, partial(others.note, storage=storage))
    while block := list(islice(files, BLOCK_FILES)):
        stop()
        left = [file for file in block if file.suffix in unread]
        others.note([file for file in left if not (table and table.is_file(file.name))], storage)
        found = [file for file in block if file.suffix in read or (has_folders and is_frame_folder(file.name))]
        if by_ending:
            found = [file for file in found if dataset.has_file(PurePosixPath(file.name).stem)]
        images.append(batch_of(decodable(found, others.undecodable)))
        captions.append(batch_of(decodable([file for file in block if file.suffix in own], [])))
        beside.append(batch_of(decodable([file for file in block if file.suffix in near], []))["name"])
        tables += [file.name for file in block if file.suffix in near and is_caption_table(file.name)]
    others.system_folders = listing.system_folders
    others.written += map(storage.describe, listing.left_out)
    listed, texts = (pa.Table.from_batches(batches, FILE) for batches in (images, captions))
    versions = others.table if table and table.with_own_columns().gives_sizes else ""
    found = caption_files(listed, texts)
    if not reads_captions:
        others.unused_captions, found = len(found.drop_null()), None
    else:
        others.shared_captions = shared_captions(listed["name"], found)
    listed = with_caption_versions(listed, texts, found, versions)
    if dataset.dataset_type != "conditioning":
        others.by_others = folders_of_others(listed["name"])
    if near and len(uncaptioned := listed.filter(pc.equal(listed[CAPTION_VERSION], ""))["name"]):
        others.beside = captions_beside(uncaptioned, beside)
        others.caption_tables = {storage.describe(name): columns_of(storage, name) for name in tables}
    return FileList(listed, others, listing.folders)


def decodable(files: list[StoredFile], undecodable: list[str]) -> Iterator[StoredFile]:
    """Yield files with storable names; ids go into JSON, messages and hashes: no undecodable bytes."""
    for file in files:
        try:
            file.name.encode()
        except UnicodeEncodeError:
            undecodable.append(file.name)
        else:
            yield file


def printable(text: str) -> str:
    """Text with undecodable bytes, such as in a folder's name, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def batch_of(files: Iterator[StoredFile]) -> pa.RecordBatch:
    rows = [(file.name, file.size_bytes, file.version, printable(file.problem)) for file in files]
    columns = zip(*rows, strict=True) if rows else [()] * len(FILE)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, FILE, strict=True)], schema=FILE
    )


def join(columns: Sequence[pa.ChunkedArray], separator: str = "") -> pa.ChunkedArray:
    return pc.binary_join_element_wise(*columns, pa.scalar(separator, pa.large_string()))


def caption_files(images: pa.Table, captions: pa.Table) -> pa.ChunkedArray:
    """Return the row of each image's caption file, or null."""
    names = pc.replace_substring_regex(images["name"], r"(/|\.[^./]*)$", CAPTION_SUFFIX)
    return pc.index_in(names, value_set=captions["name"])


def with_caption_versions(
    images: pa.Table, captions: pa.Table, found: pa.ChunkedArray | None, default: str
) -> pa.Table:
    # The reason why a file is not read counts as its version.
    if not len(captions) or found is None:
        return images.append_column(CAPTION_VERSION, pa.repeat(pa.scalar(default, pa.large_string()), len(images)))
    versions = join([captions["version"], captions["problem"]])
    return images.append_column(CAPTION_VERSION, pc.fill_null(versions.take(found), ""))


def table_of(dataset: ImageDataset, storage: Storage) -> TableFile | None:
    """The table of captions or sizes that a dataset names."""
    if not dataset.parquet:
        return None
    from simpletuner.data.tables.table_files import TableFile  # with pyarrow's readers of CSV and JSON

    return TableFile(dataset, storage, dataset.parquet)
