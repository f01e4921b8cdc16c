"""Masks of images: files of the same name in a dataset of masks, white where the loss counts."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import xxhash
from PIL import Image

from simpletuner.data.images.images import read_rgb
from simpletuner.data.sampler.stable_choice import hash_texts
from simpletuner.data.storage.storage import Storage

ASPECT_TOLERANCE = 0.02
"""By how much the sides of a mask may differ in their ratio from those of its image: a smaller one is rounded."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one image, as `name` in `storage`; `version` changes when the file does."""

    storage: Storage
    name: str
    version: str

    def image(self, size: tuple[int, int]) -> Image.Image:
        """Return it in grey, in the size that its image is resized to.

        Raises one of DECODE_ERRORS, and ValueError for a mask of another shape.
        """
        with self.storage.open(self.name) as file:
            mask = read_rgb(file, size).convert("L")
        if abs(mask.width * size[1] / (mask.height * size[0]) - 1) > ASPECT_TOLERANCE:
            raise ValueError(f"its mask has {mask.width}x{mask.height} px, which is another shape")
        return mask.resize(size, Image.Resampling.BOX)


class Masks:
    """The masks of the rows of a scan: `rows` has which row of `table` each image's mask is, -1 for none."""

    def __init__(self, storage: Storage, table: pa.Table, rows: np.ndarray) -> None:
        self.storage, self.table, self.rows = storage, table, rows

    @classmethod
    def pair(cls, names: pa.ChunkedArray, storage: Storage, table: pa.Table) -> Masks:
        """Find the masks of images by their names, whatever the suffixes."""
        problems = table["problem"].to_pylist()
        by_stem = {stem(name): row for row, name in enumerate(table["name"].to_pylist()) if not problems[row]}
        rows = [by_stem.get(stem(name), -1) for name in names.to_pylist()]
        return cls(storage, table, np.asarray(rows, np.int32))

    def of(self, row: int) -> Mask:
        mask = int(self.rows[row])
        name, version = (self.table[column][mask].as_py() for column in ("name", "version"))
        return Mask(self.storage, name, version)

    def add_to(self, digest: xxhash.xxh3_128) -> None:
        for column in ("name", "version"):
            hash_texts(digest, self.table[column])
        digest.update(self.rows.data)


def stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()
