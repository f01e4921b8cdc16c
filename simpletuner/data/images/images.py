"""Read image files: sizes from headers only, pixels in any mode that cameras and web pages produce.

Files are binary streams that can seek, so that a store need not be a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import imagesize
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from simpletuner.data.images.colour_profiles import to_srgb
from simpletuner.data.images.image_formats import INSTALL, PILLOW_FORMATS, PLUGIN_FORMAT, is_heif, register_plugin

ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values that swap width and height."""

DECODE_ERRORS = (OSError, SyntaxError, ValueError, RuntimeError, EOFError, Image.DecompressionBombError)
"""Exceptions of Pillow and its plugins for a file that is not an image, is cut short or claims an absurd size."""


WHITE, DARK = 65535, 4095
"""White of grey images beyond 8 bits, and the largest value of 12 bits, which then is 6 % of white."""

DOUBT = "simpletuner_doubt"
"""Key of what may be wrong about the colours, in the `info` of a decoded image."""


@dataclass(frozen=True)
class ImageHeader:
    """Facts from the header of an image or a video, before decoding: (width, height) as displayed, turned upright."""

    size: tuple[int, int]
    animated: bool = False
    frames: int = 1
    fps: float = 0
    """0 for an image."""


def read_header(file: BinaryIO) -> ImageHeader:
    """Read an image's header. Raises one of DECODE_ERRORS."""
    head = file.read(32)
    # VP8X, the extended header of WebP: of the flags in its first byte 0x02 is animation, 0x08 EXIF.
    animated = is_extended_webp(head) and bool(head[20] & 0x02)
    if head.startswith(b"\xff\xd8") or is_webp_without_exif(head):
        file.seek(0)
        width, height = imagesize.get(file, exif_rotation=True)  # Pillow would read the whole of a WebP
        # imagesize says -1 where it does not find a size.
        if width > 0 and height > 0:
            return ImageHeader((int(width), int(height)), animated)
    with open_image(file) as image:
        width, height = image.size
        # MPO is a JPEG of a camera with smaller copies behind it.
        animated = animated or (image.format != "MPO" and getattr(image, "is_animated", False))
        return ImageHeader((height, width) if read_orientation(image) in SIDEWAYS else (width, height), animated)


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image by its content, whatever its name says. Raises one of DECODE_ERRORS.

    Pillow has 40 more plugins, for any of which content decides: that of EPS starts Ghostscript, whatever the name.
    """
    file.seek(0)
    is_heic = is_heif(file.read(12))
    has_plugin = is_heic and register_plugin()
    try:
        return Image.open(file, formats=(*PILLOW_FORMATS, *([PLUGIN_FORMAT] if has_plugin else [])))  # noqa: TID251
    except UnidentifiedImageError:  # its own message shows the stream object
        lacks_plugin = is_heic and not has_plugin
        reason = f"is HEIC: {INSTALL}" if lacks_plugin else "is not an image in a known format, or is damaged"
        raise UnidentifiedImageError(reason) from None


def is_webp_without_exif(head: bytes) -> bool:
    """Return whether a file is a WebP whose header announces no EXIF, which imagesize does not read there."""
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP" and not (is_extended_webp(head) and head[20] & 0x08)


def is_extended_webp(head: bytes) -> bool:
    """Return whether a file is a WebP with flags in its header."""
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) > 20


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that is left to apply; for TIFF and HEIC Pillow and its plugin have done it.

    A PNG without one in its header is not asked: Pillow would decode all of it to look for EXIF at the end.
    """
    return image.getexif().get(ORIENTATION, 1) if image.format == "JPEG" or "exif" in image.info else 1


def read_rgb(file: BinaryIO, smallest: tuple[int, int], size: tuple[int, int] | None = None) -> Image.Image:
    """Decode an image to upright RGB; JPEGs are decoded no larger than needed for `smallest` (width, height) px.

    Raises ValueError where the image does not have the `size` for which its bucket and crop were chosen.
    """
    with open_image(file) as image:
        is_turned = (orientation := read_orientation(image)) != 1
        found = image.size[::-1] if orientation in SIDEWAYS else image.size
        if size and found != size:
            raise ValueError("has {}x{} px, not {}x{}: the table is wrong, or the file changed".format(*found, *size))
        # The larger side twice: draft works on the stored image, whose sides EXIF may swap afterwards.
        image.draft("RGB", (max(smallest), max(smallest)))
        image.load()
        doubt = doubt_about_scale(image)
        rgb = to_rgb(ImageOps.exif_transpose(image) if is_turned else image)
        rgb.info[DOUBT] = doubt
        return rgb


def doubt_about_scale(image: Image.Image) -> str:
    """Say why the scale of 16-bit grey values may be another one; empty where the file has values for 65535 as white.

    Files do not say of which of their 16 or 32 bits white is made, so microscopes and scanners of 12 bits write 4095.
    """
    if not image.mode.startswith("I"):
        return ""
    top = int(np.asarray(image).max())
    return (
        ""
        if top == 0 or DARK < top <= WHITE
        else f"its largest grey value is {top:,}, and white is taken to be {WHITE:,}"
    )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert grey, 16-bit, palette, CMYK and transparent images to 8-bit sRGB, transparency over white."""
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow clips 16-bit values at 255 instead of scaling them, which would make nearly every pixel white.
        values = np.asarray(image, dtype=np.float64)
        top = WHITE if image.mode.startswith("I") else max(float(values.max()), 1e-9)
        image = Image.fromarray(np.clip(values / top * 255, 0, 255).round().astype(np.uint8))
    is_transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    layered = image.convert("RGBA") if is_transparent else None
    converted = to_srgb(image, profile) if profile else None
    if layered is None:
        return converted or image.convert("RGB")
    if converted is not None:
        converted.putalpha(layered.getchannel("A"))
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), converted or layered).convert("RGB")


def resize_and_crop(
    image: Image.Image, resized: tuple[int, int], crop_left_top: tuple[int, int], target: tuple[int, int]
) -> np.ndarray:
    """Return pixels (height, width, 3), float32 in [-1, 1]; every argument in px, width first."""
    return np.asarray(cropped(image, resized, crop_left_top, target), dtype=np.float32) / 127.5 - 1.0


def cropped(
    image: Image.Image, resized: tuple[int, int], crop_left_top: tuple[int, int], target: tuple[int, int]
) -> Image.Image:
    """Return an image resized to `resized`, of which `target` is cut out at `crop_left_top`."""
    left, top = crop_left_top
    # From 3.0 on the result can hardly be told from resizing in one step, by Pillow's documentation.
    whole = image.resize(resized, Image.Resampling.LANCZOS, reducing_gap=3.0) if image.size != resized else image
    return whole.crop((left, top, left + target[0], top + target[1]))
