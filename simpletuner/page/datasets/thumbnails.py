"""Small pictures of a dataset's images, upright, made when they are asked for; browsers keep them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from simpletuner.data.images.images import DECODE_ERRORS, read_rgb, read_stored
from simpletuner.system.files.regular_files import open_regular

EDGES_PX = (320, 1600)
"""Longer sides: in the grid, for screens with more than one dot per px, and of the picture that a click opens."""
MAX_FILE_BYTES = 256 << 20
# Of an image that is decoded whole: 8192x8192 px take 200 MB. JPEGs are decoded at an eighth of their sides.
MAX_PIXELS = 1 << 26
MAX_JPEG_PIXELS = 1 << 28


def thumbnail(path: Path, edge: int) -> bytes | None:
    """Return an image as WebP; None where it cannot be decoded, or is too large to be."""
    try:
        with open_regular(path, MAX_FILE_BYTES) as file:
            image = read_stored(file)
            width, height = image.stored
            if width * height > (MAX_JPEG_PIXELS if image.image_format == "JPEG" else MAX_PIXELS):
                return None
            small = read_rgb(file, (edge, edge))
        small.thumbnail((edge, edge))
        content = BytesIO()
        small.save(content, "WEBP", quality=80, method=2)
    except DECODE_ERRORS:
        return None
    return content.getvalue()
