"""Colours that no ICC profile tells: converted as an ICC profile of the same colours is, or named."""

from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
import pytest
from colour_profile import ADOBE_RGB, make_profile
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from simpletuner.data.images.colours import HDR, of_boxes, of_exif, of_tiff
from simpletuner.data.images.image_formats import register_plugin
from simpletuner.data.images.images import DOUBT, read_rgb

register_plugin()

P3 = ((0.515102, 0.241182, -0.00105), (0.291965, 0.692236, 0.041881), (0.157153, 0.066582, 0.784378))
"""XYZ of Display P3's red, green and blue at D50, as Apple's profile has them."""
COLOURS = [(220, 40, 40), (90, 160, 90), (40, 60, 200), (128, 128, 128), (255, 255, 255), (0, 0, 0)]
WHITE_AND_P3 = (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06)


def swatches(mode: str = "RGB") -> Image.Image:
    image = Image.new("RGB", (16 * len(COLOURS), 16))
    for number, colour in enumerate(COLOURS):
        image.paste(colour, (16 * number, 0, 16 * number + 16, 16))
    return image.convert(mode)


def saved(kind: str, mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    swatches(mode).save(file, kind, **options)
    return file.getvalue()


def png(*chunks: tuple[bytes, bytes], mode: str = "RGB") -> bytes:
    whole = saved("PNG", mode)
    made = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return whole[:33] + made + whole[33:]


def read(content: bytes) -> Image.Image:
    return read_rgb(io.BytesIO(content), (16 * len(COLOURS), 16))


def by_profile(kind: str, profile: bytes, mode: str = "RGB", **options) -> Image.Image:
    return read(saved(kind, mode, icc_profile=profile, **options))


def differs(one: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(one, int) - np.asarray(other, int)).max())


def numbers(*values: float) -> bytes:
    return b"".join(struct.pack(">I", round(value * 1e5)) for value in values)


def with_nclx(content: bytes, primaries: int, transfer: int) -> bytes:
    """Return an AVIF or HEIC with other codes in its colr box."""
    start = content.index(b"colrnclx") + 8
    return content[:start] + struct.pack(">HH", primaries, transfer) + content[start + 4 :]


def adobe_exif(order: str = "<", index: bytes = b"R03\0", space: int = 0xFFFF) -> bytes:
    """Return EXIF as cameras write it: a directory, EXIF's own, and that of interoperability."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    value = struct.pack(f"{order}HH", space, 0)
    first = struct.pack(f"{order}HHHIII", 1, 0x8769, 4, 1, 26, 0)
    own = struct.pack(f"{order}HHHI", 2, 0xA001, 3, 1) + value + struct.pack(f"{order}HHIII", 0xA005, 4, 1, 56, 0)
    interoperability = struct.pack(f"{order}HHHI", 1, 1, 2, 4) + index + bytes(4)
    return b"Exif\0\0" + mark + struct.pack(f"{order}I", 8) + first + own + interoperability


def tiff(mode: str = "RGB", **tags: tuple[float, ...]) -> bytes:
    directory = ImageFileDirectory_v2()
    for name, values in tags.items():
        number = {"white": 318, "primaries": 319, "curve": 301}[name]
        directory.tagtype[number], directory[number] = (3 if name == "curve" else 5), values
    return saved("TIFF", mode, tiffinfo=directory)


SRGB_CURVE = tuple(
    round(65535 * (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4)) for v in (n / 255 for n in range(256))
)
LINEAR_CURVE = tuple(257 * n for n in range(256))
P3_TAGS = {"white": WHITE_AND_P3[:2], "primaries": WHITE_AND_P3[2:]}
LOSSLESS = {"quality": 100, "subsampling": "4:4:4"}


def p3_of_srgb_curve() -> np.ndarray:
    """Return the swatches in sRGB, taken for Display P3, by the definition of both."""
    values = np.array(COLOURS) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    to_srgb = np.array([[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.033454],
                        [0.0719453, -0.2289914, 1.4052427]])  # fmt: skip
    found = (linear @ np.array(P3) @ to_srgb.T).clip(0, 1)
    return 255 * np.where(found <= 0.0031308, 12.92 * found, 1.055 * found ** (1 / 2.4) - 0.055)


def middles(image: Image.Image) -> np.ndarray:
    return np.asarray(image, float)[8, 8::16]


@pytest.mark.parametrize(
    "content",
    [
        png((b"cICP", bytes([12, 13, 0, 1]))),
        png((b"gAMA", numbers(1 / 2.2)), (b"cHRM", numbers(*WHITE_AND_P3))),
        with_nclx(saved("AVIF", **LOSSLESS), 12, 13),
        with_nclx(saved("HEIF", quality=-1, chroma=444), 12, 13),
        tiff(**P3_TAGS),
        tiff(**P3_TAGS, curve=SRGB_CURVE),
        tiff(primaries=WHITE_AND_P3[2:], curve=3 * SRGB_CURVE),
    ],
    ids=["cICP", "cHRM", "AVIF", "HEIC", "TIFF", "TIFF with a curve", "TIFF with three curves"],
)
def test_display_p3_becomes_srgb(content):
    assert np.abs(middles(read(content)) - p3_of_srgb_curve()).max() <= 3
    assert read(content).info[DOUBT] == ""


@pytest.mark.parametrize("exif", [adobe_exif(), adobe_exif(">"), adobe_exif(index=b"R98\0", space=2)])
@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {}),
                                               ("WEBP", {"lossless": True}), ("AVIF", LOSSLESS)])  # fmt: skip
def test_adobe_rgb_by_exif_is_that_of_its_profile(kind, options, exif):
    expected = by_profile(kind, make_profile(ADOBE_RGB, 563 / 256), **options)
    assert differs(read(saved(kind, exif=exif, **options)), expected) <= 2
    is_srgb = adobe_exif(index=b"R98\0", space=1)
    assert differs(read(saved(kind, exif=is_srgb, **options)), read(saved(kind, **options))) == 0


@pytest.mark.parametrize("own", [{0xA001: 2}, {0xA001: 0xFFFF, 0xA005: {1: "R03"}}])
def test_adobe_rgb_by_the_exif_of_a_tiff_is_that_of_its_profile(own):
    def of(entries) -> bytes:
        exif = Image.Exif()
        exif.get_ifd(0x8769).update(entries)
        exif[0x8769] = entries
        return saved("TIFF", exif=exif)

    assert differs(read(of(own)), by_profile("TIFF", make_profile(ADOBE_RGB, 563 / 256))) <= 2
    assert differs(read(of({0xA001: 1, 0xA005: {1: "R98"}})), swatches()) == 0


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_gamma_of_one_is_linear(kind, mode):
    found = read(tiff(mode, curve=LINEAR_CURVE) if kind == "TIFF" else png((b"gAMA", numbers(1.0)), mode=mode))
    values = np.asarray(swatches(mode).convert("RGB"), float)[8, 8::16] / 255
    expected = 255 * np.where(values <= 0.0031308, 12.92 * values, 1.055 * values ** (1 / 2.4) - 0.055)
    assert np.abs(middles(found) - expected).max() <= 2


SRGB_CHUNKS = (b"gAMA", numbers(1 / 2.2)), (b"cHRM", numbers(0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06))


@pytest.mark.parametrize(
    "content",
    [
        png(*SRGB_CHUNKS),
        png((b"sRGB", b"\0"), (b"gAMA", numbers(1.0))),
        png((b"cICP", bytes([1, 13, 0, 1])), (b"gAMA", numbers(1.0))),
        png((b"cICP", bytes([2, 2, 0, 1]))),
        png((b"cICP", bytes([1, 1, 0, 1]))),
        png((b"gAMA", numbers(0.0))),
        png((b"gAMA", b"\xff\xff\xff\xff")),
        png((b"cHRM", bytes(32))),
        png((b"cHRM", numbers(*[0.3] * 8))),
        png((b"cHRM", numbers(0.3, 0.3))),
        png((b"cICP", b"\x0c"), (b"gAMA", b"")),
        tiff(primaries=(0.64, 0.33, 0.3, 0.6, 0.15, 0.06), white=(0.3127, 0.329), curve=SRGB_CURVE),
        tiff(primaries=WHITE_AND_P3[2:7]),
        tiff(primaries=(0.3,) * 6),
        tiff(white=(0.0, 0.0), primaries=(0.0,) * 6),
        tiff(curve=LINEAR_CURVE[:255]),
        tiff(curve=(0,) * 256),
    ],
)
def test_what_is_srgb_or_damaged_changes_not_a_bit(content):
    assert differs(read(content), swatches()) == 0


def test_what_cannot_be_converted_is_named():
    for content in (png((b"cICP", bytes([9, 16, 0, 1]))), with_nclx(saved("AVIF"), 9, 18)):
        assert read(content).info[DOUBT] == HDR
    assert "primaries 40" in read(png((b"cICP", bytes([40, 13, 0, 1])))).info[DOUBT]


def test_boxes_and_directories_that_are_cut_or_endless_say_nothing_and_raise_nothing():
    whole, chance = with_nclx(saved("AVIF"), 12, 13), random.Random(1)
    assert of_boxes(io.BytesIO(whole)).profile
    for _ in range(400):
        damaged = bytearray(whole[: chance.randrange(len(whole))])
        for _ in range(3):
            damaged[chance.randrange(len(damaged) + 1) : len(damaged)][:1] = bytes([chance.randrange(256)])
        start = chance.choice([whole.index(name) - 4 for name in (b"meta", b"iprp", b"ipco", b"colr")])
        damaged[start : start + 4] = chance.choice([bytes(4), b"\0\0\0\1", b"\xff\xff\xff\xff", b"\0\0\0\7"])
        of_boxes(io.BytesIO(damaged))
        exif = adobe_exif()
        of_tiff({}, io.BytesIO(exif[6 : chance.randrange(6, len(exif))]))
        of_exif(exif[: chance.randrange(len(exif))])
        of_exif(exif[:14] + chance.randbytes(len(exif) - 14))
