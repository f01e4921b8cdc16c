"""The Storage protocol for image and caption files, and its implementations.

Everything above knows files by name only, a path relative to the store with slashes. A new store is a class
with these methods and a row in `open_storage`.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from simpletuner.data.config.dataset_types import BucketImages, ImageDataset, LocalImages, SnapshotImages
from simpletuner.data.config.places import BucketPlace
from simpletuner.data.images.image_formats import check_av
from simpletuner.errors import DataError, EnvironmentNotReady
from simpletuner.extras import install_command
from simpletuner.system.files.regular_files import open_regular

INSTALL = install_command("s3")
MAX_BYTES = 1 << 30
"""The largest image that is opened."""
EXPORTED = {f"{name}{end}" for name in ("pipeline", "pipeline_lora_weights") for end in ("", "-ema")}
OUTPUT_NAMES = frozenset({"cache", "checkpoints", "validation", "logs", "loss.png", *EXPORTED})
"""Names that a run writes into output_dir, for users who keep images in the same folder."""

# Folders of network drives and systems, in lower case: thumbnails, deleted files, snapshots; and those that ai-toolkit
# writes among images, of which _controls has images. Those with a dot at their beginning are hidden anyway.
SYSTEM_FOLDERS = frozenset(
    {
        "@eadir",
        "@tmp",
        "#recycle",
        "@recycle",
        "@recently-snapshot",
        "#snapshot",
        "~snapshot",
        "$recycle.bin",
        "recycler",
    }
    | {"_controls", "_latent_cache", "_t_e_cache", "_clip_vision_cache"}
    | {"system volume information", "lost+found", "found.000", "__macosx", "network trash folder", "temporary items"}
)
SHADOW_COPY = "@gmt-"
"""Begins the names of a Windows share's snapshots."""

SETTLED_SECONDS = 10
NOT_SETTLED = -1
FolderId = tuple[int, int]
"""Device and inode of a folder: the same one whatever path or link leads to it."""

# Of the file with an image's caption, next to the image.
CAPTION_SUFFIX = ".txt"


class UnreadableFileError(ValueError):
    """Why a file is not read, as a phrase that follows its name."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file by name; `version` changes when its content does, `problem` says why it cannot be read."""

    name: str
    size_bytes: int = 0
    version: str = ""
    problem: str = ""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix.lower()


@dataclass
class Listing:
    """The files of a store, sorted by the parts of their names, and the names of what is left out because
    the run itself writes there, which are complete once all files were taken."""

    files: Iterable[StoredFile] = ()
    left_out: list[str] = field(default_factory=list)
    system_folders: dict[str, int] = field(default_factory=dict)
    """Number of folders of other programs that are left out, by name; as complete as `left_out`."""
    folders: dict[str, int] = field(default_factory=dict)
    """Modification time of each listed folder, in ns; NOT_SETTLED if another change may have the same."""


class Storage(Protocol):
    """A place that holds the files of one dataset."""

    @property
    def concurrent_reads(self) -> int:
        """Best number of concurrent reads: more than one where each read waits for a network."""
        ...

    def list_files(self, suffixes: Collection[str]) -> Listing:
        """List all files with these lower-case suffixes.

        Raises FileNotFoundError where there is no such place, DataError where it cannot be read.
        """
        ...

    def list_folder(self, name: str, suffixes: Collection[str]) -> list[str]:
        """Files with these suffixes directly in a folder, sorted. Raises OSError or UnreadableFileError."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading and seeking. Raises OSError or UnreadableFileError."""
        ...

    def open_header(self, name: str) -> BinaryIO:
        """Open a file to read mostly its beginning. Raises as `open` does, also while reading."""
        ...

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a small file. Raises FileNotFoundError, or UnreadableFileError, also for larger ones."""
        ...

    def describe(self, name: str = "") -> str:
        """Return the path or address of the store, or of a file in it, for messages."""
        ...


@dataclass(frozen=True)
class LocalStorage:
    """A folder with its subfolders; nothing is listed in `outputs`: output_dir and the caches."""

    folder: Path
    outputs: tuple[Path, ...] = ()
    concurrent_reads: int = 1

    def list_files(self, suffixes: Collection[str]) -> Listing:
        """List files, except hidden ones and other programs' files. Links are followed, but never into a
        folder that contains them."""
        if not self.folder.is_dir():
            raise FileNotFoundError(self.folder)
        listing = Listing()
        outputs = frozenset(filter(None, map(folder_id, self.outputs)))
        listing.files = self._walk(self.folder, "", suffixes, frozenset(), outputs, listing)
        return listing

    def list_folder(self, name: str, suffixes: Collection[str]) -> list[str]:
        return list_local_folder(self.folder, name, suffixes)

    def open(self, name: str) -> BinaryIO:
        return open_regular(self.folder / name)

    def open_header(self, name: str) -> BinaryIO:
        return self.open(name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        try:
            with open_regular(self.folder / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size > limit_bytes:
                    raise UnreadableFileError(f"has {size:,} bytes; at most {limit_bytes:,} are read")
                return file.read(size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnreadableFileError(f"cannot be read: {error.strerror}") from None

    def describe(self, name: str = "") -> str:
        return str(self.folder / name)

    def _walk(
        self,
        folder: Path,
        prefix: str,
        suffixes: Collection[str],
        parents: frozenset[FolderId],
        outputs: frozenset[FolderId],
        listing: Listing,
    ) -> Iterator[StoredFile]:
        this = folder_id(folder)
        if this is None or this in parents:  # a link to a folder above would be walked endlessly
            return
        if this in outputs and parents:
            listing.left_out.append(prefix.removesuffix("/"))
            return
        listing.folders[prefix] = settled_time(folder)
        # output_dir may be the image folder itself; then only what a run writes into it is left out.
        output_names = OUTPUT_NAMES if this in outputs else frozenset()
        # Folder by folder sorts by parts, not by the whole name: sample indices follow this order, and with
        # it every batch of a run that resumes. "a/z" comes before "a-b/c" in one and after it in the other.
        for entry in sorted(scan_folder(folder), key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.name.startswith("."):
                continue
            if entry.name in output_names:
                listing.left_out.append(name)
            elif is_folder(entry):
                if is_system_folder(entry.name):
                    listing.system_folders[entry.name] = listing.system_folders.get(entry.name, 0) + 1
                    continue
                yield from self._walk(Path(entry.path), f"{name}/", suffixes, parents | {this}, outputs, listing)
            elif PurePosixPath(name).suffix.lower() in suffixes:
                yield stored_file(name, entry.stat)


def is_system_folder(name: str) -> bool:
    return name.lower() in SYSTEM_FOLDERS or name.lower().startswith(SHADOW_COPY)


def list_local_folder(root: Path, name: str, suffixes: Collection[str]) -> list[str]:
    """Files with these suffixes directly in a folder, sorted, without hidden ones. Raises OSError."""
    with os.scandir(root / name) as entries:
        own = [each.name for each in entries if not each.name.startswith(".") and not is_folder(each)]
    return [name + each for each in sorted(own) if PurePosixPath(each).suffix.lower() in suffixes]


def stored_file(name: str, ask: Callable[[], os.stat_result]) -> StoredFile:
    """Describe a file of a folder. Its version is its size and time of change, as with `make`: hashing the
    content of every image would read the whole dataset at every start."""
    try:
        found = ask()
    except OSError as error:
        return StoredFile(name, problem=str(error))
    if not stat.S_ISREG(found.st_mode):
        return StoredFile(name, problem="is not a regular file")
    # Caches and the digests that ranks compare depend on these bytes.
    return StoredFile(name, found.st_size, f"{found.st_size}-{found.st_mtime_ns}")


def settled_time(folder: Path) -> int:
    """Return a folder's time of change, before it is listed. Times of file systems are as coarse as 2 s,
    and clocks of servers differ, so of two changes that follow each other the second may not show."""
    try:
        changed = folder.stat().st_mtime_ns
    except OSError:
        return NOT_SETTLED
    return changed if time.time_ns() - changed > SETTLED_SECONDS * 1e9 else NOT_SETTLED


def folder_id(folder: Path) -> FolderId | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def scan_folder(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder. Raises DataError if it is unreadable: training on the rest would go unnoticed."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}", "check its permissions") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder or a link to one, except a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def open_storage(dataset: ImageDataset, outputs: Sequence[Path]) -> Storage:
    """Return the store of a dataset's files; `outputs` are the folders that the run writes into.

    Raises EnvironmentNotReady where what the store or its videos need is not installed.
    """
    if dataset.clips:
        check_av(dataset.id)
    if isinstance(dataset, BucketImages):
        check_obstore(dataset)
        from simpletuner.data.storage.object_storage import open_bucket

        return open_bucket(dataset)
    if isinstance(dataset, SnapshotImages):
        from simpletuner.data.storage.snapshot_storage import SnapshotStorage

        return SnapshotStorage(dataset)
    assert isinstance(dataset, LocalImages)
    return LocalStorage(dataset.instance_data_dir, tuple(outputs))


def check_obstore(place: BucketPlace) -> None:
    """Raise EnvironmentNotReady where obstore, or boto3 for its credentials, is not installed."""
    for name in ("obstore", "boto3"):
        if find_spec(name) is None:
            where = f"{place.owner} is in {place.service.name}"
            raise EnvironmentNotReady(f"{where}, and {name} is not installed", INSTALL)
