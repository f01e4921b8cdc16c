"""The orientation of an image, from its EXIF or XMP, with the meaning that Pillow's `exif_transpose` gives
them.

Read here and not by Pillow, which would decode a whole PNG for it, and warns on the console of what is
damaged.
"""

from __future__ import annotations

import re
from typing import Final, Literal, Protocol

from PIL import Image

TAG, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values that swap width and height."""

EXIF_MARK: Final = b"Exif\0\0"
# Bytes and sign of the types that hold one: SHORT by the standard; phones and editors write others, too.
INTEGERS: Final = {3: (2, False), 4: (4, False), 6: (1, True), 8: (2, True), 9: (4, True)}
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
    """Orientation from 1 to 8, by EXIF before XMP; 1 if neither has a valid one."""
    value = exif_orientation(exif)
    if value is None and (found := IN_XMP.search(xmp)):
        value = int(found[1])
    return value if value in UPRIGHT else 1


def exif_orientation(exif: bytes) -> int | None:
    """Return the value of the tag, 0 where it is no integer; None where there is none."""
    while exif.startswith(EXIF_MARK):
        exif = exif[len(EXIF_MARK) :]
    if not (entry := exif_entry(exif, TAG)):
        return None
    order = byte_order(exif)
    kind, count, place = (int.from_bytes(entry[start:end], order) for start, end in ((2, 4), (4, 8), (8, 12)))
    length, signed = INTEGERS.get(kind, (0, False))
    # Values that do not fit stand elsewhere, and the first counts.
    values = entry[8:] if length * count <= 4 else exif[place:]
    return int.from_bytes(values[:length], order, signed=signed)


class Sliceable(Protocol):
    """Bytes, or a file that is sliced as bytes are."""

    def __getitem__(self, part: slice, /) -> bytes: ...
    def __len__(self) -> int: ...


def byte_order(exif: Sliceable) -> Literal["little", "big"]:
    return "little" if exif[:2] == b"II" else "big"


def exif_entry(exif: Sliceable, *tags: int) -> bytes:
    """12 bytes of a tag, found through its parent directories; empty if missing."""
    if exif[:2] not in (b"II", b"MM"):
        return b""
    order, entry, place = byte_order(exif), b"", exif[4:8]
    for tag in tags:
        first = int.from_bytes(place, order)
        count = int.from_bytes(exif[first : first + 2], order)
        starts = range(first + 2, min(first + 2 + 12 * count, len(exif) - 11), 12)
        found = (exif[start : start + 12] for start in starts if int.from_bytes(exif[start : start + 2], order) == tag)
        if not (entry := next(found, b"")):
            return b""
        place = entry[8:]
    return entry


def turned_upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image
