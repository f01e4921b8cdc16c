"""Models that edit images are shown references as diffusers' own pipelines show them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from models.test_flux2 import dev  # noqa: F401 (a fixture)
from models.test_inputs import CPU, expect_same_inputs, expect_same_picture, opened
from PIL import Image
from reading_images import save_qwen_edit

from simpletuner.models.family.base import ModelFamily
from simpletuner.settings.values.shape import Shape

SIZES = [(64, 96), (80, 64)]


def images(sizes: list[tuple[int, int]]) -> tuple[Image.Image, ...]:
    drawn = np.random.default_rng(0)
    return tuple(Image.fromarray(drawn.integers(0, 255, (height, width, 3), np.uint8)) for width, height in sizes)


@pytest.fixture(scope="module")
def folders(pipelines, dev, tmp_path_factory) -> dict[str, Path]:  # noqa: F811
    kontext = shutil.copytree(pipelines("flux"), tmp_path_factory.mktemp("kontext") / "model")
    index = json.loads((kontext / "model_index.json").read_text())
    (kontext / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}))
    found = {"kontext": kontext, "klein": pipelines("flux2"), "dev": dev}
    for name, pipeline in (("edit", QwenImageEditPipeline), ("plus", QwenImageEditPlusPipeline)):
        found[name] = save_qwen_edit(pipelines("qwen_image"), tmp_path_factory.mktemp(name), pipeline)
    return found


CASES = [("kontext", 1), ("klein", 1), ("klein", 2), ("dev", 2), ("kontext", 0), ("edit", 1), ("plus", 2)]
FAMILIES = {"kontext": "flux", "edit": "qwen_image", "plus": "qwen_image"}


def family_of(key: str, folders: dict[str, Path]) -> ModelFamily:
    return opened(FAMILIES.get(key, "flux2"), folders[key])


@pytest.mark.parametrize(("key", "count"), CASES)
def test_a_denoiser_sees_references_as_diffusers_own_pipeline_shows_them(key, count, folders, monkeypatch):
    family = family_of(key, folders)
    # The pipelines of Qwen-Image-Edit bring references to an area of their own: the first to 1024 x 1024 px, whatever
    # it is told, so it is not sampled here, which takes half a minute.
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 96 * 96)
    sizes = {"edit": [(1024, 1024)], "plus": [(96, 96), (128, 64)]}.get(key, SIZES)
    references = images(sizes[:count])
    assert family.least_references <= count <= family.most_references
    expect_same_inputs(family, references=references)
    if count and key != "edit":
        expect_same_picture(family, references=references)


def test_shapes_of_references_are_known_before_they_are_encoded(folders):
    family = family_of("klein", folders)
    shapes = family.input_shapes(Shape(1, 64, 96), [Shape(1, 96, 64), Shape(1, 64, 80)])
    vae = family.vae(CPU)
    for name, (width, height) in zip(("reference.0", "reference.1"), SIZES, strict=True):
        assert shapes[name] == vae.encode(torch.zeros(1, 3, height, width)).shape[1:]
