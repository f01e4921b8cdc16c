from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.data.images.geometry import (
    Geometry,
    are_within_limits,
    bucket_sizes,
    compute_geometry,
    cropped_shares,
    resized_sizes,
    round_to_multiples,
)
from simpletuner.settings.values.shape import Shape


def one(size: tuple[int, int]) -> np.ndarray:
    return np.array([size])


def bucket_size(data: ImageDataset, original: tuple[int, int], alignment_px: int) -> tuple[int, int]:
    width, height = bucket_sizes(data, one(original), alignment_px)[0].tolist()
    return width, height


def cropped_share(shape: tuple[int, int], target: tuple[int, int]) -> float:
    return cropped_shares(one(shape), one(target)).item()


def round_to_multiple(side_px: float, alignment_px: int) -> int:
    return round_to_multiples(np.array([side_px]), alignment_px).item()


def geometry_of(data: ImageDataset, name: str, original: tuple[int, int], alignment_px: int, seed: int) -> Geometry:
    target = bucket_size(data, original, alignment_px)
    resized = resized_sizes(data, one(original), one(target))[0].tolist()
    return compute_geometry(data, name, *(Shape(1, *size[::-1]) for size in (original, resized, target)), seed)


def dataset(**values) -> ImageDataset:
    return LocalImages(id="d", instance_data_dir=Path("x"), **values)


SIDES = st.integers(1, 9000)
ALIGNMENTS = st.sampled_from([8, 16, 32, 64, 128])
DATASETS = st.one_of(
    st.builds(
        dataset,
        resolution=st.integers(64, 2048).map(float),
        resolution_type=st.sampled_from(["pixel", "pixel_area"]),
        crop=st.booleans(),
        crop_style=st.sampled_from(["center", "random"]),
        crop_aspect=st.sampled_from(["square", "preserve"]),
    ),
    st.builds(
        dataset,
        resolution=st.floats(0.05, 4),
        resolution_type=st.just("area"),
        crop=st.booleans(),
        crop_style=st.sampled_from(["center", "random"]),
        crop_aspect=st.sampled_from(["square", "preserve"]),
    ),
)


@pytest.mark.parametrize(
    ("values", "original", "expected"),
    [
        ({}, (4000, 3000), (1152, 896)),  # SDXL's own size, where least_crop has 1216x896
        ({}, (3000, 4000), (896, 1152)),
        ({}, (1920, 1080), (1344, 768)),
        ({}, (3000, 3000), (1024, 1024)),
        ({"resolution": 1.0, "resolution_type": "area"}, (4000, 3000), (1152, 896)),  # 1 megapixel: 1024x1024
        ({"resolution": 512.0, "resolution_type": "pixel"}, (1920, 1080), (896, 512)),
        ({"resolution": 512.0, "resolution_type": "pixel"}, (1080, 1920), (512, 896)),
        ({}, (10, 9000), (128, 10240)),
        ({"crop": True}, (4000, 3000), (1024, 1024)),
    ],
)
def test_nearest_rounds_each_side_of_a_bucket_by_itself(values, original, expected):
    data = dataset(**{"resolution": 1024.0, "resolution_type": "pixel_area", "aspect_bucket_sizes": "nearest"} | values)
    assert bucket_size(data, original, 64) == expected


@given(DATASETS, SIDES, SIDES, ALIGNMENTS, st.integers(0, 2**40))
@hypothesis_settings(max_examples=300, deadline=None)
def test_every_picture_covers_its_bucket_and_is_cropped_inside(data, width, height, alignment_px, seed):
    g = geometry_of(data, "d/a.jpg", (width, height), alignment_px, seed)
    assert g.original.size == (width, height)
    for side in (0, 1):
        assert g.target.size[side] >= alignment_px
        assert g.target.size[side] % alignment_px == 0
        assert g.resized.size[side] >= g.target.size[side]
        assert 0 <= g.crop_left_top[side] <= g.resized.size[side] - g.target.size[side]
    assert g.resized.width == g.target.width or g.resized.height == g.target.height
    assert abs(g.resized.width * height - g.resized.height * width) <= max(width, height)
    if data.crop and data.crop_aspect == "square":
        assert g.target.width == g.target.height


@given(st.integers(200, 4000), st.integers(200, 4000), ALIGNMENTS, st.integers(512, 2048))
@hypothesis_settings(max_examples=200, deadline=None)
def test_aspect_and_area_are_met_up_to_the_alignment(width, height, alignment_px, resolution):
    target = bucket_size(dataset(resolution=resolution), (width, height), alignment_px)
    aspect = width / height
    ideal = (resolution * aspect**0.5, resolution / aspect**0.5)
    for side in (0, 1):
        assert abs(target[side] - ideal[side]) <= alignment_px + 1e-6 or target[side] == alignment_px


@given(st.integers(300, 4000), st.integers(300, 4000), st.sampled_from([512, 768, 1024, 1536]))
@hypothesis_settings(max_examples=200, deadline=None)
def test_no_neighbouring_bucket_near_the_area_cuts_less_off(width, height, resolution):
    target = bucket_size(dataset(resolution=resolution), (width, height), 64)
    ideal = (resolution * (width / height) ** 0.5, resolution * (height / width) ** 0.5)
    for w in (int(ideal[0] // 64) * 64, int(ideal[0] // 64) * 64 + 64):
        for h in (int(ideal[1] // 64) * 64, int(ideal[1] // 64) * 64 + 64):
            if w and h and abs(w * h / resolution**2 - 1) < 0.1:
                assert cropped_share((width, height), target) <= cropped_share((width, height), (w, h)) + 1e-9


def test_half_as_much_is_cut_off_as_by_rounding_each_side():
    aspects = [(1000 + 3 * n, 1600) for n in range(1000)]  # 0.63 to 2.5
    rounded = [tuple(round_to_multiple(1024 * (a / b) ** e, 64) for e in (0.5, -0.5)) for a, b in aspects]
    before = [cropped_share(aspect, size) for aspect, size in zip(aspects, rounded, strict=True)]
    after = [cropped_share(aspect, bucket_size(dataset(), aspect, 64)) for aspect in aspects]
    assert sum(after) < 0.52 * sum(before)


@given(st.integers(64, 3000), st.integers(64, 3000))
@hypothesis_settings(deadline=None)
def test_a_turned_picture_gets_the_turned_bucket(width, height):
    assert bucket_size(dataset(), (width, height), 64) == bucket_size(dataset(), (height, width), 64)[::-1]


@pytest.mark.parametrize(
    ("values", "original", "target"),
    [
        ({}, (1024, 1024), (1024, 1024)),
        ({}, (4000, 3000), (1216, 896)),
        ({}, (6000, 2000), (1728, 576)),
        ({}, (2560, 1080), (1536, 640)),
        ({}, (3000, 2000), (1280, 832)),
        ({}, (1920, 1080), (1344, 768)),
        ({"resolution": 512}, (1920, 1080), (704, 384)),
        ({"resolution": 1, "resolution_type": "area"}, (1000, 1000), (1024, 1024)),
        ({"resolution": 0.5, "resolution_type": "area"}, (3000, 2000), (896, 576)),
        ({"resolution": 1024, "resolution_type": "pixel"}, (3000, 2000), (1536, 1024)),
        ({"resolution": 1024, "resolution_type": "pixel"}, (2000, 3000), (1024, 1536)),
        ({"resolution": 768, "crop": True}, (3000, 2000), (768, 768)),
        ({"resolution": 768, "crop": True, "crop_aspect": "preserve"}, (3000, 2000), (960, 640)),
        ({"resolution": 1, "resolution_type": "area", "crop": True}, (3000, 2000), (1024, 1024)),
        ({"resolution": 64}, (10000, 1), (6400, 64)),
    ],
)
def test_buckets_of_known_pictures(values, original, target):
    assert bucket_size(dataset(**values), original, 64) == target


def test_a_whole_geometry_worked_out_by_hand():
    # 4000x3000: bucket 1216x896; scale = max(0.304, 0.29867) = 0.304, so 1216x912, and 16 px overhang
    assert geometry_of(dataset(), "d/a", (4000, 3000), 64, 0) == Geometry(
        Shape(1, 3000, 4000), Shape(1, 912, 1216), (0, 8), Shape(1, 896, 1216)
    )


@pytest.mark.parametrize(("side", "nearest"), [(1, 64), (31, 64), (95, 64), (96, 128), (97, 128), (128, 128)])
def test_a_side_is_brought_to_the_nearest_multiple(side, nearest):
    assert round_to_multiple(side, 64) == nearest


def test_a_centred_crop_takes_the_middle():
    g = geometry_of(dataset(crop=True, resolution=512), "d/a", (1536, 512), 64, 3)
    assert g == Geometry(Shape(1, 512, 1536), Shape(1, 512, 1536), (512, 0), Shape(1, 512, 512))


def test_a_random_crop_depends_on_seed_and_sample_alone():
    data = dataset(crop=True, crop_style="random", resolution=512)

    def place(sample: str, seed: int) -> tuple[int, int]:
        return geometry_of(data, sample, (3000, 600), 64, seed).crop_left_top

    assert place("d/a", 1) == place("d/a", 1)
    assert len({place("d/a", seed) for seed in range(20)}) > 15
    assert len({place(f"d/{number}", 1) for number in range(20)}) > 15
    assert place("d/a", 1)[1] == 0


def test_random_crops_reach_both_ends():
    data = dataset(crop=True, crop_style="random", resolution=64)
    lefts = {geometry_of(data, f"d/{number}", (67, 64), 64, 0).crop_left_top[0] for number in range(60)}
    assert lefts == {0, 1, 2, 3}


def test_without_crop_a_random_style_changes_nothing():
    assert geometry_of(dataset(crop_style="random"), "d/a", (4000, 3000), 64, 5).crop_left_top == (0, 8)


@pytest.mark.parametrize(
    ("limits", "original", "wanted"),
    [
        ({}, (1, 1), True),
        ({"minimum_image_size": 512, "resolution_type": "pixel"}, (512, 2000), True),
        ({"minimum_image_size": 512, "resolution_type": "pixel"}, (511, 2000), False),
        ({"minimum_image_size": 512, "resolution_type": "pixel_area"}, (256, 1024), True),
        ({"minimum_image_size": 512, "resolution_type": "pixel_area"}, (255, 1024), False),
        ({"minimum_image_size": 0.5, "resolution": 1, "resolution_type": "area"}, (1000, 500), True),
        ({"minimum_image_size": 0.5, "resolution": 1, "resolution_type": "area"}, (1000, 499), False),
        ({"minimum_aspect_ratio": 0.5}, (500, 1000), True),
        ({"minimum_aspect_ratio": 0.5}, (499, 1000), False),
        ({"maximum_aspect_ratio": 2}, (2000, 1000), True),
        ({"maximum_aspect_ratio": 2}, (2001, 1000), False),
    ],
)
def test_limits_of_size_and_aspect_include_the_limit_itself(limits, original, wanted):
    assert are_within_limits(dataset(**limits), one(original)).item() is wanted
