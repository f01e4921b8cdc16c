"""Find the samples of a dataset: files, sizes, captions. Nothing is decoded, nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.geometry import Geometry, geometry_of, is_wanted
from simpletuner.data.pictures import BROKEN, displayed_size, walk
from simpletuner.errors import DataError


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
    """The samples of all datasets, and the pictures left out with the reason."""

    samples: list[Sample] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    unwanted: int = 0


def discover(datasets: list[ImageDataset], alignment_px: int, seed: int) -> Found:
    """Return every sample, sorted by id, so that all ranks see the same list.

    Raises DataError when a folder is missing or empty, or when pictures lack captions.
    """
    found = Found()
    for dataset in datasets:
        before = len(found.samples)
        uncaptioned = []
        for relative, path in files_of(dataset):
            sample_id = f"{dataset.id}/{relative}"
            try:
                version, size = version_of(path), displayed_size(path)
            except BROKEN as error:
                found.broken[sample_id] = str(error)
                continue
            if not is_wanted(dataset, size):
                found.unwanted += 1
                continue
            captions = captions_of(dataset, path)
            if not captions:
                uncaptioned.append(relative)
                continue
            geometry = geometry_of(dataset, sample_id, size, alignment_px, seed)
            found.samples.append(Sample(sample_id, dataset.id, path, version, geometry, captions))
        refuse_uncaptioned(dataset, uncaptioned)
        refuse_empty(dataset, len(found.samples) - before, found)
    return found


def files_of(dataset: ImageDataset) -> Iterator[tuple[str, Path]]:
    """Yield (path below the folder, path) of each picture, sorted."""
    folder = dataset.instance_data_dir
    if not folder.is_dir():
        raise DataError(
            f"dataset `{dataset.id}`: there is no folder {folder}", "set instance_data_dir to your pictures"
        )
    for path in sorted(walk(folder)):
        yield path.relative_to(folder).as_posix(), path


def version_of(path: Path) -> str:
    """Return what changes when a file does: its size and change time."""
    stat = path.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def captions_of(dataset: ImageDataset, path: Path) -> tuple[str, ...]:
    """Return a picture's captions, one per non-empty line of a text file; empty where there is none."""
    phrase = dataset.instance_prompt or ""
    if dataset.caption_strategy == "instanceprompt":
        return (phrase,)
    if dataset.caption_strategy == "filename":
        lines = [path.stem.replace("_", " ").strip()]
    else:
        text = path.with_suffix(".txt")
        lines = text.read_text(encoding="utf-8-sig", errors="replace").splitlines() if text.is_file() else []
    prefix = f"{phrase} " if dataset.prepend_instance_prompt and phrase else ""
    return tuple(prefix + line.strip() for line in lines if line.strip())


def refuse_uncaptioned(dataset: ImageDataset, names: list[str]) -> None:
    """Raise DataError that names some of the pictures without a caption."""
    if names:
        where = "file name" if dataset.caption_strategy == "filename" else ".txt file beside them"
        raise DataError(
            f"dataset `{dataset.id}`: {len(names)} pictures have no caption in their {where}, such as {names[0]}",
            "write captions, or set another caption_strategy: textfile, filename or instanceprompt",
        )


def refuse_empty(dataset: ImageDataset, samples: int, found: Found) -> None:
    """Raise DataError for a dataset that nothing can be trained on."""
    if samples == 0:
        left_out = f" ({len(found.broken)} broken, {found.unwanted} outside the size limits)"
        raise DataError(
            f"dataset `{dataset.id}`: no usable picture in {dataset.instance_data_dir}"
            + (left_out if found.broken or found.unwanted else ""),
            "JPEG, PNG and WebP are read, with all subfolders",
        )
