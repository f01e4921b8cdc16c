"""Find the samples of the datasets: files, sizes, captions. Nothing is decoded, nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from simpletuner.data.batch_sampler import DATA_VERSION
from simpletuner.data.captions import caption_file, read_captions
from simpletuner.data.datasets import LARGEST_PIXELS, ImageDataset
from simpletuner.data.geometry import Geometry, compute_geometry, is_within_limits
from simpletuner.data.images import DECODE_ERRORS, read_header
from simpletuner.data.storage import Storage, StoredFile, UnreadableFileError, open_storage
from simpletuner.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

OTHER_SUFFIXES = frozenset(
    {".heic", ".heif", ".avif", ".gif", ".tif", ".tiff", ".bmp", ".jp2", ".jxl", ".jfif", ".psd", ".exr", ".hdr"}
    | {".svg", ".tga", ".ppm", ".pgm", ".ico", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"}
    | {".mp4", ".mov", ".webm", ".mkv", ".avi", ".zip", ".tar", ".parquet"}
)
"""Suffixes of files that a user may take for training data, but that are not read; they are counted."""

MAX_BYTES = 1 << 30
MAX_NAMES = 20
"""How many files a message names."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of one dataset, as `name` in `storage`; `version` changes when the file does."""

    id: str
    dataset: str
    storage: Storage
    name: str
    version: str
    geometry: Geometry
    captions: tuple[str, ...]
    """One of them is chosen at random in each step."""

    def open(self) -> BinaryIO:
        return self.storage.open(self.name)


@dataclass
class Discovery:
    """The samples of all datasets, what is left out with the reason, and what users should know."""

    samples: list[Sample] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    unwanted: int = 0
    animated: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    """Addresses of files of other formats."""
    written: list[str] = field(default_factory=list)
    """Addresses of what this run writes among the images."""


def discover(
    datasets: Sequence[ImageDataset],
    alignment_px: int,
    seed: int,
    outputs: Sequence[Path] = (),
    version: int = DATA_VERSION,
) -> Discovery:
    """Find every sample, in an order that is the same on all ranks.

    Nothing in `outputs`, the folders that the run writes into, becomes a sample. Raises DataError when a folder is
    missing or empty, or when images lack captions.
    """
    found = Discovery()
    for dataset in datasets:
        scan = DatasetScan(dataset, open_storage(dataset, outputs), alignment_px, seed, found, version)
        samples = [sample for file in scan.list_images() if (sample := scan.make_sample(file)) is not None]
        raise_if_unreadable(dataset, scan.unreadable)
        raise_if_uncaptioned(dataset, scan.uncaptioned)
        found.samples += samples
        if not samples:
            raise nothing_usable_error(dataset, scan.storage, found)
    return found


@dataclass
class DatasetScan:
    """The search for one dataset's samples. What is left out is noted in `found`; captions that are missing or not
    text are collected here, since they end the run once all of them are known."""

    dataset: ImageDataset
    storage: Storage
    alignment_px: int
    seed: int
    found: Discovery
    version: int = DATA_VERSION
    uncaptioned: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def list_images(self) -> list[StoredFile]:
        try:
            listing = self.storage.list_files(SUFFIXES | OTHER_SUFFIXES)
        except FileNotFoundError:
            raise DataError(
                f"dataset `{self.dataset.id}`: there is no folder {self.storage.describe()}",
                "set instance_data_dir to your images",
            ) from None
        self.found.not_read += [self.storage.describe(f.name) for f in listing.files if f.suffix in OTHER_SUFFIXES]
        self.found.written += map(self.storage.describe, listing.left_out)
        return [file for file in listing.files if file.suffix in SUFFIXES]

    def make_sample(self, file: StoredFile) -> Sample | None:
        """Return the sample of an image; None after noting why it is left out."""
        sample_id = f"{self.dataset.id}/{file.name}"
        try:
            check_readable(file)
            with self.storage.open(file.name) as opened:
                header = read_header(opened)
        except DECODE_ERRORS as error:
            self.found.broken[sample_id] = str(error)
            return None
        if not is_within_limits(self.dataset, header.size):
            self.found.unwanted += 1
            return None
        geometry = compute_geometry(self.dataset, sample_id, header.size, self.alignment_px, self.seed, self.version)
        if geometry.resized[0] * geometry.resized[1] > LARGEST_PIXELS:
            self.found.broken[sample_id] = "would be resized to {}x{} px".format(*geometry.resized)
            return None
        captions = self._read_captions(file.name)
        if not captions:
            return None
        if header.animated:
            self.found.animated.append(sample_id)
        return Sample(sample_id, self.dataset.id, self.storage, file.name, file.version, geometry, captions)

    def _read_captions(self, name: str) -> tuple[str, ...]:
        try:
            captions = read_captions(self.dataset, self.storage, name)
        except UnreadableFileError as error:
            self.unreadable[caption_file(name)] = str(error)
            return ()
        if not captions:
            self.uncaptioned.append(name)
        return captions


def check_readable(file: StoredFile) -> None:
    """Raise ValueError for a file that is not even opened."""
    try:
        file.name.encode()  # ids go into JSON, messages and hashes, which take no undecodable bytes
    except UnicodeEncodeError:
        raise ValueError("its name is not UTF-8: rename it") from None
    if file.problem:
        raise ValueError(file.problem)
    if file.size_bytes > MAX_BYTES:
        raise ValueError(f"has {file.size_bytes:,} bytes; at most {MAX_BYTES:,} are read")


def raise_if_unreadable(dataset: ImageDataset, files: Mapping[str, str]) -> None:
    """Raise DataError that names caption files that are not text, and why."""
    if files:
        named = format_names([f"{name} {reason}" for name, reason in sorted(files.items())])
        raise DataError(
            f"dataset `{dataset.id}`: {count_noun(len(files), 'caption file')} cannot be read as text:{named}",
            "save them as UTF-8, for example `iconv -f WINDOWS-1252 -t UTF-8 old.txt > new.txt`",
        )


def raise_if_uncaptioned(dataset: ImageDataset, names: Sequence[str]) -> None:
    """Raise DataError that names the images without a caption."""
    if names:
        where = "file name" if dataset.caption_strategy == "filename" else ".txt file next to them"
        raise DataError(
            f"dataset `{dataset.id}`: {count_noun(len(names), 'image')} without a caption in their {where}:"
            f"{format_names(names)}",
            "write captions, or set another caption_strategy: textfile, filename or instanceprompt",
        )


def nothing_usable_error(dataset: ImageDataset, storage: Storage, found: Discovery) -> DataError:
    counts = {
        "broken": len(found.broken),
        "outside the size limits": found.unwanted,
        "not read": len(found.not_read),
    }
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    such = f"; .{found.not_read[0].rpartition('.')[2]} is not" if found.not_read else ""
    return DataError(
        f"dataset `{dataset.id}`: no usable image in {storage.describe()}" + (f" ({left_out})" if left_out else ""),
        f"JPEG, PNG and WebP are read, with all subfolders{such}",
    )


def format_names(names: Sequence[str]) -> str:
    """Return names on lines of their own, only the first ones if there are many."""
    more = [f"and {len(names) - MAX_NAMES:,} more"] * (len(names) > MAX_NAMES)
    return "".join(f"\n  {name}" for name in [*names[:MAX_NAMES], *more])


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 image` or `2 images`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
