from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scanning
from dataset_files import data_of, image, refusal
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from simpletuner.data.config.dataset_parts import ASPECTS
from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.data.images.geometry import Geometry, bucket_sizes, compute_geometry, resized_sizes
from simpletuner.data.samples.discovery import Discovery
from simpletuner.settings.values.shape import Shape


def dataset(**values) -> ImageDataset:
    return LocalImages(id="d", instance_data_dir=Path("x"), **values)


def bucket_size(data: ImageDataset, original: tuple[int, int], alignment_px: int) -> tuple[int, int]:
    width, height = bucket_sizes(data, np.array([original]), alignment_px)[0].tolist()
    return width, height


def geometry_of(data: ImageDataset, original: tuple[int, int], alignment_px: int) -> Geometry:
    target = bucket_size(data, original, alignment_px)
    resized = resized_sizes(data, np.array([original]), np.array([target]))[0].tolist()
    return compute_geometry(data, "x", *(Shape(1, *size[::-1]) for size in (original, resized, target)), 0)


def add(folder: Path, name: str, size: tuple[int, int] = (64, 64)) -> None:
    Image.new("RGB", size, "red").save(folder / name)


def found_in(folder: Path, name: str = "d", **values) -> Discovery:
    values = {"caption_strategy": "filename", "resolution": 64, **values}
    return scanning.found([LocalImages(id=name, instance_data_dir=folder, **values)])


SIDES = st.integers(64, 4000)
DOWNSAMPLED = {"crop": True, "crop_aspect": "square", "resolution": 512}


@pytest.mark.parametrize(
    ("values", "original", "expected"),
    [
        ({"maximum_image_size": 1499, "target_downsample_size": 768, "resolution_type": "pixel"}, (3000, 1500),
         ((1536, 768), (512, 128), (512, 512))),
        ({"maximum_image_size": 1500, "target_downsample_size": 768, "resolution_type": "pixel"}, (3000, 1500),
         ((1024, 512), (256, 0), (512, 512))),
        ({"maximum_image_size": 1999, "target_downsample_size": 1000}, (4000, 1000),
         ((2048, 512), (768, 0), (512, 512))),  # 2000x500 would not cover the bucket
        ({"maximum_image_size": 4, "target_downsample_size": 1, "resolution": 0.25, "resolution_type": "area"},
         (3000, 1500), ((1414, 707), (459, 105), (496, 496))),
        ({"maximum_image_size": 600, "target_downsample_size": 600, "crop": False}, (3000, 1500),
         ((736, 368), (0, 0), (736, 368))),
    ],
)  # fmt: skip
def test_images_above_the_maximum_are_cropped_from_the_target_size(values, original, expected):
    geometry = geometry_of(dataset(**{**DOWNSAMPLED, **values}), original, 16)
    assert (geometry.resized.size, geometry.crop_left_top, geometry.target.size) == expected


def test_a_corner_is_the_upper_left_one_and_only_with_crop():
    data = dataset(resolution=64, crop=True, crop_style="corner")
    assert geometry_of(data, (200, 100), 64) == Geometry(
        Shape(1, 100, 200), Shape(1, 64, 128), (0, 0), Shape(1, 64, 64)
    )
    uncropped = [
        geometry_of(dataset(resolution=64, crop_style=style), (190, 100), 64) for style in ("corner", "center")
    ]
    assert uncropped[0] == uncropped[1]


@given(SIDES, SIDES)
def test_the_closest_aspect_is_chosen(width, height):
    data = dataset(resolution=512, crop=True, crop_aspect="closest", crop_aspect_buckets=[2, 1, 0.5])
    found, aspect = bucket_size(data, (width, height), 8), width / height
    assert found == ((512, 512) if 0.5 < aspect**2 <= 2 else (720, 360) if aspect > 1 else (360, 720))
    standard = bucket_size(dataset(resolution=512, crop=True, crop_aspect="closest"), (width, height), 8)
    nearest = min(ASPECTS, key=lambda each: abs(np.log(aspect / each)))
    assert standard == bucket_size(dataset(resolution=512), (round(nearest * 3600), 3600), 8)


def test_of_aspects_those_that_enlarge_too_much_are_passed_over():
    values = {"crop": True, "crop_aspect": "closest", "crop_aspect_buckets": [1.0, 2.0], "resolution": 256}
    values["resolution_type"] = "pixel"  # with equal areas, the closest aspect enlarges least
    thresholds = (None, 0.15, 0.1)  # 450x300 is nearer to 2:1, for which it grows by 14 %
    chosen = [bucket_size(dataset(**values, max_upscale_threshold=each), (450, 300), 8) for each in thresholds]
    assert chosen == [(512, 256), (512, 256), (256, 256)]
    assert bucket_size(dataset(**values, max_upscale_threshold=0.1), (90, 60), 8) == (512, 256), "none is within it"


def test_images_that_would_be_enlarged_more_than_allowed_are_left_out(tmp_path):
    for side in (50, 58, 64, 200):
        add(tmp_path, f"{side}.png", size=(side, side))
    assert [len(found_in(tmp_path, max_upscale_threshold=each).samples) for each in (None, 0.3, 0.2, 0)] == [4, 4, 3, 2]
    assert found_in(tmp_path, max_upscale_threshold=0.2).unwanted == 1


def targets_in(folder, seed: int = 0, **values) -> dict[str, tuple[int, int]]:
    values = {
        "caption_strategy": "filename",
        "resolution": 64,
        "crop": True,
        "crop_aspect": "random",
        "crop_aspect_buckets": [0.5, 1.0, 2.0],
        **values,
    }
    images = LocalImages(id="d", instance_data_dir=folder, **values)
    samples = scanning.found([images], alignment_px=8, seed=seed).samples
    for sample in samples:
        geometry = sample.geometry
        assert all(a >= b for a, b in zip(geometry.resized.size, geometry.target.size, strict=True))
        assert min(a - b for a, b in zip(geometry.resized.size, geometry.target.size, strict=True)) <= 1
    return {sample.name: sample.geometry.target.size for sample in samples}


def test_a_random_aspect_depends_on_seed_and_name_alone(tmp_path):
    for number in range(40):
        add(tmp_path, f"{number:02d}.png", size=(128, 96 if number % 2 else 128))
    targets = targets_in(tmp_path)
    assert set(targets.values()) == {(64, 64), (88, 48), (48, 88)} and targets == targets_in(tmp_path)
    assert targets != targets_in(tmp_path, seed=1)
    (tmp_path / "00.png").unlink()
    add(tmp_path, "00a.png", size=(64, 300))
    assert {name: target for name, target in targets.items() if name != "00.png"}.items() <= targets_in(
        tmp_path
    ).items()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"maximum_image_size": 2000}, "target_downsample_size (d, dataset `one`): is missing: it belongs to max"),
        ({"target_downsample_size": 2000}, "maximum_image_size (d, dataset `one`): is missing: it belongs to target"),
        ({"maximum_image_size": 2000, "target_downsample_size": 3000},
         "target_downsample_size = 3000 (d, dataset `one`): must be from resolution=1024 to maximum_image_size=2000"),
        ({"maximum_image_size": 2000, "target_downsample_size": 900}, "must be from resolution=1024 to"),
        ({"max_upscale_threshold": -0.1}, "max_upscale_threshold = -0.1 (d, dataset `one`): use a number"),
        ({"crop_aspect_buckets": [1.0]}, "only crop_aspect closest and random choose from it, with crop true"),
        ({"crop": True, "crop_aspect": "random", "crop_aspect_buckets": ["x"]}, "use numbers from 0.1 to 10"),
        ({"crop": True, "crop_aspect": "random", "crop_aspect_buckets": 1.5}, "use a list of 1 to 256 aspects"),
        ({"max_num_samples": -1}, "max_num_samples = -1 (d, dataset `one`): use a whole number of at least 1"),
    ],
)  # fmt: skip
def test_wrong_values_are_mistakes(tmp_path, values, said):
    message = refusal(data_of(tmp_path, image(**values))).replace(f"{tmp_path}/multidatabackend.json:1", "d")
    assert said in message


def test_a_number_of_samples_is_a_subset_that_hardly_changes_when_images_are_added(tmp_path):
    for number in range(60):
        add(tmp_path, f"{number}.png")

    def names(**values) -> set[str]:
        return {sample.name for sample in found_in(tmp_path, **values).samples}

    chosen = names(max_num_samples=20)
    assert len(chosen) == 20 and chosen == names(max_num_samples=20) and names(max_num_samples=21) > chosen
    assert found_in(tmp_path, max_num_samples=20).surplus == 40
    assert names(max_num_samples=60) == names(max_num_samples=10**9) == names()
    assert {name[:-4] for name in names(max_num_samples=20, name="other")} != {name[:-4] for name in chosen}
    for number in range(60, 66):
        add(tmp_path, f"{number}.png")
    after = names(max_num_samples=20)
    assert len(after & chosen) >= 14 and after - chosen <= {f"{number}.png" for number in range(60, 66)}
