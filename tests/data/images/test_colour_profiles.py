"""Images with ICC profiles: what is read is sRGB, and without a profile, or with sRGB's, not a bit changes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from colour_profile import ADOBE_RGB, make_profile
from PIL import Image, ImageCms

from simpletuner.data.images.image_formats import register_plugin
from simpletuner.data.images.images import read_rgb, to_rgb

register_plugin()

COLOURS = [(200, 100, 100), (90, 160, 90), (40, 60, 200), (128, 128, 128), (255, 255, 255), (0, 0, 0)]
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
ADOBE, GREY = make_profile(ADOBE_RGB, 2.2), make_profile((), 1.0)
TO_LINEAR_SRGB = np.array([[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.033454],
                           [0.0719453, -0.2289914, 1.4052427]])  # fmt: skip
"""From XYZ for the white of profiles."""


def encoded_srgb(linear: np.ndarray) -> np.ndarray:
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def expected_from_adobe(colour: tuple[int, int, int]) -> np.ndarray:
    return encoded_srgb(TO_LINEAR_SRGB @ np.array(ADOBE_RGB).T @ (np.array(colour) / 255) ** 2.2)


def swatches() -> Image.Image:
    image = Image.new("RGB", (8 * len(COLOURS), 8))
    for number, colour in enumerate(COLOURS):
        image.paste(colour, (8 * number, 0, 8 * number + 8, 8))
    return image


def read(image: Image.Image, kind: str, **options) -> Image.Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return read_rgb(file, image.size)


def differs(one: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(one, int) - np.asarray(other, int)).max())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {"quality": 100, "subsampling": 0}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}),
        ("HEIF", {"quality": -1}),
    ],
)
def test_colours_of_a_profile_become_those_of_srgb_in_each_format(kind, options):
    image = read(swatches(), kind, icc_profile=ADOBE, **options)
    for number, colour in enumerate(COLOURS):
        found = np.array(image.getpixel((8 * number + 4, 4)))
        assert np.abs(found - expected_from_adobe(colour)).max() <= 6, (colour, found)
    assert image.getpixel((4, 4))[0] > 210, "red is more saturated in Adobe RGB"


def test_transparency_palettes_and_greys_are_converted_too():
    base = swatches()
    half = base.copy()
    half.putalpha(128)
    over_white = read(half, "PNG", icc_profile=ADOBE).getpixel((4, 4))
    assert np.abs(np.array(over_white) - (expected_from_adobe(COLOURS[0]) * 128 / 255 + 255 * 127 / 255)).max() <= 3
    paletted = read(base.quantize(len(COLOURS)), "PNG", icc_profile=ADOBE)
    assert differs(paletted, read(base, "PNG", icc_profile=ADOBE)) <= 2
    linear = Image.new("L", (8, 8), 128)
    assert abs(read(linear, "PNG", icc_profile=GREY).getpixel((4, 4))[1] - encoded_srgb(np.array(128 / 255))) <= 2
    deep = Image.fromarray(np.full((8, 8), 128 * 257, np.uint16))
    assert differs(read(deep, "PNG", icc_profile=GREY), read(linear, "PNG", icc_profile=GREY)) <= 1


@pytest.mark.parametrize("profile", [None, SRGB, GREY, ADOBE[:200], b"no profile", make_profile(ADOBE_RGB, 2.2)[:-40]])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK"])
def test_without_a_profile_that_fits_not_a_bit_changes(mode, profile):
    plain = swatches().convert(mode)
    image = plain.copy()
    if profile is not None:
        image.info["icc_profile"] = profile
    assert to_rgb(image).tobytes() == to_rgb(plain).tobytes() and to_rgb(image).mode == "RGB"
