"""Read pictures: sizes from headers only, pixels in any mode a camera or a web page leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import imagesize
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values for which width and height change places."""

BROKEN = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for a file that is no picture, is cut short or claims an absurd size."""


@dataclass(frozen=True)
class Header:
    """What a picture's file says about it before anything is decoded: (width, height) as shown, EXIF applied."""

    size: tuple[int, int]
    animated: bool = False


def header_of(path: Path) -> Header:
    """Read a picture's header. Raises one of BROKEN."""
    with path.open("rb") as file:
        head = file.read(32)
    animated = is_extended_webp(head) and bool(head[20] & 0x02)
    if head.startswith(b"\xff\xd8") or is_webp_without_exif(head):
        width, height = imagesize.get(str(path), exif_rotation=True)  # Pillow would read the whole of a WebP
        if width > 0 and height > 0:
            return Header((int(width), int(height)), animated)
    with Image.open(path) as picture:
        width, height = picture.size
        animated = animated or (picture.format == "PNG" and getattr(picture, "is_animated", False))
        return Header((height, width) if orientation(picture) in SIDEWAYS else (width, height), animated)


def is_webp_without_exif(head: bytes) -> bool:
    """Return whether a file begins as a WebP whose header announces no EXIF, which imagesize does not read there."""
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP" and not (is_extended_webp(head) and head[20] & 0x08)


def is_extended_webp(head: bytes) -> bool:
    """Return whether a file begins as a WebP with flags in its header."""
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) > 20


def orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation in the header; asking a PNG that has none there would decode all of it."""
    return picture.getexif().get(ORIENTATION, 1) if picture.format == "JPEG" or "exif" in picture.info else 1


def read_rgb(path: Path, smallest: tuple[int, int]) -> Image.Image:
    """Decode a picture to upright RGB; JPEGs are decoded no larger than needed for `smallest` (width, height) px."""
    with Image.open(path) as picture:
        is_turned = orientation(picture) != 1
        picture.draft("RGB", (max(smallest), max(smallest)))
        picture.load()
        return to_rgb(ImageOps.exif_transpose(picture) if is_turned else picture)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert grey, 16-bit, palette, CMYK and transparent pictures to 8-bit RGB, transparency over white."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture, dtype=np.float64)
        top = 65535 if picture.mode.startswith("I") else max(float(values.max()), 1e-9)
        picture = Image.fromarray(np.clip(values / top * 255, 0, 255).round().astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layered = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
    return picture.convert("RGB")


def resized_and_cropped(
    picture: Image.Image, resized: tuple[int, int], crop_left_top: tuple[int, int], target: tuple[int, int]
) -> np.ndarray:
    """Return pixels (height, width, 3) in -1..1, float32; every argument in px, width first."""
    left, top = crop_left_top
    whole = picture.resize(resized, Image.Resampling.LANCZOS, reducing_gap=3.0) if picture.size != resized else picture
    part = whole.crop((left, top, left + target[0], top + target[1]))
    return np.asarray(part, dtype=np.float32) / 127.5 - 1.0
