"""Masks are found by the names of their images, and cropped as these are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from simpletuner.caches.latents import decode_mask
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.samples.conditioning_files import ConditioningFiles, Mask
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.scan import Scan
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape


def test_masks_are_paired_by_names_without_suffixes(tmp_path):
    found = {"name": ["a/x.webp", "x.png", "x.webp"], "version": ["1", "2", "3"], "problem": ["", "", "broken"]}
    images = LocalImages(id="masks", instance_data_dir=tmp_path, dataset_type="conditioning", conditioning_type="mask")
    scan = Scan(images, LocalStorage(tmp_path), pa.table(found), OtherFiles())
    masks = ConditioningFiles.pair(pa.chunked_array([["x.jpg", "b.jpg"], ["a/x.tiff", "c.jpg"]]), scan)
    assert masks.rows.tolist() == [1, -1, 0, -1]
    assert [(each.name, each.version) for each in (masks.mask(0), masks.mask(2))] == [("x.png", "2"), ("a/x.webp", "1")]


def test_a_mask_is_resized_and_cropped_as_its_image(tmp_path):
    mask = np.zeros((32, 48), np.uint8)
    mask[:, 24:] = 255
    Image.fromarray(mask).save(tmp_path / "x.png")
    geometry = Geometry(Shape(1, 128, 192), Shape(1, 64, 96), (16, 0), Shape(1, 64, 64))
    found = decode_mask(Mask(LocalStorage(tmp_path), "x.png", ""), geometry)
    expected = torch.zeros(1, 64, 64)
    expected[..., 96 // 2 - 16 :] = 1
    assert torch.equal(found, expected)
