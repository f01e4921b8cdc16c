"""Comparison of a folder with a kept scan by the modification times of its directories, not of its files.

A file that is added, renamed or removed changes the time of its folder. So a start looks at ten thousand folders, not
at ten million files, which takes a minute. A file that is rewritten in its place changes no folder:
`stale_file_watcher.py` looks for such files while the run trains.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from simpletuner.data.scan.file_list import CAPTION_VERSION, FILE, FileList, OtherFiles
from simpletuner.data.scan.scan_cache import intact_files, open_table, write_table
from simpletuner.data.storage.storage import LocalStorage, Storage
from simpletuner.system.files.mounts import read_mounts

FEW_FILES = 100_000
"""So many files are listed in less than a second, and then a rewritten one is noticed before training."""
KEEP_TIMES = frozenset(
    {"bcachefs", "beegfs", "btrfs", "ceph", "ext2", "ext3", "ext4", "f2fs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "overlay", "tmpfs", "xfs", "zfs"}
)
"""File systems whose folders have the time of the last file that was added, renamed or removed. Others may not: FAT,
and buckets that are mounted as folders."""


def write_folder_times(folder: Path, storage: Storage, files: FileList, scan: str) -> None:
    """Keep the times of the folders of a listing, next to the scan that was made of it, for the next start."""
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
    """Remove what is kept, so that the next start lists all files."""
    if isinstance(storage, LocalStorage):
        for path in intact_files(folder, kind_of(storage)):
            path.unlink(missing_ok=True)


def unchanged_files(folder: Path, storage: Storage, scan: Path) -> FileList | None:
    """Return the files of a kept scan if no folder has changed since they were listed; None where that is not known."""
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
    """Return the first part of the file's name: each machine may have folders of its own with this path."""
    place = f"{socket.gethostname()}\0{storage.folder.resolve()}"
    return f"folders-{xxhash.xxh3_64(os.fsencode(place)).hexdigest()}"


def place_of(storage: LocalStorage) -> dict[str, object]:
    """Return what else decides which files are listed."""
    return {"inode": storage.folder.stat().st_ino, "outputs": [str(path) for path in storage.outputs]}
