"""Samples of a run as columns; a `Sample` is made from its row on access.

Rows lie in Arrow record batches, memory-mapped from a kept scan that all ranks share. A sample takes 8 bytes
more: its row, and the index of its size (`preparation/shared_memory.py`: once per machine). Held-out
samples are datasets of type eval, and a share of the others. Reference images are samples of their own,
cached like others.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from PIL import Image

from simpletuner.data.config.dataset_parts import CLASS_IMAGE_KEYS
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.frame_folders import frame_suffixes, is_frame_folder, read_folder_frames
from simpletuner.data.images.geometry import Geometry, compute_geometry
from simpletuner.data.images.images import cropped, read_rgb
from simpletuner.data.images.videos import read_frames
from simpletuner.data.sampler.batch_sampler import GlobalBatch, make_batch
from simpletuner.data.sampler.stable_choice import hash_names, hash_texts
from simpletuner.data.samples.conditioning_files import ConditioningFiles, Mask
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.captions import captions_of
from simpletuner.data.storage.storage import Storage
from simpletuner.settings.values.shape import SampleShape

# pyarrow comes without types.


# Requests for the frames of one clip in a bucket; several clips are read at the same time.
FRAMES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """An image or a clip of a dataset, as `name` in `storage`; `version` changes when the file does."""

    id: str
    dataset: str
    storage: Storage
    name: str
    version: str
    geometry: Geometry
    captions: tuple[str, ...]
    """Alternatives, from which each step chooses at random."""
    mask: Mask | None = None
    references: tuple[Sample, ...] = ()
    """The images that it is made from, such as those that an edit begins with; without captions."""
    is_i2v: bool = False
    """True of a clip whose first frame the model is given."""
    has_sound: bool = False
    """True of a clip that is trained with its sound."""

    @property
    def conditioning_samples(self) -> tuple[Sample, ...]:
        """Images that the model is given beside the caption: references, or the first frame."""
        if not self.is_i2v:
            return self.references
        first = replace(self.geometry, target=self.geometry.target._replace(frames=1))
        return (replace(self, geometry=first, is_i2v=False, has_sound=False),)

    @property
    def shape(self) -> SampleShape:
        references = tuple(each.geometry.target for each in self.references)
        return SampleShape(self.geometry.target, references, self.is_i2v, self.has_sound)

    def open(self) -> BinaryIO:
        # An image is read whole, a video in parts.
        return self.storage.open_header(self.name) if self.geometry.clip else self.storage.open(self.name)

    def files(self) -> list[str]:
        """File name, or names of a folder's frames. Raises one of DECODE_ERRORS."""
        return self.storage.list_folder(self.name, frame_suffixes()) if is_frame_folder(self.name) else [self.name]

    def images(self, smallest: tuple[int, int], places: Sequence[int] | None = None) -> Iterator[Image.Image]:
        """Yield its frames in upright RGB, all or those at ascending `places` of the clip; an image is one.

        They are decoded no larger than needed for `smallest`, where the format allows. Raises one of
        DECODE_ERRORS.
        """
        g = self.geometry
        if g.clip is None:
            with self.open() as file:
                yield read_rgb(file, smallest, g.original.size)
            return
        numbers = g.clip.frame_numbers(g.target.frames)
        numbers = numbers if places is None else [numbers[place] for place in places]
        if is_frame_folder(self.name):
            at_once = min(FRAMES_AT_ONCE, self.storage.concurrent_reads)
            yield from read_folder_frames(self.files(), self.storage.open, numbers, g.original, smallest, at_once)
            return
        with self.open() as file:
            yield from read_frames(file, numbers, g.original)


def reference_images(sample: Sample) -> tuple[Image.Image, ...]:
    """Conditioning images of a sample, cropped as in training. Raises one of DECODE_ERRORS."""
    pairs = [
        (each.geometry, image)
        for each in sample.conditioning_samples
        for image in each.images(each.geometry.resized.size)
    ]
    return tuple(cropped(image, g.resized.size, g.crop_left_top, g.target.size) for g, image in pairs)


class RowReader:
    """Random access to some columns of an Arrow table; 2 us per row, where `Table.slice` takes 6."""

    def __init__(self, table: pa.Table, columns: Sequence[str]) -> None:
        batches = table.to_batches()
        self._columns = [[batch.column(name) for name in columns] for batch in batches]
        self._starts = [0, *accumulate(len(batch) for batch in batches)]

    def __getitem__(self, row: int) -> list:
        number = bisect_right(self._starts, row) - 1
        return [column[row - self._starts[number]].as_py() for column in self._columns[number]]


class DatasetSamples(Sequence[Sample]):
    def __init__(
        self,
        dataset: ImageDataset,
        storage: Storage,
        table: pa.Table,
        rows: np.ndarray,
        sizes: Sizes,
        seed: int,
        conditioning: tuple[ConditioningFiles, ...] = (),
    ) -> None:
        """`conditioning` has samples for the rows of `table`, in the order of the dataset's
        `conditioning`."""
        self.dataset, self.storage, self.table, self.seed = dataset, storage, table, seed
        self.rows, self.sizes, self.conditioning = rows, sizes, conditioning
        self.masks = next((each for each in conditioning if each.dataset.are_masks), None)
        self.references = tuple(each for each in conditioning if each.dataset.are_references)
        self._reader = RowReader(table, ("name", "version", "captions"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        name, version, lines = self._reader[int(self.rows[index])]
        sample_id = f"{self.dataset.id}/{name}"
        sizes = self.sizes
        geometry = compute_geometry(self.dataset, sample_id, *sizes.of(index), self.seed, sizes.stride_of(index))
        captions = captions_of(self.dataset, name, lines)
        row = int(self.rows[index])
        mask = self.masks and self.masks.mask(row)
        references = tuple(self._reference(each, row, geometry) for each in self.references)
        more = mask, references, self.dataset.is_i2v, sizes.has_sound(index)
        return Sample(sample_id, self.dataset.id, self.storage, name, version, geometry, captions, *more)

    def _reference(self, references: ConditioningFiles, row: int, target: Geometry) -> Sample:
        name, version = references.file(row)
        sample_id = f"{references.dataset.id}/{name}"
        geometry = references.geometry(row, sample_id, target, self.seed)
        return Sample(sample_id, references.dataset.id, references.scan.storage, name, version, geometry, ())

    @property
    def names(self) -> pa.ChunkedArray:
        names = self.table["name"]
        return names if len(self) == len(self.table) else names.take(pa.array(self.rows))

    def checksum(self, *columns: str) -> str:
        """Checksum of all that these samples and their geometry are made of, and of columns of their scan."""
        # Without what masks, references, class images and sound brought: digests of older caches stay.
        brought = {"conditioning_type", "conditioning_data", "source_dataset_id", "name_ending", *CLASS_IMAGE_KEYS}
        dumped = self.dataset.model_dump_json(exclude={**dict.fromkeys(brought, True), "video": {"sound"}})
        digest = xxhash.xxh3_128(f"{self.seed} {dumped}".encode())
        for each in self.conditioning:
            each.add_to(digest)
        for name in columns:
            texts = self.table[name]
            if pa.types.is_large_list(texts.type):
                for chunk in pc.list_value_length(texts).chunks:
                    digest.update(chunk.to_numpy())
                texts = pc.list_flatten(texts)
            hash_texts(digest, texts)
        for numbers in self.arrays:
            if numbers is not self.sizes.sounds or numbers.any():
                digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    @property
    def arrays(self) -> list[np.ndarray]:
        """Arrays in memory, in addition to the mapped table."""
        return [self.rows, *(getattr(self.sizes, each.name) for each in fields(self.sizes))]

    def with_arrays(self, rows: np.ndarray, *sizes: np.ndarray) -> DatasetSamples:
        """Return the same samples with other memory for `arrays`."""
        return DatasetSamples(self.dataset, self.storage, self.table, rows, Sizes(*sizes), self.seed, self.conditioning)

    def of(self, dataset: ImageDataset) -> DatasetSamples:
        return DatasetSamples(dataset, self.storage, self.table, self.rows, self.sizes, self.seed, self.conditioning)

    def where(self, mask: np.ndarray) -> DatasetSamples:
        rows, sizes = self.rows[mask], self.sizes.where(mask)
        return DatasetSamples(self.dataset, self.storage, self.table, rows, sizes, self.seed, self.conditioning)

    def without(self, ids: Collection[str]) -> DatasetSamples:
        prefix = f"{self.dataset.id}/"
        names = pa.array([name.removeprefix(prefix) for name in ids if name.startswith(prefix)], pa.large_string())
        return self.where(~pc.is_in(self.table["name"], value_set=names).to_numpy()[self.rows]) if len(names) else self


class Samples(Sequence[Sample]):
    """The samples of all datasets, one dataset after the other."""

    def __init__(self, parts: Sequence[DatasetSamples] = ()) -> None:
        self.parts = list(parts)
        self._starts = [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect_right(self._starts, index) - 1
        return self.parts[number][index - self._starts[number]]

    def dataset_of(self, index: int) -> ImageDataset:
        return self.parts[bisect_right(self._starts, index) - 1].dataset

    def __iter__(self) -> Iterator[Sample]:
        return (part[index] for part in self.parts for index in range(len(part)))

    def without(self, ids: Collection[str]) -> Samples:
        return Samples([part.without(ids) for part in self.parts]) if ids else self

    def names_checksum(self) -> str:
        """Return a checksum of the ids of all samples, in their order."""
        digest = xxhash.xxh3_128()
        for part in self.parts:
            digest.update(repr((part.dataset.id, len(part))).encode())
            hash_texts(digest, part.names)
        return digest.hexdigest()


def held_out_indices(samples: Samples, share: float) -> np.ndarray:
    parts, start = [np.zeros(0, np.int64)], 0
    for part in samples.parts:
        parts.append(start + held_out_of(part, share))
        start += len(part)
    return np.concatenate(parts)


def held_out_of(part: DatasetSamples, share: float) -> np.ndarray:
    """Return the held-out indices within one dataset: all of it, or a share, but at least one."""
    if part.dataset.dataset_type == "eval":
        return np.arange(len(part))
    if not share:
        return np.zeros(0, np.int64)
    # By id alone: what one run holds out, no other run of these images trains on, whatever is added to them.
    hashes = hash_names(part.names, part.dataset.id, "held out")
    chosen = np.flatnonzero(hashes < share * 2.0**64)
    return chosen if len(chosen) else hashes.argsort()[:1]


def held_out_batches(samples: Samples, held_out: np.ndarray, size: int) -> list[GlobalBatch]:
    """Cut held-out samples into batches of one shape and at most `size`."""
    by_shape: dict[SampleShape, list[int]] = {}
    for index in held_out.tolist():
        by_shape.setdefault(samples[index].shape, []).append(index)
    return [
        make_batch(str(shape), indices[first : first + size])
        for shape, indices in by_shape.items()
        for first in range(0, len(indices), size)
    ]


# pyarrow comes without types.


class References(Sequence[Sample]):
    """References of samples in one of their dataset's datasets of references, in the order of the samples."""

    def __init__(self, samples: DatasetSamples, number: int) -> None:
        self.samples, self.number, self.files = samples, number, samples.references[number]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.samples[index].references[self.number]

    @property
    def dataset(self) -> ImageDataset:
        return self.files.dataset

    @property
    def storage(self) -> Storage:
        return self.files.scan.storage

    def checksum(self, *columns: str) -> str:
        """Return a checksum of all that the references and their geometry are made of."""
        return self.samples.checksum(*columns)

    def samples_of(self, broken: Mapping[str, str]) -> dict[str, str]:
        """Ids of samples whose reference is broken, and why; `broken` has the reasons by its id."""
        if not broken:
            return {}
        own = {name.removeprefix(f"{self.dataset.id}/"): why for name, why in broken.items()}
        is_broken = pc.is_in(self.files.scan.table["name"], value_set=pa.array(own, pa.large_string())).to_numpy()
        found = np.flatnonzero(is_broken[self.files.rows[self.samples.rows]]).tolist()
        pairs = [(self.samples[index], self.files.file(int(self.samples.rows[index]))[0]) for index in found]
        return {sample.id: f"its reference {name}: {own[name]}" for sample, name in pairs}


def references_of(samples: DatasetSamples) -> list[References]:
    return [References(samples, number) for number in range(len(samples.references))]
