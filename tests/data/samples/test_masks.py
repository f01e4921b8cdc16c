"""Masks are found by the names of their images, and cropped as these are."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from simpletuner.caches.latents import decode_mask
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.images.images import ALL_BLACK, CUT_OUT, PAINTED
from simpletuner.data.samples.conditioning_files import ConditioningFiles, Mask
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.scan import Scan
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.settings.values.shape import Shape
from simpletuner.tools.dataset.check import CheckOptions, check_datasets


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
    found, doubt = decode_mask(Mask(LocalStorage(tmp_path), "x.png", ""), geometry)
    expected = torch.zeros(1, 64, 64)
    expected[..., 96 // 2 - 16 :] = 1
    assert torch.equal(found, expected) and not doubt


def checkered(white: tuple[int, ...], black: tuple[int, ...], mode: str) -> Image.Image:
    """Return an image whose left half is `white` and whose right half is `black`."""
    image = Image.new(mode, (64, 64), black)
    image.paste(white, (0, 0, 32, 64))
    return image


@pytest.mark.parametrize(
    ("mask", "counts", "said"),
    [
        (checkered((255,), (0,), "L"), True, ""),
        (checkered((1,), (0,), "1"), True, ""),
        (Image.new("L", (64, 64)), None, ALL_BLACK),
        (Image.new("RGBA", (64, 64)), None, ALL_BLACK),  # black and transparent
        (checkered((255, 255, 255, 255), (0, 0, 0, 0), "RGBA"), True, PAINTED),
        (checkered((255, 255), (255, 0), "LA"), True, PAINTED),  # white that is transparent
        (checkered((255, 255), (0, 255), "LA"), True, ""),
        (checkered((140, 90, 60, 255), (255, 255, 255, 0), "RGBA"), True, CUT_OUT),
        (checkered((140, 90, 60, 255), (20, 90, 160, 0), "RGBA"), True, CUT_OUT),
        (checkered((0, 0, 0, 255), (0, 0, 0, 0), "RGBA"), None, ALL_BLACK),
    ],
)
def test_what_is_no_plain_mask_counts_where_it_is_opaque_and_is_named(tmp_path, mask, counts, said):
    mask.save(tmp_path / "x.png")
    square = Shape(1, 64, 64)
    found, doubt = decode_mask(Mask(LocalStorage(tmp_path), "x.png", ""), Geometry(square, square, (0, 0), square))
    assert doubt == said
    assert found[0, 0, 0] == bool(counts) and found[0, 0, 63] == 0 and found.unique().numel() == 1 + bool(counts)


def test_doubtful_masks_are_named_by_the_check_and_undecodable_ones_take_their_image_out(tmp_path):
    for name in ("black", "good", "cut"):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
            white = Image.fromarray(np.random.default_rng(0).integers(250, 256, (64, 64), np.uint8))
            (Image.new("L", (64, 64)) if name == "black" else white).save(tmp_path / folder / f"{name}.png")
    cut = tmp_path / "masks" / "cut.png"
    cut.write_bytes(cut.read_bytes()[:-200])
    entries = [
        {
            "id": "d",
            "instance_data_dir": str(tmp_path / "images"),
            "conditioning_data": "m",
            "caption_strategy": "filename",
        },
        {
            "id": "m",
            "instance_data_dir": str(tmp_path / "masks"),
            "dataset_type": "conditioning",
            "conditioning_type": "mask",
        },
    ]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    flags = {"data_backend_config": str(tmp_path / "data.json"), "resolution": "64", "train_batch_size": "3"}
    result = check_datasets(load(flags, environment={}, complete=False), CheckOptions(), Report(quiet=True))
    found = {each.kind: dict(each.images) for each in result.datasets[0].findings}
    assert found["doubtful masks"] == {"black.png": ALL_BLACK} and list(found["damaged"]) == ["cut.png"]
    assert ["has 2, needs 3" in error.message for error in result.errors] == [True]
