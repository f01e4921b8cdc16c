"""Masks are found by the names of their images, and cropped as these are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from simpletuner.caches.latents import decode_mask
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.samples.masks import Mask, Masks
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape


def test_masks_are_paired_by_names_without_suffixes(tmp_path):
    table = pa.table(
        {"name": ["a/x.webp", "b.png", "x.png"], "version": ["1", "2", "3"], "problem": ["", "broken", ""]}
    )
    names = pa.chunked_array([["x.jpg", "b.jpg"], ["a/x.tiff", "c.jpg"]])
    masks = Masks.pair(names, LocalStorage(tmp_path), table)
    assert masks.rows.tolist() == [2, -1, 0, -1]
    assert (masks.of(2).name, masks.of(2).version) == ("a/x.webp", "1")


def test_a_mask_is_resized_and_cropped_as_its_image(tmp_path):
    mask = np.zeros((32, 48), np.uint8)
    mask[:, 24:] = 255
    Image.fromarray(mask).save(tmp_path / "x.png")
    geometry = Geometry(Shape(1, 128, 192), Shape(1, 64, 96), (16, 0), Shape(1, 64, 64))
    found = decode_mask(Mask(LocalStorage(tmp_path), "x.png", ""), geometry)
    expected = torch.zeros(1, 64, 64)
    expected[..., 96 // 2 - 16 :] = 1
    assert torch.equal(found, expected)
    Image.fromarray(mask.T).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="its mask has 32x48 px, which is another shape"):
        decode_mask(Mask(LocalStorage(tmp_path), "x.png", ""), geometry)
