from __future__ import annotations

import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

from simpletuner.data.images import images
from simpletuner.data.images.image_formats import (
    PILLOW_FORMATS,
    PLUGIN_FORMAT,
    read_suffixes,
    register_plugin,
    suffix_of_content,
)
from simpletuner.data.images.images import DECODE_ERRORS, DOUBT, ImageHeader, resize_and_crop
from simpletuner.data.storage.storage import LocalStorage

register_plugin()  # Pillow writes the HEIC files of these tests by it

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
SIZE = (64, 32)
CAPTURED = {"capture_output": True, "text": True}


def read_header(path: Path) -> ImageHeader:
    with path.open("rb") as file:
        return images.read_header(file)


def read_rgb(path: Path, smallest: tuple[int, int]) -> Image.Image:
    with path.open("rb") as file:
        return images.read_rgb(file, smallest)


def red_and_blue() -> Image.Image:
    """Red in the left half, blue in the right."""
    picture = Image.new("RGB", SIZE, RED)
    picture.paste(BLUE, (SIZE[0] // 2, 0, *SIZE))
    return picture


def saved(picture: Image.Image, path: Path, **options) -> Path:
    picture.save(path, **options)
    return path


def rotated(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def looks(picture: Image.Image, x: int, y: int, colour: tuple[int, int, int], tolerance: int = 12) -> None:
    shown = picture.getpixel((x, y))
    assert max(abs(a - b) for a, b in zip(shown, colour, strict=True)) <= tolerance, (shown, colour)


def read_whole(path: Path) -> Image.Image:
    picture = read_rgb(path, read_header(path).size)
    assert picture.mode == "RGB"
    assert picture.size == read_header(path).size
    return picture


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.png", {}),
        ("a.jpg", {"quality": 95}),
        ("a.JPEG", {"quality": 95, "progressive": True}),
        ("a.webp", {"quality": 95}),
        ("a.webp", {"lossless": True}),
        ("a.jfif", {"quality": 95, "format": "JPEG"}),
        ("a.avif", {"quality": 95}),
        ("a.heic", {"quality": 95}),
        ("a.tif", {}),
        ("a.TIFF", {"compression": "tiff_lzw"}),
        ("a.bmp", {}),
        ("a.gif", {}),
    ],
)
def test_size_and_colours_of_each_format(tmp_path, name, options):
    path = saved(red_and_blue(), tmp_path / name, **options)
    assert path.suffix.lower() in read_suffixes()
    kinds = {".jfif": ".jpg", ".jpeg": ".jpg", ".tiff": ".tif"}
    assert suffix_of_content(path.read_bytes()[:12]) == kinds.get(path.suffix.lower(), path.suffix.lower())
    assert read_header(path) == ImageHeader(SIZE)
    picture = read_whole(path)
    looks(picture, 8, 16, RED)
    looks(picture, 56, 16, BLUE)


@pytest.mark.parametrize(
    ("orientation", "size", "red", "blue"),
    [
        (1, (64, 32), (8, 16), (56, 16)),
        (2, (64, 32), (56, 16), (8, 16)),
        (3, (64, 32), (56, 16), (8, 16)),
        (6, (32, 64), (16, 8), (16, 56)),
        (8, (32, 64), (16, 56), (16, 8)),
    ],
)
def test_a_jpeg_is_measured_and_read_as_its_exif_orientation_shows_it(tmp_path, orientation, size, red, blue):
    path = saved(red_and_blue(), tmp_path / "a.jpg", exif=rotated(orientation), quality=95)
    assert read_header(path).size == size
    picture = read_whole(path)
    looks(picture, *red, RED)
    looks(picture, *blue, BLUE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.png", {"exif": rotated(6)}),
        ("a.webp", {"exif": rotated(6), "lossless": True}),
        ("a.avif", {"exif": rotated(6), "quality": 95}),  # Pillow writes AVIF's own `irot`
        ("a.heic", {"exif": rotated(6).tobytes(), "quality": 95}),
        ("a.tif", {"tiffinfo": {0x0112: 6}}),
    ],
)
def test_other_formats_are_measured_and_read_as_their_orientation_shows_them(tmp_path, name, options):
    path = saved(red_and_blue(), tmp_path / name, **options)
    assert b"irot" in path.read_bytes() or path.suffix not in (".avif", ".heic")
    picture = read_whole(path)
    assert picture.size == (32, 64)
    looks(picture, 16, 8, RED)
    looks(picture, 16, 56, BLUE)


def test_grey_stays_grey(tmp_path):
    picture = read_whole(saved(Image.new("L", SIZE, 100), tmp_path / "a.png"))
    looks(picture, 1, 1, (100, 100, 100), tolerance=0)


def test_a_grey_jpeg_is_read(tmp_path):
    picture = read_whole(saved(Image.new("L", SIZE, 100), tmp_path / "a.jpg"))
    looks(picture, 1, 1, (100, 100, 100), tolerance=2)


def test_black_and_white_is_read(tmp_path):
    picture = read_whole(saved(Image.new("1", SIZE, 1), tmp_path / "a.png"))
    looks(picture, 1, 1, WHITE, tolerance=0)


@pytest.mark.parametrize(("value", "shown"), [(0, 0), (32768, 128), (65535, 255), (257 * 100, 100)])
def test_sixteen_bit_grey_is_scaled_to_eight_bits(tmp_path, value, shown):
    picture = Image.fromarray(np.full(SIZE[::-1], value, dtype=np.uint16))
    path = saved(picture, tmp_path / "a.png")
    with Image.open(path) as again:
        assert again.mode.startswith("I")
    looks(read_whole(path), 3, 3, (shown, shown, shown), tolerance=1)
    with Image.open(saved(picture, tmp_path / "a.tif")) as again:
        assert again.mode.startswith("I")
    looks(read_whole(tmp_path / "a.tif"), 3, 3, (shown, shown, shown), tolerance=1)


def half_transparent(mode: str, colour: tuple[int, ...]) -> Image.Image:
    """Opaque on the left, fully transparent on the right."""
    picture = Image.new(mode, SIZE, (*colour, 255))
    picture.paste((*colour, 0), (SIZE[0] // 2, 0, *SIZE))
    return picture


@pytest.mark.parametrize(("mode", "colour", "shown"), [("RGBA", RED, RED), ("LA", (40,), (40, 40, 40))])
def test_transparency_is_laid_over_white(tmp_path, mode, colour, shown):
    picture = read_whole(saved(half_transparent(mode, colour), tmp_path / "a.png"))
    looks(picture, 8, 8, shown, tolerance=0)
    looks(picture, 56, 8, WHITE, tolerance=0)


@pytest.mark.parametrize("name", ["a.webp", "a.avif", "a.heic", "a.tif", "a.gif"])
def test_transparency_of_other_formats_is_laid_over_white(tmp_path, name):
    options = {"lossless": True} if name == "a.webp" else {}
    picture = read_whole(saved(half_transparent("RGBA", RED), tmp_path / name, **options))
    looks(picture, 8, 8, RED)
    looks(picture, 56, 8, WHITE)


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.tif", "a.avif", "a.heic"])
def test_of_several_frames_the_first_is_read(tmp_path, name):
    frames = [Image.new("RGB", SIZE, colour) for colour in (RED, BLUE)]
    path = saved(frames[0], tmp_path / name, save_all=True, append_images=frames[1:])
    assert read_header(path) == ImageHeader(SIZE, animated=True)
    looks(read_whole(path), 8, 8, RED)


def test_a_cmyk_tiff_keeps_its_colours(tmp_path):
    picture = read_whole(saved(red_and_blue().convert("CMYK"), tmp_path / "a.tif"))
    looks(picture, 8, 16, RED, tolerance=16)
    looks(picture, 56, 16, BLUE, tolerance=16)


def test_heic_without_the_plugin_says_what_to_install(tmp_path):
    path = saved(red_and_blue(), tmp_path / "a.heic")
    code = "import sys; sys.modules['pillow_heif'] = None; from simpletuner.data.images import image_formats, images; "
    code += "image_formats.find_spec = lambda name: None; print('.heic' in image_formats.unread_suffixes()); "
    ended = subprocess.run([sys.executable, "-c", f"{code}images.read_header(open({str(path)!r}, 'rb'))"], **CAPTURED)
    assert ended.stdout == "True\n" and "is HEIC: pip install 'pillow-heif>=1.6'" in ended.stderr


def test_half_transparent_red_over_white_is_pink(tmp_path):
    picture = read_whole(saved(Image.new("RGBA", SIZE, (255, 0, 0, 128)), tmp_path / "a.png"))
    looks(picture, 8, 8, (255, 127, 127), tolerance=1)


def test_a_palette_with_a_transparent_colour_is_laid_over_white(tmp_path):
    picture = red_and_blue().quantize(2)
    transparent = picture.getpixel((56, 8))
    path = saved(picture, tmp_path / "a.png", transparency=transparent)
    with Image.open(path) as again:
        assert again.mode == "P"
        assert "transparency" in again.info
    shown = read_whole(path)
    looks(shown, 8, 8, RED, tolerance=2)
    looks(shown, 56, 8, WHITE, tolerance=0)


def test_an_rgb_png_with_a_transparent_colour_is_laid_over_white(tmp_path):
    shown = read_whole(saved(red_and_blue(), tmp_path / "a.png", transparency=BLUE))
    looks(shown, 8, 8, RED, tolerance=0)
    looks(shown, 56, 8, WHITE, tolerance=0)


def test_a_cmyk_jpeg_keeps_its_colours(tmp_path):
    path = saved(red_and_blue().convert("CMYK"), tmp_path / "a.jpg", quality=95)
    with Image.open(path) as again:
        assert again.mode == "CMYK"
    shown = read_whole(path)
    looks(shown, 8, 16, RED, tolerance=16)
    looks(shown, 56, 16, BLUE, tolerance=16)


@pytest.mark.filterwarnings("ignore:.*EXIF data:UserWarning", "ignore:Truncated File Read:UserWarning")
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.avif", "a.heic", "a.tif", "a.bmp", "a.gif"])
def test_a_picture_cut_short_is_broken_wherever_it_is_cut(tmp_path, name):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    whole = saved(noise, tmp_path / name).read_bytes()
    for length in (0, 1, 3, 11, 20, 29, 60, len(whole) // 2, len(whole) * 3 // 4):
        path = tmp_path / f"cut-{name}"
        path.write_bytes(whole[:length])
        with pytest.raises(DECODE_ERRORS):
            read_rgb(path, (64, 64))
        try:
            assert read_header(path).size == (64, 64)
        except DECODE_ERRORS:
            assert length < 1000 or name == "a.avif", "the header is whole"


@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Image size:Warning")
def test_damaged_bytes_raise_nothing_but_what_counts_as_broken(tmp_path):
    random = np.random.default_rng(1)
    for name in ("a.jpg", "a.png", "a.webp", "a.avif", "a.heic", "a.tif", "a.bmp", "a.gif"):
        whole = saved(red_and_blue(), tmp_path / name, exif=rotated(6).tobytes()).read_bytes()
        for _ in range(80):
            blob = bytearray(whole)
            for place in random.integers(0, len(blob), 4):
                blob[place] = random.integers(0, 256)
            path = tmp_path / f"damaged-{name}"
            path.write_bytes(blob)
            with suppress(DECODE_ERRORS):
                assert read_rgb(path, read_header(path).size).mode == "RGB"


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_a_text_file_called_a_picture_is_broken(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_text("I am no picture.\n" * 100)
    with pytest.raises(DECODE_ERRORS):
        read_header(path)
    with pytest.raises(DECODE_ERRORS):
        read_rgb(path, (8, 8))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage"
NOT_READ = {
    "EPS": EPS,
    "EPS with a preview": b"\xc5\xd0\xd3\xc6" + struct.pack("<2I18x", 30, len(EPS)) + EPS,
    "PDF": b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    "PSD": b"8BPS\0\1" + bytes(6) + b"\0\3" + (8).to_bytes(4) * 2 + b"\0\x08\0\3" + bytes(400),
    "FITS": b"".join(
        each.ljust(80)
        for each in (b"SIMPLE  = T", b"BITPIX  = 8", b"NAXIS   = 2", b"NAXIS1  = 8", b"NAXIS2  = 8", b"END")
    ).ljust(5760),
    "WMF": b"\xd7\xcd\xc6\x9a\0\0" + bytes(4) + b"\x40\0\x40\0\x60\0" + bytes(6) + b"\1\0\x09\0" + bytes(60),
    "ZIP": b"PK\3\4" + bytes(100),
}


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """A `gs` in PATH that says that it was called."""
    called, gs = tmp_path / "called", tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {called}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow looks for it once
    return called


@pytest.mark.filterwarnings("ignore:.* image format is deprecated:DeprecationWarning")
def test_content_of_another_format_is_broken_whatever_plugin_pillow_has_for_it(tmp_path, ghostscript):
    Image.init()
    contents = dict(NOT_READ)
    for name in sorted(Image.SAVE.keys() - {*PILLOW_FORMATS, PLUGIN_FORMAT, "MPO", *NOT_READ} | {"EPS"}):
        with suppress(OSError, ValueError, KeyError):  # writers of some formats take other modes
            saved(red_and_blue(), tmp_path / name, format=name)
            contents[name] = (tmp_path / name).read_bytes()
    assert len(contents) > 15
    for name, content in contents.items():
        path = tmp_path / "evil.jpg"
        path.write_bytes(content)
        for read in (read_header, lambda path: read_rgb(path, (8, 8))):
            with pytest.raises(UnidentifiedImageError, match="not an image in a known format"):
                pytest.fail(f"{name} was read: {read(path)}")
    assert not ghostscript.exists()
    with Image.open(tmp_path / "EPS") as image, suppress(OSError, subprocess.CalledProcessError):
        image.load()
    assert ghostscript.exists(), "Pillow by itself calls it"


def test_a_png_that_claims_an_absurd_size_is_broken(tmp_path):
    blob = bytearray(saved(red_and_blue(), tmp_path / "a.png").read_bytes())
    blob[16:24] = (60000).to_bytes(4) * 2
    path = tmp_path / "b.png"
    path.write_bytes(blob)
    with pytest.raises(DECODE_ERRORS):
        read_rgb(path, (8, 8))


def test_a_large_jpeg_is_decoded_small_but_never_smaller_than_asked(tmp_path):
    path = saved(Image.new("RGB", (1600, 800), RED), tmp_path / "a.jpg")
    decoded = read_rgb(path, (200, 100))
    assert decoded.size == (400, 200) or decoded.size == (200, 100)
    assert read_rgb(path, (900, 450)).size == (1600, 800)


def test_pixels_run_from_minus_one_to_one_and_the_crop_begins_where_it_is_said():
    picture = Image.new("RGB", (4, 2), (0, 0, 0))
    picture.putpixel((2, 1), (255, 51, 0))
    pixels = resize_and_crop(picture, (4, 2), (2, 1), (2, 1))
    assert pixels.shape == (1, 2, 3)
    assert pixels.dtype == np.float32
    np.testing.assert_allclose(pixels[0, 0], [1.0, -0.6, -1.0], atol=1e-6)
    np.testing.assert_allclose(pixels[0, 1], [-1.0, -1.0, -1.0], atol=1e-6)


def test_a_picture_is_resized_before_it_is_cropped():
    pixels = resize_and_crop(red_and_blue(), (32, 16), (0, 2), (32, 8))
    assert pixels.shape == (8, 32, 3)
    np.testing.assert_allclose(pixels[4, 4], [1, -1, -1], atol=0.02)
    np.testing.assert_allclose(pixels[4, 28], [-1, -1, 1], atol=0.02)


def test_a_store_lists_images_in_all_folders_but_hidden_ones(tmp_path):
    for name in ("a.jpg", "b.PNG", "c.txt", ".d.jpg", "sub/e.webp", "sub/deep.png/f.jpeg", ".hidden/g.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = [file.name for file in LocalStorage(tmp_path).list_files(read_suffixes()).files]
    assert found == ["a.jpg", "b.PNG", "sub/deep.png/f.jpeg", "sub/e.webp"]


def test_pixels_of_a_float_tiff_that_are_no_numbers_leave_the_others_as_they_are_and_are_named(tmp_path):
    ramp = np.linspace(0, 2, 64 * 64, dtype=np.float32).reshape(64, 64)
    whole = np.asarray(read_whole(saved(Image.fromarray(ramp), tmp_path / "whole.tif")))
    for name, value, shown in (("nan", np.nan, 0), ("inf", np.inf, 255), ("minus", -np.inf, 0)):
        values = ramp.copy()
        values[3, 5] = value
        read = read_whole(saved(Image.fromarray(values), tmp_path / f"{name}.tif"))
        assert read.info[DOUBT].startswith("1 of its values are no numbers or infinite")
        pixels = np.array(read)
        assert (pixels[3, 5] == shown).all()
        pixels[3, 5] = whole[3, 5]
        assert (pixels == whole).all()
