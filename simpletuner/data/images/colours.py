"""Conversion of pixels to sRGB: ICC profiles, and colours given without one.

Pixels in Adobe RGB, Display P3, CMYK or a grey profile become sRGB, as in browsers. PNG's cICP, gAMA and
cHRM, nclx of AVIF and HEIC, TIFF's tags and Adobe RGB by EXIF become ICC profiles first; HDR encodings have
none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, BinaryIO, Final

import numpy as np
from PIL import Image, ImageCms

from simpletuner.data.images.orientation import EXIF_MARK, exif_entry

HDR: Final = "its brightness is coded for HDR screens, and it looks pale without"

Primaries = tuple[float, ...]
"""x and y of white, red, green and blue in CIE 1931, as cHRM has them."""

D65 = (0.3127, 0.329)
SRGB_PRIMARIES: Final[Primaries] = (*D65, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
ADOBE_RGB: Final[Primaries] = (*D65, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06)
# ITU-T H.273 (07/2024), table 2; 0, 2 and 3 say nothing. 22 is EBU Tech 3213: PAL's but for its green.
PRIMARIES: Final[dict[int, Primaries]] = {
    1: SRGB_PRIMARIES,
    4: (0.31, 0.316, 0.67, 0.33, 0.21, 0.71, 0.14, 0.08),
    5: (*D65, 0.64, 0.33, 0.29, 0.6, 0.15, 0.06),
    6: (*D65, 0.63, 0.34, 0.31, 0.595, 0.155, 0.07),
    7: (*D65, 0.63, 0.34, 0.31, 0.595, 0.155, 0.07),
    8: (0.31, 0.316, 0.681, 0.319, 0.243, 0.692, 0.145, 0.049),
    9: (*D65, 0.708, 0.292, 0.17, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
    12: (*D65, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
    22: (*D65, 0.63, 0.34, 0.295, 0.605, 0.155, 0.077),
}
# Table 3. Browsers show video curves (1, 6, 14, 15) like sRGB's, and encoders write 1 for sRGB.
GAMMAS: Final = {4: 2.2, 5: 2.8, 8: 1.0}
HDR_CURVES: Final = (16, 18)
SRGB_GAMMA: Final = 1 / 2.2
UNSAID: Final = (0, 2, 3)
# Difference of gammas and coordinates that rounding makes: PNGs of sRGB have 0.45455, 0.4545 or 0.45.
SAME: Final = 0.0025

EXIF_IFD, INTEROPERABILITY_IFD, COLOUR_SPACE, INDEX = 0x8769, 0xA005, 0xA001, 1
# DCF 2.0: the index of files in its optional colour space, which is Adobe RGB; R98 is sRGB.
ADOBE_INDEX: Final = b"R03"
# Bounds of gamma, of a matrix, and of the span of three colours (sRGB: 19); beyond is damaged.
LEAST_GAMMA, LARGEST, LEAST_VOLUME = 0.1, 10.0, 0.01


@dataclass(frozen=True)
class Colours:
    """The colours that a file names: an ICC profile, empty for sRGB, and what may be wrong."""

    profile: bytes = b""
    """ICC profile for RGB pixels; `grey_profile` is for one channel."""
    grey_profile: bytes = b""
    doubt: str = ""


def of_codes(primaries: int, transfer: int) -> Colours:
    """Return the colours of H.273's code points, as cICP and nclx hold them."""
    if transfer in HDR_CURVES:
        return Colours(doubt=HDR)
    if primaries not in PRIMARIES and primaries not in UNSAID:
        return Colours(doubt=f"its colours are of primaries {primaries}, and taken for sRGB")
    return described(PRIMARIES.get(primaries, SRGB_PRIMARIES), GAMMAS.get(transfer))


def of_gamma(gamma: float | None, coordinates: Primaries | None) -> Colours:
    """Return the colours of PNG's gAMA, which is the exponent of the encoder, and cHRM."""
    if gamma is not None and not LEAST_GAMMA <= gamma <= LARGEST:
        return Colours()
    is_srgb = gamma is None or abs(gamma - SRGB_GAMMA) < 2 * SAME
    return described(coordinates or SRGB_PRIMARIES, None if is_srgb else 1 / (gamma or 1))


def of_exif(exif: bytes | FileBytes) -> Colours:
    """Adobe RGB if EXIF names it, by DCF's interoperability index or by some cameras' value 2."""
    if isinstance(exif, bytes):
        exif = exif.removeprefix(EXIF_MARK)
    index, space = exif_entry(exif, EXIF_IFD, INTEROPERABILITY_IFD, INDEX), exif_entry(exif, EXIF_IFD, COLOUR_SPACE)
    is_adobe = index[8:11] == ADOBE_INDEX or space[8:10] in (b"\0\2", b"\2\0")
    return described(ADOBE_RGB, 563 / 256) if is_adobe else Colours()


WHITE_POINT, PRIMARY_CHROMATICITIES, TRANSFER_FUNCTION = 318, 319, 301
CLASSIC_TIFF: Final = (b"II*\0", b"MM\0*")
# Entries of a curve that are kept, of the 65,536 that images of 16 bits have.
TABLE_SIZE: Final = 256


class FileBytes:
    """A file that is sliced as bytes are, so that an EXIF directory in a TIFF is read without the pixels."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length = file, file.seek(0, 2)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.length)
        self.file.seek(start)
        return self.file.read(max(stop - start, 0))


def of_tiff(tags: Mapping[int, object], file: BinaryIO) -> Colours:
    """Colours of TIFF's WhitePoint, PrimaryChromaticities and TransferFunction (TIFF 6.0, section 20), else
    of its EXIF."""
    white, corners = numbers(tags.get(WHITE_POINT), 2), numbers(tags.get(PRIMARY_CHROMATICITIES), 6)
    curves = tables(tags.get(TRANSFER_FUNCTION))
    if corners or curves:
        return described((*(white or D65), *(corners or SRGB_PRIMARIES[2:])), None, curves)
    content = FileBytes(file)
    return of_exif(content) if content[:4] in CLASSIC_TIFF else Colours()


def numbers(values: Any, count: int) -> tuple[float, ...]:
    """Return the values of a tag as numbers; none where there are not so many, or some are no numbers."""
    try:
        found = tuple(float(value) for value in values or ())
    except (TypeError, ValueError, ZeroDivisionError):
        return ()
    return found if len(found) == count and np.isfinite(found).all() else ()


def tables(values: object) -> list[bytes]:
    """Curve of each channel as an ICC profile has it, one for all or three; none where they are damaged."""
    length = len(values) if isinstance(values, tuple) else 0
    count = 3 if length % 3 == 0 else 1
    found = np.array(numbers(values, length)).reshape(count, -1)
    if found.shape[1] < TABLE_SIZE or found.min() < 0 or found.max() > 65535 or found.max() == 0:
        return []
    rows = found[:, np.linspace(0, found.shape[1] - 1, TABLE_SIZE).round().astype(int)]
    return [b"curv" + bytes(4) + struct.pack(f">I{TABLE_SIZE}H", TABLE_SIZE, *row.astype(int)) for row in rows]


def of_boxes(file: BinaryIO) -> Colours:
    """Return the colours of the first nclx among the properties of an AVIF or HEIC."""
    start, end = 0, file.seek(0, 2)
    for path, skipped in ((b"meta", 4), (b"iprp", 0), (b"ipco", 0)):
        found = next(((first, last) for kind, first, last in boxes(file, start, end) if kind == path), None)
        if found is None:
            return Colours()
        start, end = found[0] + skipped, found[1]
    for kind, first, _ in boxes(file, start, end):
        file.seek(first)
        if kind == b"colr" and (content := file.read(8))[:4] == b"nclx" and len(content) == 8:
            return of_codes(*struct.unpack(">HH", content[4:]))
    return Colours()


def boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, start and end of the content of each box of ISO 14496-12."""
    while start + 8 <= end:
        file.seek(start)
        length, kind = struct.unpack(">I4s", file.read(8).ljust(8, b"\0"))
        header = 8
        if length == 1:
            length, header = int.from_bytes(file.read(8)), 16
        stop = end if length == 0 else start + length
        if stop < start + header or stop > end:
            return
        yield kind, start + header, stop
        start = stop


def described(primaries: Primaries, gamma: float | None, curves: Sequence[bytes] = ()) -> Colours:
    """Return the profiles of primaries and a gamma or curves; without either, of sRGB's curve."""
    is_same = max(abs(one - other) for one, other in zip(primaries, SRGB_PRIMARIES, strict=True)) < SAME
    if is_same and gamma is None and not curves:
        return Colours()
    if min(primaries[1::2]) <= 0 or abs(np.linalg.det(columns_of(primaries)[:, 1:])) < LEAST_VOLUME:
        return Colours()
    matrix = adapted(primaries)
    if np.abs(matrix).max() > LARGEST:
        return Colours()
    is_curved, curves = bool(gamma or curves), curves or [curve_of(gamma)]
    colours: dict[bytes, bytes] = dict(
        zip((b"rTRC", b"gTRC", b"bTRC"), curves if len(curves) == 3 else [curves[0]] * 3, strict=True)
    )
    for name, column in zip((b"r", b"g", b"b"), matrix.T, strict=True):
        colours[name + b"XYZ"] = xyz(column)
    return Colours(icc_profile(b"RGB ", colours), icc_profile(b"GRAY", {b"kTRC": curves[0]}) if is_curved else b"")


D50: Final = (0.9642, 1.0, 0.8249)
"""XYZ of the white of ICC profiles."""
BRADFORD: Final = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def columns_of(primaries: Primaries) -> np.ndarray:
    """Return XYZ of white, red, green and blue, each of brightness 1, as columns."""
    points = zip(primaries[::2], primaries[1::2], strict=True)
    return np.stack([np.array([x / y, 1, (1 - x - y) / y]) for x, y in points], axis=1)


def adapted(primaries: Primaries) -> np.ndarray:
    """XYZ of red, green and blue as columns, adapted to D50 by Bradford's matrix (ICC.1:2022, annex E)."""
    columns = columns_of(primaries)
    white, corners = columns[:, 0], columns[:, 1:]
    cones = (BRADFORD @ np.array(D50)) / (BRADFORD @ white)
    return np.linalg.inv(BRADFORD) @ np.diag(cones) @ BRADFORD @ corners @ np.diag(np.linalg.solve(corners, white))


def fixed(values: Sequence[float]) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + bytes(4) + fixed(values)


def curve_of(gamma: float | None) -> bytes:
    """Return a parametric curve: of a gamma, or sRGB's (IEC 61966-2-1)."""
    kind, values = (0, (gamma,)) if gamma else (3, (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045))
    return b"para" + bytes(4) + struct.pack(">HH", kind, 0) + fixed(values)


def icc_profile(space: bytes, colours: dict[bytes, bytes]) -> bytes:
    """Return an ICC profile (version 4.2) of a display with these curves and, for RGB, matrix."""
    text = b"mluc" + bytes(4) + struct.pack(">II2s2sII", 1, 12, b"en", b"US", 2, 28) + b"\0c"
    tags = {b"desc": text, b"cprt": text, b"wtpt": xyz(D50), **colours}
    start, table, data = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(data), len(content))
        data += content + bytes(-len(content) % 4)
    head = struct.pack(">I4sI4s4s4s", start + len(data), bytes(4), 0x04200000, b"mntr", space, b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + fixed(D50) + bytes(48)
    return head + struct.pack(">I", len(tags)) + table + data


# Of the pixels that a profile describes, by its colour space.
MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
GREYS = ("1", "L", "LA")
# By how many of 255 levels sRGB profiles of several makers differ from one another.
SAME_LEVELS = 2


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """Return an 8-bit image in sRGB without transparency; None where it is so already, or no profile fits."""
    mode = "CMYK" if image.mode == "CMYK" else "L" if image.mode in GREYS else "RGB"
    transform = transform_of(profile, mode)
    return transform.apply(image.convert(mode)) if transform is not None else None


@lru_cache(maxsize=16)  # a profile of CMYK may have 2 MB; those of one camera are the same
def transform_of(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Transform from a profile to sRGB; None for sRGB, a damaged profile, or a profile of another mode."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        if MODES.get(source.profile.xcolor_space) != mode:  # pyright: ignore[reportAttributeAccessIssue] (Pillow says a file)
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, ImageCms.PyCMSError):
        return None
    return transform if mode != "RGB" or changes_colours(transform) else None


def changes_colours(transform: ImageCms.ImageCmsTransform) -> bool:
    """True if an RGB transform does more than rounding; most profiles in photographs are sRGB."""
    # 18 levels per channel with both ends: 5,832 colours stand for 16.7 million.
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(len(levels), -1, 3)
    converted = np.asarray(transform.apply(Image.fromarray(colours)))
    return int(np.abs(converted.astype(np.int16) - colours).max()) > SAME_LEVELS
