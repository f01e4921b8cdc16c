"""Scans of image and video files, as columns: sizes from headers, captions from text files. Nothing is decoded.

A scan does not depend on resolution, crop or limits, so a kept one serves a run with others. Scans are kept in Arrow
files, with checksums in their names: files cut short by a kill or a bad disk are not read.

A folder is compared with its kept scan by the modification times of directories, not of files. Adding,
renaming or removing a file changes its directory's time, so a start looks at ten thousand folders instead of
ten million files, which takes a minute. Rewriting a file in place changes no directory:
`stale_file_watcher.py` looks for such files while the run trains.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.frame_folders import frame_suffixes, is_frame_folder, read_folder_header
from simpletuner.data.images.images import DECODE_ERRORS, ImageHeader, read_header
from simpletuner.data.images.videos import read_video_header
from simpletuner.data.scan.captions import form_of, lines_of, read_caption_file
from simpletuner.data.scan.file_list import CAPTION_VERSION, FILE, FileList, OtherFiles, join, printable
from simpletuner.data.storage.storage import MAX_BYTES, LocalStorage, Storage, UnreadableFileError
from simpletuner.errors import explain_system_errors
from simpletuner.system.files.atomic import create_new, remove, unfinished_path
from simpletuner.system.files.checksums import file_checksum
from simpletuner.system.files.mounts import read_mounts, rename_over
from simpletuner.system.files.regular_files import check_regular

# Columns of an image or a video: sizes in px as displayed, 0 with a `problem`; frames, 1 for an image; frames
# per second, 0 if unknown; true of a video with a sound track; lines of the caption file or captions of the
# table, or the reason for having none; and the kind of text that the lines form (`captions.py`).
SCANNED = pa.schema(
    [
        *FILE,
        pa.field(CAPTION_VERSION, pa.large_string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("frames", pa.int32()),
        pa.field("fps", pa.float64()),
        pa.field("animated", pa.bool_()),
        pa.field("sound", pa.bool_()),
        pa.field("captions", pa.large_list(pa.large_string())),
        pa.field("caption_problem", pa.large_string()),
        pa.field("caption_form", pa.large_string()),
    ]
)
NO_ROW = "has no row in the table"
"""`caption_problem` of an image outside the dataset, which metadata_backend=parquet defines by its table."""


@dataclass(frozen=True)
class Scan:
    """The images of one dataset: their rows (SCANNED), and the other files of its store."""

    dataset: ImageDataset
    storage: Storage
    table: pa.Table
    others: OtherFiles
    conditioning: tuple[Scan, ...] = ()
    """Scans of the datasets in `conditioning_data`."""


def scan_files(dataset: ImageDataset, storage: Storage, files: Sequence[Mapping[str, object]]) -> pa.RecordBatch:
    """Read headers and captions of files (rows of a `FileList`), in their order."""
    read = partial(scan_file, dataset, storage)
    if storage.concurrent_reads == 1:  # a thread costs more than it saves where files are on a disk
        return pa.RecordBatch.from_pylist(list(map(read, files)), SCANNED)
    with ThreadPoolExecutor(storage.concurrent_reads) as pool:
        return pa.RecordBatch.from_pylist(list(pool.map(read, files)), SCANNED)


def scan_file(dataset: ImageDataset, storage: Storage, file: Mapping[str, Any]) -> dict[str, object]:
    row = {
        **file,
        "width": 0,
        "height": 0,
        "frames": 1,
        "fps": 0.0,
        "animated": False,
        "sound": False,
        "captions": [],
        "caption_problem": "",
        "caption_form": "",
    }
    try:
        check_readable(file)
        header = read_file_header(dataset, storage, file["name"])
    except DECODE_ERRORS as error:
        return {**row, "problem": printable(str(error)) or type(error).__name__}
    width, height = header.size
    row |= {"width": width, "height": height, "frames": header.frames, "fps": header.fps}
    row |= {"animated": header.animated and not dataset.clips, "sound": header.has_sound}
    if not file[CAPTION_VERSION] or dataset.caption_strategy != "textfile":  # no caption file, or none is wanted
        return row
    try:
        text = read_caption_file(storage, file["name"], dataset.caption_encoding)
    except UnreadableFileError as error:
        return {**row, "caption_problem": str(error)}
    form = form_of(text)
    return {**row, "captions": lines_of(text, form), "caption_form": form}


def read_file_header(dataset: ImageDataset, storage: Storage, name: str) -> ImageHeader:
    """Raises one of DECODE_ERRORS."""
    if is_frame_folder(name):
        return read_folder_header(storage.list_folder(name, frame_suffixes()), storage.open_header)
    with storage.open_header(name) as opened:
        return read_video_header(opened) if dataset.clips else read_header(opened)


def check_readable(file: Mapping[str, Any]) -> None:
    """Raise ValueError for a file that is not even opened."""
    if file["problem"]:
        raise ValueError(file["problem"])
    if file["size_bytes"] > MAX_BYTES:
        raise ValueError(f"has {file['size_bytes']:,} bytes; at most {MAX_BYTES:,} are read")


# pyarrow comes without types.


SUFFIX = ".arrow"
ROWS = 65_536
META = b"simpletuner"
IDENTITY = ("name", "version", CAPTION_VERSION)
"""Files that agree in these columns have the same row in a scan."""


def write_table(folder: Path, kind: str, table: pa.Table, meta: Mapping[str, object] | None = None) -> str:
    """Write `kind`-CHECKSUM.arrow, and return that name. Raises EnvironmentNotReady."""
    path = unfinished_path(folder / secrets.token_hex(8))
    schema = table.schema.with_metadata({META: json.dumps(meta or {}).encode()})
    with explain_system_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Python's file: Arrow's own would call a full disk "Error writing bytes to file. Detail: ..."
            with create_new(path) as file, pa.ipc.new_stream(file, schema) as writer:
                writer.write_table(table, max_chunksize=ROWS)
            name = named(kind, path)
            remove(folder / name)  # a folder in its place
            rename_over(path, folder / name)
        finally:
            path.unlink(missing_ok=True)
        return name


def named(kind: str, path: Path) -> str:
    return f"{kind}-{file_checksum(path).rpartition(':')[2]}{SUFFIX}"


def open_table(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Map a file known to be whole; return its rows, and the metadata written with them. Raises OSError."""
    check_regular(path)
    # The stream format, and no threads: opening a file of the other one starts Arrow's pool, whose threads
    # now and then abort a process at its exit ("terminate called without an active exception", apache/arrow
    # issue 34314).
    options = pa.ipc.IpcReadOptions(use_threads=False)
    table = pa.ipc.open_stream(pa.memory_map(str(path)), options=options).read_all()
    return table.replace_schema_metadata(), json.loads(table.schema.metadata[META])


def intact_files(folder: Path, kind: str, others: Iterable[str] = ()) -> list[Path]:
    """Files of a kind whose content has the checksum in their name; `others` may not be listed yet."""
    intact, names = [], {path.name for path in folder.glob(f"{kind}-*{SUFFIX}")}
    names |= {name for name in others if name.startswith(f"{kind}-")}
    for path in (folder / name for name in sorted(names)):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and named(kind, path) == path.name:
                intact.append(path)
    return intact


def remove_all_but(folder: Path, name: str) -> None:
    """Remove what earlier scans have left."""
    for path in folder.iterdir():
        if path.is_file() and path.name != name:
            path.unlink(missing_ok=True)


def copy_scans(kept: Path, folder: Path) -> Path:
    """Link or copy the files of kept scans, so that neither this process nor their run removes them."""
    for path in kept.glob(f"*/*{SUFFIX}"):
        copy = folder / path.relative_to(kept)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the run has just replaced it
            try:
                os.link(path, copy)
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, copy)
    return folder


def match_rows(files: pa.Table, known: pa.Table) -> pa.Array:
    """Return, for each file, the row of `known` with its name and versions, or null."""
    if not len(known):
        return pa.nulls(len(files), pa.int32())
    # By a separator that no name of a file can hold.
    keys = [join([table[name] for name in IDENTITY], "\0") for table in (files, known)]
    return pc.index_in(keys[0], value_set=keys[1])


# pyarrow comes without types.


# So many files are listed in less than a second, and then a rewritten one is noticed before training.
FEW_FILES = 100_000
# File systems whose folders have the time of the last file that was added, renamed or removed. Others may
# not: FAT, and buckets that are mounted as folders.
KEEP_TIMES = frozenset(
    {"bcachefs", "beegfs", "btrfs", "ceph", "ext2", "ext3", "ext4", "f2fs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "overlay", "tmpfs", "xfs", "zfs"}
)


def write_folder_times(folder: Path, storage: Storage, files: FileList, scan: str) -> None:
    """Keep the times of the folders of a listing, next to the scan made of it, for the next start."""
    if not isinstance(storage, LocalStorage) or len(files.table) < FEW_FILES:
        return
    old = intact_files(folder, kind_of(storage))
    names = pa.array([os.fsencode(name) for name in files.folders], pa.large_binary())
    times = pa.table({"name": names, "time": pa.array(list(files.folders.values()), pa.int64())})
    new = write_table(folder, kind_of(storage), times, {"scan": scan, **place_of(storage)})
    for path in old:
        if path.name != new:
            path.unlink(missing_ok=True)


def forget_folder_times(folder: Path, storage: Storage) -> None:
    # The next start then lists all files.
    if isinstance(storage, LocalStorage):
        for path in intact_files(folder, kind_of(storage)):
            path.unlink(missing_ok=True)


def unchanged_files(folder: Path, storage: Storage, scan: Path) -> FileList | None:
    """Files of a kept scan if no folder has changed since they were listed; None where that is not known."""
    if not isinstance(storage, LocalStorage) or not storage.folder.is_dir():
        return None
    for path in intact_files(folder, kind_of(storage)):
        times, place = open_table(path)
        if place == {"scan": scan.name, **place_of(storage)} and are_unchanged(storage.folder, times):
            return listed_files(scan)
    return None


def are_unchanged(root: Path, times: pa.Table) -> bool:
    kept_on = {mount.device for mount in read_mounts() if mount.fstype in KEEP_TIMES}
    for batch in times.to_batches():
        for name, time in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            try:
                found = (root / os.fsdecode(name)).stat()
            except OSError:
                return False
            device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
            if found.st_mtime_ns != time or device not in kept_on:
                return False
    return True


def listed_files(scan: Path) -> FileList:
    """Return the list of files that a kept scan was made of."""
    table, others = open_table(scan)
    # A file with a version was found; what is wrong with it was only known when it was read.
    problems = pc.if_else(pc.equal(table["version"], ""), table["problem"], "")
    listed = table.select([*FILE.names, CAPTION_VERSION])
    place = FILE.get_field_index("problem")
    return FileList(listed.set_column(place, FILE.field("problem"), problems), OtherFiles(**others))


def kind_of(storage: LocalStorage) -> str:
    # Each machine may have folders of its own with this path.
    place = f"{socket.gethostname()}\0{storage.folder.resolve()}"
    return f"folders-{xxhash.xxh3_64(os.fsencode(place)).hexdigest()}"


def place_of(storage: LocalStorage) -> dict[str, object]:
    """Properties of a storage, besides its path, that the list of files depends on."""
    return {"inode": storage.folder.stat().st_ino, "outputs": [str(path) for path in storage.outputs]}
