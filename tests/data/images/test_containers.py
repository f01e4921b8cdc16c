"""Headers that phones, editors and careless tools write: scan, decoder and Pillow's exif_transpose must agree."""

from __future__ import annotations

import random
import re
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from simpletuner.data.images.images import DECODE_ERRORS, MAX_PIXELS, read_header, read_rgb
from simpletuner.data.images.orientation import SIDEWAYS
from simpletuner.page.datasets.images import small_webp

SIZE = (24, 16)
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description {}</x:xmpmeta>'


def picture() -> Image.Image:
    """Four colours, so that each way of turning is another image."""
    image = Image.new("RGB", SIZE, (255, 0, 0))
    for box, colour in (((12, 0, 24, 8), (0, 255, 0)), ((0, 8, 12, 16), (0, 0, 255)), ((12, 8, 24, 16), (255, 255, 0))):
        image.paste(colour, box)
    return image


def saved(image_format: str, image: Image.Image | None = None, **options) -> bytes:
    content = BytesIO()
    (image or picture()).save(content, image_format, **options)
    return content.getvalue()


def tiff(entries: list[tuple[int, int, int, bytes]], order: str = "<", first: int = 8) -> bytes:
    """An EXIF directory of (tag, type, count, value)."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", first)
    body = b"".join(struct.pack(order + "HHI", *entry[:3]) + entry[3].ljust(4, b"\0") for entry in entries)
    return head.ljust(first, b"\0") + struct.pack(order + "H", len(entries)) + body + bytes(4)


def orientation(value: int, kind: int = 3, count: int = 1, order: str = "<") -> tuple[int, int, int, bytes]:
    code = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}[kind]
    return (
        0x0112,
        kind,
        count,
        struct.pack(order + code * min(count, 4 // struct.calcsize(code)), *[value] * min(count, 2)),
    )


def exif_blocks(rng: random.Random) -> list[bytes]:
    """EXIF and XMP blocks of one file, in their order."""
    order = rng.choice("<>")
    value = rng.choice([0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 8, 9])
    other = (0x010F, 2, 4, b"abc\0")
    tag = orientation(value, rng.choice([3, 3, 4, 6, 8, 9]), 1, order)
    full = tiff(
        rng.choice([[tag], [other, tag], [tag, other], [tag, orientation(3, 3, 1, order)]]), order, rng.choice([8, 20])
    )
    empty = tiff([other], order)
    two_values = tiff([orientation(value, 3, 2, order)], order)
    as_attribute = XMP.format(f'tiff:Orientation="{value}"/>').encode()
    as_element = XMP.format(f"><tiff:Orientation>{value}</tiff:Orientation>").encode()
    xmp = rng.choice([as_attribute, as_element])
    cut = full[: rng.randrange(8, len(full))]
    pairs = [[empty, xmp], [xmp, empty], [full, xmp], [full, empty], [empty, full], [b"", xmp], [full, full]]
    return rng.choice([[full], [xmp], [two_values], [cut], [b"Exif\0\0" + full], *pairs])


def as_jpeg(blocks: list[bytes]) -> bytes:
    plain = saved("JPEG", quality=95, subsampling=0)
    marks = [b"http://ns.adobe.com/xap/1.0/\0" if each.startswith(b"<x:") else b"Exif\0\0" for each in blocks]
    segments = [mark + each for mark, each in zip(marks, blocks, strict=True)]
    return plain[:2] + b"".join(b"\xff\xe1" + (len(s) + 2).to_bytes(2) + s for s in segments) + plain[2:]


def chunk(kind: bytes, content: bytes, checksum: int = 0) -> bytes:
    return len(content).to_bytes(4) + kind + content + (zlib.crc32(kind + content) ^ checksum).to_bytes(4)


def as_png(blocks: list[bytes], rng: random.Random) -> bytes:
    chunks = []
    for each in blocks:
        raw = b"\nexif\n%8d\n" % (len(each) + 6) + (b"Exif\0\0" + each).hex().encode() + b"\n"
        if each.startswith(b"<x:"):
            chunks.append(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + each))
        elif rng.random() < 0.5:
            chunks.append(chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw)))
        else:
            chunks.append(chunk(b"eXIf", each))
    return with_chunks(b"".join(chunks), behind=rng.random() < 0.5)


def with_chunks(chunks: bytes, behind: bool = False, image: Image.Image | None = None) -> bytes:
    plain = saved("PNG", image)
    place = len(plain) - 12 if behind else plain.index(b"IDAT") - 4
    return plain[:place] + chunks + plain[place:]


def as_webp(blocks: list[bytes]) -> bytes:
    exif = next((each for each in blocks if not each.startswith(b"<x:")), b"")
    xmp = next((each for each in blocks if each.startswith(b"<x:")), b"")
    return saved("WEBP", lossless=True, exif=exif, xmp=xmp)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's, of EXIF that is cut short
def test_scan_decoder_and_pillow_agree_about_150_headers():
    rng, turned, compared = random.Random(0), 0, 0
    for index in range(150):
        blocks = exif_blocks(rng)
        name = ("JPEG", "JPEG", "PNG", "WEBP")[index % 4]
        content = as_jpeg(blocks) if name == "JPEG" else as_png(blocks, rng) if name == "PNG" else as_webp(blocks)
        header = read_header(BytesIO(content))
        decoded = read_rgb(BytesIO(content), SIZE, header.size)
        with Image.open(BytesIO(content)) as image:
            image.load()
            try:
                expected = ImageOps.exif_transpose(image).convert("RGB")
            except (SyntaxError, ValueError):  # damaged EXIF: Pillow gives up
                expected = image.convert("RGB")
        compared += 1
        turned += expected.size != SIZE
        assert header.size == decoded.size == expected.size, (index, name, blocks)
        assert np.abs(np.asarray(decoded, int) - np.asarray(expected, int)).max() <= 2, (index, name, blocks)
    assert compared == 150 and turned > 30


def test_exif_in_a_png_is_found_behind_many_pixels_and_only_with_its_checksum():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8))
    exif = tiff([orientation(6)])
    for behind in (False, True):
        whole = with_chunks(chunk(b"eXIf", exif), behind, noise)
        assert len(whole) > 100_000 and read_header(BytesIO(whole)).size == (200, 300)
        assert read_rgb(BytesIO(whole), (300, 300)).size == (200, 300)
        damaged = with_chunks(chunk(b"eXIf", exif, checksum=1), behind, noise)
        assert read_header(BytesIO(damaged)).size == read_rgb(BytesIO(damaged), (300, 300)).size == (300, 200)
    for name in (b"exif", b"APP1"):
        raw = b"\n%b\n%8d\n" % (name, len(exif)) + exif.hex().encode()
        for text in (
            chunk(b"tEXt", b"Raw profile type " + name + b"\0" + raw),
            chunk(b"tEXt", b"Raw profile type exif\0\nzz"),
        ):
            expected = (16, 24) if len(text) > 60 else SIZE
            assert read_header(BytesIO(with_chunks(text, behind=True))).size == expected


def test_nothing_beside_the_pixels_loses_a_png():
    large = zlib.compress(bytes(3 << 20))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    beside = {
        "a compressed text of 3 MB": chunk(b"zTXt", b"history\0\0" + large),
        "an iTXt of 3 MB": chunk(b"iTXt", b"history\0\1\0\0\0" + large),
        "70 texts of 1 MB": b"".join(chunk(b"zTXt", b"n\0\0" + zlib.compress(bytes(1 << 20))) for _ in range(70)),
        "a profile of 3 MB": chunk(b"iCCP", b"p\0\0" + zlib.compress(profile + bytes(3 << 20))),
        "a damaged profile": chunk(b"iCCP", b"p\0\0" + b"zlib"),
        "an unknown method": chunk(b"iCCP", b"p\0\7" + large) + chunk(b"zTXt", b"k\0\7" + large),
        "short numbers": b"".join(chunk(kind, b"\1") for kind in (b"gAMA", b"cHRM", b"pHYs", b"acTL", b"fcTL")),
        "text that is no text": chunk(b"iTXt", b"a\0\1\0\xff\0\xff\0" + b"\xff" * 9) + chunk(b"tEXt", b""),
    } | {
        f"a wrong checksum of {kind!r}": chunk(kind, b"\0" * 9, checksum=1)
        for kind in (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"gAMA", b"tRNS", b"eXIf", b"prVt", b"sRGB")
    }  # fmt: skip
    for name, chunks in beside.items():
        for behind in (False, True):
            file = BytesIO(with_chunks(chunks, behind))
            assert read_header(file).size == SIZE, name
            decoded = read_rgb(file, SIZE, SIZE)
            assert np.array_equal(np.asarray(decoded), np.asarray(picture())), name


def test_nothing_beside_the_pixels_loses_a_jpeg_or_prints_a_warning(capfd, recwarn):
    plain = saved("JPEG", quality=95, subsampling=0)
    for marker, content in (
        (0xE0, b"JFIF\0"),
        (0xEE, b"Adobe"),
        (0xED, b"Photoshop 3.0\x008BIM\x03"),
        (0xE2, b"MPF\0II*\0"),
        (0xE2, b"MPF\0" + b"\xff" * 60),
        (0xE2, b"ICC_PROFILE\0"),
        (0xE1, b"Exif\0\0"),
        (0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
        (0xFE, b""),
    ):
        file = BytesIO(plain[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2) + content + plain[2:])
        assert read_header(file).size == SIZE, content
        assert np.abs(np.asarray(read_rgb(file, SIZE, SIZE), int) - np.asarray(picture(), int)).max() < 8, content
    for damaged in (plain[:2], plain[:20], plain[:2] + b"\xff\xe1\0\0" + plain[2:]):
        with pytest.raises(DECODE_ERRORS):
            read_header(BytesIO(damaged))
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_a_profile_of_several_segments_and_of_several_megabytes_changes_the_colours():
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tag = profile.index(b"rXYZ", 128)  # red becomes half as bright as in sRGB
    place = int.from_bytes(profile[tag + 4 : tag + 8]) + 8
    profile[place : place + 4] = (int.from_bytes(profile[place : place + 4]) // 2).to_bytes(4)
    profile = bytes(profile) + bytes(2 << 20)
    expected = None
    for content in (saved("JPEG", quality=95, icc_profile=profile), saved("WEBP", lossless=True, icc_profile=profile),
                    with_chunks(chunk(b"iCCP", b"p\0\0" + zlib.compress(profile)))):  # fmt: skip
        red = np.asarray(read_rgb(BytesIO(content), SIZE, SIZE), int)[2, 2]
        expected = red if expected is None else expected
        assert red[0] < 240 and np.abs(red - expected).max() < 6


def blank_png(width: int, height: int, mode: int, bits: int = 8, texts: bytes = b"") -> bytes:
    """A PNG of one colour, made row by row."""
    channels = {0: 1, 2: 3, 3: 1, 6: 4}[mode]
    packer = zlib.compressobj(1)
    row = b"\0" + bytes([200]) * (width * channels * bits // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, mode, 0, 0, 0))
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if mode == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + head + palette + texts + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("mode", "bits", "colour"), [(2, 8, 200), (0, 16, 200), (0, 1, 255)])
def test_a_large_png_is_decoded_and_shrunk_without_a_warning(mode, bits, colour, capfd, recwarn):
    content = blank_png(12000, 6000, mode, bits)
    assert read_header(BytesIO(content)).size == (12000, 6000)
    small = read_rgb(BytesIO(content), (64, 64), (12000, 6000))
    assert small.size == (388, 194)  # a third of what resizing by a factor of 31 leaves
    assert np.abs(np.asarray(small, int) - colour).max() <= 1 if bits != 1 else np.asarray(small).std() > 0
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_a_shrunk_image_looks_as_the_whole_one_resized(monkeypatch):
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 255, (6, 9, 4), dtype=np.uint8)).resize(
        (600, 400), Image.Resampling.BICUBIC
    )
    for image in (
        smooth,
        smooth.convert("RGB"),
        smooth.convert("L"),
        smooth.convert("RGB").quantize(64),
        smooth.convert("LA"),
    ):
        content = saved("PNG", image)
        whole = read_rgb(BytesIO(content), (32, 32)).resize((60, 40), Image.Resampling.LANCZOS, reducing_gap=3.0)
        monkeypatch.setattr("simpletuner.data.images.images.LARGE_PIXELS", 1000)
        monkeypatch.setattr("simpletuner.data.images.images.STRIP_PIXELS", 9000)
        small = read_rgb(BytesIO(content), (32, 32))
        monkeypatch.undo()
        assert small.size == (150, 100)
        shown = small.resize((60, 40), Image.Resampling.LANCZOS, reducing_gap=3.0)
        assert np.abs(np.asarray(shown, int) - np.asarray(whole, int)).mean() < 1, image.mode


def test_a_jpeg_of_390_megapixels_is_decoded_at_an_eighth():
    # A JPEG of one colour, whose header then says another size: libjpeg fills what is missing.
    content = bytearray(saved("JPEG", Image.new("RGB", (64, 64), (200, 100, 50))))
    frame = re.search(rb"\xff\xc0..\x08", bytes(content), re.DOTALL).end()
    content[frame : frame + 4] = (19500).to_bytes(2) + (20000).to_bytes(2)
    assert read_header(BytesIO(content)).size == (20000, 19500)
    assert read_rgb(BytesIO(content), (64, 64), (20000, 19500)).size == (2500, 2438)


JPEG, PNG = saved("JPEG"), saved("PNG")
SIZE_IN_JPEG = JPEG.index(b"\xff\xc0") + 5
BROKEN_HEADS = {
    "a JPEG that ends in its header": (JPEG[: SIZE_IN_JPEG - 2], "ends before its pixels"),
    "a JPEG of its first bytes": (JPEG[:3], "ends before its pixels"),
    "a JPEG with a segment of no length": (JPEG[:4] + b"\0\1" + JPEG[6:], "is damaged before its pixels"),
    "a JPEG with a marker that is none": (JPEG[:2] + b"\xff\x10" + JPEG[4:], "is damaged before its pixels"),
    "a JPEG of no height": (JPEG[:SIZE_IN_JPEG] + bytes(2) + JPEG[SIZE_IN_JPEG + 2 :], "has no size in its header"),
    "a PNG of no width": (PNG[:16] + bytes(4) + PNG[20:], "has no size in its header: it is damaged"),
    "a PNG of its first bytes": (PNG[:8], "has no size in its header: it is damaged"),
}


@pytest.mark.parametrize("case", BROKEN_HEADS)
def test_a_damaged_header_is_one_sentence(case):
    content, sentence = BROKEN_HEADS[case]
    for read in (read_header, lambda file: read_rgb(file, (8, 8))):
        with pytest.raises(DECODE_ERRORS, match=sentence):
            read(BytesIO(content))


def test_images_beyond_the_limit_are_named_with_it_before_anything_is_decoded(tmp_path):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 25000, 16001, 8, 2, 0, 0, 0))
    canvas = bytes(4) + (15999).to_bytes(3, "little") + (14999).to_bytes(3, "little")
    webp = b"RIFF" + (40).to_bytes(4, "little") + b"WEBPVP8X" + (10).to_bytes(4, "little") + canvas + bytes(8)
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"")
    cases = {
        "large.png": (png, r"25,000 x 16,001 px, 400 megapixels; at most 400 are read: make it smaller"),
        "large.webp": (webp, r"16,000 x 15,000 px, 240 megapixels; at most 179 are read of a WEBP file"),
        "large.bmp": (saved("BMP")[:18] + struct.pack("<ii", 30000, 20000) + saved("BMP")[26:], "600 megapixels"),
        "large.gif": (saved("GIF")[:6] + struct.pack("<HH", 60000, 60000) + saved("GIF")[10:], "3,600 megapixels"),
    }
    for name, (content, message) in cases.items():
        for read in (read_header, lambda file: read_rgb(file, (8, 8))):
            with pytest.raises(ValueError, match=message):
                read(BytesIO(content))
        (tmp_path / name).write_bytes(content)
        assert small_webp(tmp_path / name, 320) is None
    assert MAX_PIXELS == 400_000_000


def test_the_page_shows_a_png_with_large_texts(tmp_path):
    notes = PngImagePlugin.PngInfo()
    notes.add_text("history", "x" * (3 << 20), zip=True)
    picture().save(tmp_path / "a.png", pnginfo=notes)
    assert small_webp(tmp_path / "a.png", 320)
    assert set(SIDEWAYS) == {5, 6, 7, 8}
