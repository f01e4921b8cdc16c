"""Masks and references of images: files of the same name in datasets of type conditioning."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from PIL import Image

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.geometry import Geometry, compute_geometry
from simpletuner.data.images.images import DOUBT, read_mask_image
from simpletuner.data.sampler.stable_choice import hash_texts
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.scan import Scan
from simpletuner.data.storage.storage import Storage
from simpletuner.settings.values.shape import Shape

ASPECT_TOLERANCE = 0.02
"""Allowed relative difference in aspect between an image and its mask or reference, from rounding."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one image, as `name` in `storage`; `version` changes when the file does."""

    storage: Storage
    name: str
    version: str

    def image(self, size: tuple[int, int]) -> Image.Image:
        """Mask in grey, in the size of its resized image, with its doubt. Raises one of DECODE_ERRORS."""
        with self.storage.open(self.name) as file:
            found = read_mask_image(file, size)
        resized = found.resize(size, Image.Resampling.BOX)
        resized.info[DOUBT] = found.info[DOUBT]
        return resized


class ConditioningFiles:
    """Files of a conditioning dataset for the rows of another scan.

    `rows` has the row of `scan` for each image, -1 for none. `sizes` has the sizes of references with their
    own crop, one for each row of `scan`.
    """

    def __init__(self, scan: Scan, rows: np.ndarray, sizes: Sizes | None = None) -> None:
        self.scan, self.rows, self.sizes = scan, rows, sizes

    @classmethod
    def pair(cls, names: pa.ChunkedArray, scan: Scan, sizes: Sizes | None = None) -> ConditioningFiles:
        """Find the files of images by their names, whatever the suffixes; a readable one of two."""
        table = scan.table
        order = np.argsort(pc.equal(table["problem"], "").to_numpy(zero_copy_only=False), kind="stable")
        ending = scan.dataset.name_ending
        by_stem = {stem(table["name"][row].as_py()).removesuffix(ending): row for row in order.tolist()}
        rows = [by_stem.get(stem(name), -1) for name in names.to_pylist()]
        return cls(scan, np.asarray(rows, np.int32), sizes)

    @property
    def dataset(self) -> ImageDataset:
        return self.scan.dataset

    def of(self, rows: np.ndarray, column: str, missing: Any) -> np.ndarray:
        return np.append(self.scan.table[column].to_numpy(), missing)[self.rows[rows]]

    def file(self, row: int) -> tuple[str, str]:
        return self._value("name", row), self._value("version", row)

    def mask(self, row: int) -> Mask:
        return Mask(self.scan.storage, *self.file(row))

    def geometry(self, row: int, sample_id: str, target: Geometry, seed: int) -> Geometry:
        """Resizing and crop of a reference: its image's, or by the keys of the reference's own dataset."""
        if self.sizes is None:
            width, height = (self._value(side, row) for side in ("width", "height"))
            return replace(target, original=Shape(1, height, width))
        return compute_geometry(self.dataset, sample_id, *self.sizes.of(int(self.rows[row])), seed)

    def _value(self, column: str, row: int) -> Any:
        return self.scan.table[column][int(self.rows[row])].as_py()

    def add_to(self, digest: xxhash.xxh3_128) -> None:
        if self.dataset.are_references:
            digest.update(self.dataset.model_dump_json(exclude={"name_ending"}).encode())
        for column in ("name", "version"):
            hash_texts(digest, self.scan.table[column])
        digest.update(self.rows.data)


def stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()
