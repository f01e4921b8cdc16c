"""Find the samples of a dataset: files, sizes, captions. Nothing is decoded, nothing is written."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from simpletuner.data.captions import UnreadableCaptionError, captions_of
from simpletuner.data.datasets import LARGEST_PIXELS, ImageDataset
from simpletuner.data.geometry import Geometry, geometry_of, is_wanted
from simpletuner.data.images import BROKEN, header_of
from simpletuner.data.scanning import Scan
from simpletuner.data.version import VERSION
from simpletuner.errors import DataError

LARGEST_BYTES = 1 << 30
NAMED = 20
"""How many files a message names."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture of one dataset; `version` changes when the file does; several captions are drawn from."""

    id: str
    dataset: str
    path: Path
    version: str
    geometry: Geometry
    captions: tuple[str, ...]


@dataclass
class Found:
    """The samples of all datasets, what is left out with the reason, and what users should know."""

    samples: list[Sample] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    unwanted: int = 0
    animated: list[str] = field(default_factory=list)
    not_read: list[Path] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    """What this run writes below the pictures."""


def discover(
    datasets: Sequence[ImageDataset], alignment_px: int, seed: int, written: Sequence[Path] = (), version: int = VERSION
) -> Found:
    """Return every sample, sorted by id, so that all ranks see the same list.

    Nothing in the folders that a run has `written` is trained on. Raises DataError when a folder is missing or empty,
    or when pictures lack captions.
    """
    found = Found()
    for dataset in datasets:
        search = Search(dataset, alignment_px, seed, found, version)
        samples = [search.sample(relative, path) for relative, path in files_of(dataset, found, written)]
        refuse_unreadable(dataset, search.unreadable)
        refuse_uncaptioned(dataset, search.uncaptioned)
        found.samples += filter(None, samples)
        refuse_empty(dataset, len(samples) - samples.count(None), found)
    return found


@dataclass
class Search:
    """The search for one dataset's samples: what it refuses, and `found`, where it notes what it leaves out."""

    dataset: ImageDataset
    alignment_px: int
    seed: int
    found: Found
    version: int = VERSION
    uncaptioned: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def sample(self, relative: str, path: Path) -> Sample | None:
        """Return the sample of a picture; None after noting why it is not taken."""
        sample_id = f"{self.dataset.id}/{relative}"
        try:
            relative.encode()
            version, header = version_of(path), header_of(path)
        except UnicodeEncodeError:
            self.found.broken[sample_id] = "its name is not UTF-8: rename it"
            return None
        except BROKEN as error:
            self.found.broken[sample_id] = str(error)
            return None
        if not is_wanted(self.dataset, header.size):
            self.found.unwanted += 1
            return None
        geometry = geometry_of(self.dataset, sample_id, header.size, self.alignment_px, self.seed, self.version)
        if geometry.resized[0] * geometry.resized[1] > LARGEST_PIXELS:
            self.found.broken[sample_id] = "would be resized to {}x{} px".format(*geometry.resized)
            return None
        captions = self._captions(relative, path)
        if not captions:
            return None
        if header.animated:
            self.found.animated.append(sample_id)
        return Sample(sample_id, self.dataset.id, path, version, geometry, captions)

    def _captions(self, relative: str, path: Path) -> tuple[str, ...]:
        """Return a picture's captions; empty after noting why there are none."""
        try:
            captions = captions_of(self.dataset, path)
        except UnreadableCaptionError as error:
            self.unreadable[PurePath(relative).with_suffix(".txt").as_posix()] = str(error)
            return ()
        if not captions:
            self.uncaptioned.append(relative)
        return captions


def files_of(dataset: ImageDataset, found: Found, written: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (path below the folder, path) of each picture, sorted; note in `found` what is not read."""
    folder = dataset.instance_data_dir
    if not folder.is_dir():
        raise DataError(
            f"dataset `{dataset.id}`: there is no folder {folder}", "set instance_data_dir to your pictures"
        )
    scan = Scan(folder, written)
    paths = sorted(scan.pictures())
    found.not_read += sorted(scan.not_read)
    found.written += sorted(scan.left_out)
    for path in paths:
        yield path.relative_to(folder).as_posix(), path


def version_of(path: Path) -> str:
    """Return what changes when a file does: its size and change time. Raises OSError for what is no picture file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("is no regular file")
    if found.st_size > LARGEST_BYTES:
        raise OSError(f"has {found.st_size:,} bytes; at most {LARGEST_BYTES:,} are read")
    return f"{found.st_size}-{found.st_mtime_ns}"


def refuse_unreadable(dataset: ImageDataset, files: Mapping[str, str]) -> None:
    """Raise DataError that names caption files that are no text, and why."""
    if files:
        named = listed([f"{name} {reason}" for name, reason in sorted(files.items())])
        raise DataError(
            f"dataset `{dataset.id}`: {counted(len(files), 'caption file')} cannot be read as text:{named}",
            "save them as UTF-8, for example `iconv -f WINDOWS-1252 -t UTF-8 old.txt > new.txt`",
        )


def refuse_uncaptioned(dataset: ImageDataset, names: Sequence[str]) -> None:
    """Raise DataError that names the pictures without a caption."""
    if names:
        where = "file name" if dataset.caption_strategy == "filename" else ".txt file beside them"
        raise DataError(
            f"dataset `{dataset.id}`: {counted(len(names), 'picture')} without a caption in their {where}:"
            f"{listed(names)}",
            "write captions, or set another caption_strategy: textfile, filename or instanceprompt",
        )


def listed(names: Sequence[str]) -> str:
    """Return names on lines of their own, the first ones if there are many."""
    more = [f"and {len(names) - NAMED:,} more"] * (len(names) > NAMED)
    return "".join(f"\n  {name}" for name in [*names[:NAMED], *more])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 picture` or `2 pictures`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def refuse_empty(dataset: ImageDataset, samples: int, found: Found) -> None:
    """Raise DataError for a dataset that nothing can be trained on."""
    if samples == 0:
        counts = {
            "broken": len(found.broken),
            "outside the size limits": found.unwanted,
            "not read": len(found.not_read),
        }
        left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
        such = f"; {found.not_read[0].suffix} is not" if found.not_read else ""
        raise DataError(
            f"dataset `{dataset.id}`: no usable picture in {dataset.instance_data_dir}"
            + (f" ({left_out})" if left_out else ""),
            f"JPEG, PNG and WebP are read, with all subfolders{such}",
        )
