from __future__ import annotations

from pathlib import Path

import scanning
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.dataset_warnings import dataset_warnings


def add(folder: Path, name: str, size: tuple[int, int] = (64, 64), caption: str = "a caption") -> None:
    Image.new("RGB", size).save(folder / name)
    (folder / name).with_suffix(".txt").write_text(caption)


def said(folder: Path, **values) -> list[str]:
    dataset = LocalImages(id="d", instance_data_dir=folder, **{"resolution": 64, **values})
    return list(dataset_warnings(scanning.found([dataset]), 64))


def test_ordinary_pictures_need_no_remark(tmp_path):
    add(tmp_path, "a.png")
    add(tmp_path, "b.png", (61, 61))
    add(tmp_path, "c.png", (200, 100))
    (tmp_path / "notes.md").touch()
    assert said(tmp_path) == []


def test_formats_that_are_not_read_are_counted_by_suffix(tmp_path):
    add(tmp_path, "a.png")
    for name in ("x.psd", "y.PSD", "z.jxl", ".hidden.jxl"):
        (tmp_path / name).touch()
    (line,) = said(tmp_path)
    such = f"such as {tmp_path}/x.psd"
    assert line == (
        f"3 files not read: 2 .psd, 1 .jxl, {such}; what is read is JPEG, PNG, WebP, AVIF, TIFF, BMP, GIF, "
        "and HEIC after `pip install 'pillow-heif>=1.6'`"
    )


def test_enlarged_pictures_are_counted_with_the_worst(tmp_path):
    add(tmp_path, "a.png")
    add(tmp_path, "b.png", (32, 32))
    add(tmp_path, "c.png", (1, 1))
    (line,) = said(tmp_path)
    assert line == (
        "2 images of 3 enlarged more than 1.1 times, up to 64.0: d/c.png from 1x1 to 64x64 px; "
        "minimum_image_size leaves small ones out"
    )


def test_extreme_shapes_are_named(tmp_path):
    add(tmp_path, "long.png", (3000, 100))
    add(tmp_path, "high.png", (100, 500))
    lines = said(tmp_path, resolution=512)
    assert lines[-1] == (
        "2 images with one side more than 4 times the other: d/long.png (3000x100 px) is trained at 2816x64; "
        "minimum_aspect_ratio and maximum_aspect_ratio leave such images out"
    )


def test_a_resolution_below_the_alignment_is_not_silent(tmp_path):
    add(tmp_path, "a.png")
    (line,) = said(tmp_path, resolution=10)
    assert line == (
        "1 image of dataset `d` far from resolution=10 (pixel_area): d/a.png is trained at 64x64, since sides are "
        "multiples of aspect_bucket_alignment=64"
    )


def test_captions_longer_than_any_encoder_reads_are_counted(tmp_path):
    add(tmp_path, "a.png", caption="word " * 20_000)
    (line,) = said(tmp_path)
    assert line.startswith("1 image with a caption of more than 4,000 letters") and "99,999 letters" in line


def test_of_animated_pictures_the_first_frame_is_used_and_they_are_counted(tmp_path):
    frames = [Image.new("RGB", (64, 64), (number * 20, 0, 0)) for number in range(3)]
    exif = Image.Exif()
    exif[0x0112] = 1
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "b.webp", save_all=True, append_images=frames[1:], exif=exif)
    frames[0].save(tmp_path / "c.png", save_all=True, append_images=frames[1:])
    add(tmp_path, "d.png")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("a caption")
    assert said(tmp_path) == ["3 images with several frames: the first is used (d/a.webp)"]
