"""References and first frames fit the model, or a sentence says why not; files become references of the right size."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scanning import drawn

from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.errors import SettingsError
from simpletuner.preparation.plan import check_references, with_first_frames
from simpletuner.preparation.sampled_prompts import read_reference
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.values.shape import Shape


def family(least: int = 0, most: int = 0, image_to_video: str = "never") -> Any:
    """Return what is asked of a family here."""
    return SimpleNamespace(
        pipeline_name="Shape", least_references=least, most_references=most, image_to_video=image_to_video
    )


def dataset(references: int, **keys: Any) -> LocalImages:
    place = {"instance_data_dir": Path(), "dataset_type": "conditioning", "conditioning_type": "reference_strict"}
    others = [LocalImages(id=f"r{number}", **place) for number in range(references)]
    return LocalImages(id="images", instance_data_dir=Path(), **keys).paired_with(others)


def refusal(model: Any, datasets: list[Any], prompts: list[ValidationPrompt], **data: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        check_references(model, Settings(data=Data(**data)), datasets, prompts)
    return caught.value.message


def test_as_many_references_are_taken_as_the_pipeline_takes(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    given = ValidationPrompt(prompt="x", images=[tmp_path / "a.png"] * 2)
    check_references(family(1, 2), Settings(), [dataset(1), dataset(2)], [given, ValidationPrompt(prompt="y")])
    assert "`images`: 2 reference images, and Shape takes at most 1" in refusal(family(1, 1), [dataset(2)], [])
    assert "`images`: 1 reference image, and Shape takes none" in refusal(family(), [dataset(1)], [])
    assert "`images`: no reference image, and Shape edits images" in refusal(family(1, 2), [dataset(0)], [])
    assert "validation_images: 2 reference images" in refusal(family(0, 1), [dataset(0)], [given])
    said = refusal(family(1, 1), [dataset(1)], [], reference_dropout_probability=0.1)
    assert "reference_dropout_probability: Shape makes no image without a reference" in said


@pytest.mark.parametrize(
    ("asked", "mode", "frames", "said"),
    [
        (True, "never", 9, "video.is_i2v, but Shape is given no first frame"),
        (False, "always", 9, "Shape continues the first frame of clips"),
        (None, "always", 1, "some clips have one frame, after which nothing follows"),
        (True, "optional", 1, "some clips have one frame, after which nothing follows"),
        (True, "optional", 9, ""),
        (None, "optional", 1, ""),
    ],
)
def test_first_frames_are_given_where_model_and_dataset_agree(asked, mode, frames, said):
    part = drawn((64, 64), video=VideoSettings(is_i2v=asked), dataset_type="video")
    part.sizes.frames[:] = frames
    plan: Any = SimpleNamespace(samples=SimpleNamespace(parts=[part]))
    if not said:
        assert with_first_frames(plan, family(image_to_video=mode)) is plan
        return
    with pytest.raises(SettingsError, match=said):
        with_first_frames(plan, family(image_to_video=mode))


@pytest.mark.parametrize(("multiple", "size", "white"), [(None, (64, 32), 1.0), (16, (16, 128), 1 / 16)])
def test_a_file_is_cropped_to_the_result_or_keeps_its_aspect(multiple, size, white, tmp_path):
    pixels = np.zeros((160, 20, 3), np.uint8)
    pixels[75:85] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = read_reference(tmp_path / "a.png", Shape(1, 32, 64), multiple)
    assert image.size == size
    # The band in the middle is as high as the part that is cut out, or keeps its share of the height.
    assert (np.asarray(image.convert("L")) > 128).mean() == pytest.approx(white, abs=0.05)
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(SettingsError, match="cannot be decoded"):
        read_reference(tmp_path / "a.png", Shape(1, 32, 64), multiple)


def test_a_reference_that_is_a_fifo_is_not_read(tmp_path):
    os.mkfifo(path := tmp_path / "a.png")
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # who reads does not wait for one
    os.write(writer, bytes(1 << 12))
    with pytest.raises(SettingsError, match="not a regular file"):
        read_reference(path, Shape(1, 32, 64), None)
    os.close(writer)
