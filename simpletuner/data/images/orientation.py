"""The orientation of an image, from its EXIF or XMP, with the meaning that Pillow's `exif_transpose` gives them.

Read here and not by Pillow, which would decode a whole PNG for it, and warns on the console of what is damaged.
"""

from __future__ import annotations

import re
from typing import Final

from PIL import Image

TAG, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values that swap width and height."""

EXIF_MARK: Final = b"Exif\0\0"
INTEGERS: Final = {3: (2, False), 4: (4, False), 6: (1, True), 8: (2, True), 9: (4, True)}
"""Bytes and sign of the types that hold one: SHORT by the standard; phones and editors write others, too."""
IN_XMP: Final = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def orientation_of(exif: bytes, xmp: bytes) -> int:
    """Return 1 to 8, what EXIF says before what XMP says; 1 where neither does, or what it says means nothing."""
    value = exif_orientation(exif)
    if value is None and (found := IN_XMP.search(xmp)):
        value = int(found[1])
    return value if value in UPRIGHT else 1


def exif_orientation(exif: bytes) -> int | None:
    """Return the value of the tag, 0 where it is no integer; None where there is none."""
    while exif.startswith(EXIF_MARK):
        exif = exif[len(EXIF_MARK) :]
    if exif[:2] not in (b"II", b"MM"):
        return None
    order = "little" if exif[:2] == b"II" else "big"

    def integer(start: int, length: int, signed: bool = False) -> int:
        return int.from_bytes(exif[start : start + length], order, signed=signed)

    first = integer(4, 4)
    for entry in range(first + 2, min(first + 2 + 12 * integer(first, 2), len(exif) - 11), 12):
        if integer(entry, 2) == TAG:
            length, signed = INTEGERS.get(integer(entry + 2, 2), (0, False))
            is_inline = length * integer(entry + 4, 4) <= 4  # else its values stand elsewhere, and the first counts
            return integer(entry + 8 if is_inline else integer(entry + 8, 4), length, signed)
    return None


def turned_upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image
