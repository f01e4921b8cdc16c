"""The bytes around the pixels of JPEG, PNG and WebP files: size, orientation, colour profile.

The scan of headers and the decoder ask the same functions, so that they agree about every file. Of JPEG and
PNG, Pillow is given only what it needs to decode: damaged, huge or nested notes beside the pixels cannot ruin
an image.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from simpletuner.data.images.colours import Colours, of_codes, of_exif, of_gamma
from simpletuner.data.images.orientation import EXIF_MARK, SIDEWAYS, orientation_of
from simpletuner.system.files.regular_files import RangeReader

JPEG_MARK, PNG_MARK = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
# Markers of a frame header; the three others define tables, or are reserved.
SOF: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
# Markers without a length: TEM, RSTn, SOI, EOI.
ALONE: Final = frozenset({0x01, *range(0xD0, 0xDA)})
SOS, APP0, APP1, APP2, APP14, COM = 0xDA, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE
XMP_MARK, ICC_MARK = b"http://ns.adobe.com/xap/1.0/\0", b"ICC_PROFILE\0"
# Shortest segments to keep: shorter ones mean nothing to libjpeg, and make Pillow give up (JFIF, Adobe).
LEAST_BYTES: Final = {APP0: 14, APP14: 12}

PNG_PIXELS: Final = frozenset({b"IHDR", b"PLTE", b"tRNS"})
"""Chunks before the pixels that decide how these are decoded."""
PNG_COLOURS: Final = frozenset({b"cICP", b"iCCP", b"sRGB", b"gAMA", b"cHRM", b"eXIf"})
"""Chunks before the pixels that say what the colours are."""
TEXTS: Final = {
    b"XML:com.adobe.xmp": "xmp",
    b"Raw profile type exif": "raw",  # as ImageMagick writes EXIF, in hexadecimal
    b"Raw profile type APP1": "raw",
}
TEXT_KINDS: Final = (b"tEXt", b"zTXt", b"iTXt")
# Marks of chunks to look for behind the pixels, and the bytes from the chunk's type to them.
NOTE_MARKS: Final = {b"eXIf": 0, b"XML:com.adobe.xmp\0": 4, b"Raw profile type ": 4}
# Bytes read from the end of a PNG, the place of EXIF and XMP written by exiftool and editors. Walking all
# chunks would read most of the file, since libpng writes 8 KiB of pixels per chunk. In a bucket this is a
# second request per PNG.
TAIL_BYTES: Final = 32 << 10
KEY_BYTES, MAX_NOTE_BYTES, MAX_PROFILE_BYTES = 80, 4 << 20, 32 << 20
EXIF_FLAG, XMP_FLAG, ANIMATION_FLAG = 0x08, 0x04, 0x02


@dataclass(frozen=True)
class StoredImage:
    """An image as it is stored: (width, height) in px before it is turned."""

    stored: tuple[int, int]
    orientation: int = 1
    animated: bool = False
    image_format: str = ""
    """Pillow's name of the format."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as displayed."""
        width, height = self.stored
        return (height, width) if self.orientation in SIDEWAYS else (width, height)


def read_container(file: BinaryIO) -> StoredImage | None:
    """Read a JPEG, PNG or WebP; None for anything else. Raises ValueError where it has no size."""
    file.seek(0)
    head = file.read(32)
    if head.startswith(JPEG_MARK):
        found = read_jpeg(file)
    elif head.startswith(PNG_MARK):
        found = read_png(file)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        found = read_webp(file, head)
    else:
        return None
    if min(found.stored) < 1:
        raise ValueError("has no size in its header: it is damaged")
    return found


def pixels_only(file: BinaryIO) -> tuple[BinaryIO, Colours]:
    """JPEG or PNG without what is no pixel, and its colours; other files as they are, without them."""
    file.seek(0)
    head = file.read(len(PNG_MARK))
    if head.startswith(JPEG_MARK):
        return jpeg_pixels(file)
    return png_pixels(file) if head == PNG_MARK else (file, Colours())


def jpeg_segments(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yield marker, position and length of the content of each segment, up to the first scan, of length 0.

    Raises ValueError where there is none.
    """
    position = len(JPEG_MARK)
    while True:
        file.seek(position)
        mark = file.read(4)
        if len(mark) < 4:
            raise ValueError("ends before its pixels")
        if mark[0] != 0xFF or mark[1] == 0xFF:  # what stands between segments, and fill bytes
            position += 1
        elif mark[1] in ALONE or mark[1] == 0:
            position += 2
        elif mark[1] == SOS:
            yield SOS, position, 0
            return
        elif (length := int.from_bytes(mark[2:])) < 2 or mark[1] < 0xC0:
            raise ValueError("is damaged before its pixels")
        else:
            yield mark[1], position + 4, length - 2
            position += 2 + length


def read_jpeg(file: BinaryIO) -> StoredImage:
    stored, exif, xmp = (0, 0), b"", b""
    for marker, _, length in jpeg_segments(file):
        if marker in SOF:
            frame = file.read(5)
            stored = int.from_bytes(frame[3:5]), int.from_bytes(frame[1:3])
        elif marker == APP1:
            content = file.read(length)
            if content.startswith(EXIF_MARK):  # one of more than 64 KB goes on in the next
                exif += content[len(EXIF_MARK) :]
            elif content.startswith(XMP_MARK):
                xmp = content
    return StoredImage(stored, orientation_of(exif, xmp), image_format="JPEG")


def jpeg_pixels(file: BinaryIO) -> tuple[BinaryIO, Colours]:
    head, profile, exif, pixels = [JPEG_MARK], {}, b"", 0
    for marker, position, length in jpeg_segments(file):
        if marker == SOS:
            pixels = position
        elif marker == APP2:
            content = file.read(length)
            if content.startswith(ICC_MARK):
                profile[content[len(ICC_MARK) :][:1]] = content[len(ICC_MARK) + 2 :]
        elif marker == APP1 and not exif:
            content = file.read(length)
            exif = content if content.startswith(EXIF_MARK) else b""
        elif (marker < APP0 or marker in LEAST_BYTES) and length >= LEAST_BYTES.get(marker, 0):
            head.append(bytes([0xFF, marker]) + (length + 2).to_bytes(2) + file.read(length))
    size = file.seek(0, os.SEEK_END)
    whole = b"".join(profile[key] for key in sorted(profile))
    return spliced(b"".join(head), file, (pixels, size), b""), Colours(whole, whole) if whole else of_exif(exif)


def png_chunks(file: BinaryIO, position: int = len(PNG_MARK)) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, position and length of each chunk's content, to the end of the file or of valid chunks."""
    while True:
        file.seek(position)
        head = file.read(8)
        if len(head) < 8 or not head[4:].isalpha():
            return
        length = int.from_bytes(head[:4])
        yield head[4:], position + 8, length
        position += 12 + length


def read_png(file: BinaryIO) -> StoredImage:
    stored, animated, pixels = (0, 0), False, 0
    notes: dict[str, bytes] = {}
    for kind, position, length in png_chunks(file):
        if kind == b"IHDR":
            size = file.read(8)
            stored = int.from_bytes(size[:4]), int.from_bytes(size[4:])
        elif kind == b"acTL":
            animated = int.from_bytes(file.read(4)) > 1
        elif kind == b"IDAT":
            pixels = position
            break
        elif length <= MAX_NOTE_BYTES and (kind == b"eXIf" or kind in TEXT_KINDS):
            start = file.read(min(length, KEY_BYTES))
            if kind == b"eXIf" or start.partition(b"\0")[0] in TEXTS:
                take_note(notes, kind, start + file.read(length - len(start) + 4))
    for kind, content in tail_notes(file, pixels):
        take_note(notes, kind, content)
    exif = notes.get("exif") or notes.get("raw", b"")
    return StoredImage(stored, orientation_of(exif, notes.get("xmp", b"")), animated, "PNG")


def tail_notes(file: BinaryIO, pixels: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield type and content, with its checksum, of what may be chunks behind the pixels."""
    end = file.seek(0, os.SEEK_END)
    start = max(pixels, end - TAIL_BYTES)
    file.seek(start)
    tail = file.read(end - start)
    for mark, back in NOTE_MARKS.items():
        position = tail.find(mark) - back
        while position >= 0:
            length = int.from_bytes(tail[max(position - 4, 0) : position])
            yield tail[position : position + 4], tail[position + 4 : position + 8 + length]
            position = tail.find(mark, position + back + 1) - back


def take_note(notes: dict[str, bytes], kind: bytes, content: bytes) -> None:
    """Add EXIF or XMP of a chunk, which ends with its checksum; one with a wrong checksum is none."""
    content, checksum = content[:-4], content[-4:]
    if zlib.crc32(kind + content) != int.from_bytes(checksum) or len(checksum) < 4:
        return
    if kind == b"eXIf":
        notes["exif"] = content
        return
    key, _, text = content.partition(b"\0")
    if kind not in TEXT_KINDS or key not in TEXTS:
        return
    if kind == b"zTXt":
        text = inflate(text[1:], MAX_NOTE_BYTES)
    elif kind == b"iTXt":  # a flag, the method, a language and the key in it
        is_compressed, text = text[:1] == b"\1", text[2:].split(b"\0", 2)[-1]
        text = inflate(text, MAX_NOTE_BYTES) if is_compressed else text
    notes[TEXTS[key]] = text if TEXTS[key] == "xmp" else from_hexadecimal(text)


def from_hexadecimal(text: bytes) -> bytes:
    """Return the bytes of ImageMagick's `\\nexif\\n  <length>\\n<digits>`; none where it is damaged."""
    try:
        return bytes.fromhex(text.split(b"\n", 3)[-1].decode("ascii"))
    except ValueError:
        return b""


def inflate(content: bytes, limit_bytes: int) -> bytes:
    """zlib-decompressed bytes, at most `limit_bytes`; empty if damaged."""
    try:
        return zlib.decompressobj().decompress(content, limit_bytes)
    except zlib.error:
        return b""


def png_pixels(file: BinaryIO) -> tuple[BinaryIO, Colours]:
    head, start, end = [PNG_MARK], 0, 0
    notes: dict[bytes, bytes] = {}
    for kind, position, length in png_chunks(file):
        if kind == b"IDAT":
            start, end = start or position - 8, position + length + 4
        elif start:
            break
        elif kind in PNG_PIXELS or (kind in PNG_COLOURS and length <= MAX_PROFILE_BYTES):
            content = file.read(length + 4)
            is_whole = zlib.crc32(kind + content[:-4]) == int.from_bytes(content[-4:])
            if kind in PNG_COLOURS and is_whole:
                notes[kind] = content[:-4]
            elif kind in PNG_PIXELS and (is_whole or kind != b"tRNS"):
                head.append(length.to_bytes(4) + kind + content)
    return spliced(b"".join(head), file, (start, end), b"\0\0\0\0IEND\xaeB\x60\x82"), png_colours(notes)


def png_colours(notes: dict[bytes, bytes]) -> Colours:
    """Return the colours of chunks, the first of these that there is (PNG 3, section 4.3)."""
    if len(codes := notes.get(b"cICP", b"")) == 4:
        return of_codes(codes[0], codes[1])
    # A name, the method, and what is compressed.
    if profile := inflate(notes.get(b"iCCP", b"").partition(b"\0")[2][1:], MAX_PROFILE_BYTES):
        return Colours(profile, profile)
    gamma, points = (numbers_of(notes.get(kind, b"")) for kind in (b"gAMA", b"cHRM"))
    if b"sRGB" in notes or (len(gamma), len(points)) == (0, 0):
        return Colours() if b"sRGB" in notes else of_exif(notes.get(b"eXIf", b""))
    return of_gamma(gamma[0] if gamma else None, points if len(points) == 8 else None)


def numbers_of(content: bytes) -> tuple[float, ...]:
    """Return PNG's numbers, which are whole hundred thousandths."""
    return tuple(int.from_bytes(content[start : start + 4]) / 1e5 for start in range(0, len(content) - 3, 4))


def read_webp(file: BinaryIO, head: bytes) -> StoredImage:
    kind, flags = head[12:16], head[20:21]
    if kind == b"VP8X" and len(head) >= 30:
        stored = int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
        notes = webp_notes(file) if flags[0] & (EXIF_FLAG | XMP_FLAG) else {}
        exif = notes.get(b"EXIF", b"") if flags[0] & EXIF_FLAG else b""
        xmp = notes.get(b"XMP ", b"") if flags[0] & XMP_FLAG else b""
        return StoredImage(stored, orientation_of(exif, xmp), bool(flags[0] & ANIMATION_FLAG), "WEBP")
    if kind == b"VP8L" and flags == b"\x2f" and len(head) >= 25:
        bits = int.from_bytes(head[21:25], "little")
        return StoredImage(((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), image_format="WEBP")
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a" and len(head) >= 30:
        width, height = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
        return StoredImage((width & 0x3FFF, height & 0x3FFF), image_format="WEBP")
    return StoredImage((0, 0))


def webp_notes(file: BinaryIO) -> dict[bytes, bytes]:
    """Return the first EXIF and XMP chunk, by their types."""
    found: dict[bytes, bytes] = {}
    position = 12
    while True:
        file.seek(position)
        head = file.read(8)
        if len(head) < 8:
            return found
        length = int.from_bytes(head[4:], "little")
        if head[:4] in (b"EXIF", b"XMP "):
            found.setdefault(head[:4], file.read(min(length, MAX_NOTE_BYTES)))
        position += 8 + length + length % 2


def spliced(head: bytes, file: BinaryIO, part: tuple[int, int], tail: bytes) -> BinaryIO:
    """Return a file of `head`, the bytes `part` (from, to) of another file, and `tail`. It copies nothing."""
    start, end = part
    whole = len(head) + end - start + len(tail)

    def fetch(position: int, length: int) -> tuple[bytes, int]:
        if position < len(head):
            return head[position : position + length], whole
        if position < whole - len(tail):
            file.seek(start + position - len(head))
            # Not more than one part: the one after it is asked for next.
            return file.read(min(length, whole - len(tail) - position)), whole
        return tail[position - (whole - len(tail)) :][:length], whole

    return io.BufferedReader(RangeReader(fetch), 1 << 16)
