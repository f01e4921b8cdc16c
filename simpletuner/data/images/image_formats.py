"""Formats of image files: those that Pillow reads, and HEIC if its plugin pillow-heif is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from simpletuner.extras import install_command

BY_PILLOW = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".gif", ".tif", ".tiff", ".bmp"})
BY_PLUGIN = frozenset({".heic", ".heif"})
# As Pillow names its plugins; that of JPEG opens MPO, too.
PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "BMP", "GIF")
PLUGIN_FORMAT = "HEIF"
INSTALL = install_command("heif")
READ = f"JPEG, PNG, WebP, AVIF, TIFF, BMP, GIF, and HEIC after `{INSTALL}`"

# Suffixes of files that a user may take for training data, but that are not read; they are counted.
OTHER_SUFFIXES = frozenset(
    {".jp2", ".jxl", ".psd", ".exr", ".hdr", ".svg", ".tga", ".ppm", ".pgm", ".ico"}
    | {".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"}
    | {".mp4", ".mov", ".webm", ".mkv", ".avi", ".zip", ".tar", ".parquet"}
)

HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
AVIF_BRANDS = (b"avif", b"avis")
MAGIC = {
    b"\xff\xd8": ".jpg",
    b"\x89P": ".png",
    b"RI": ".webp",
    b"GI": ".gif",
    b"BM": ".bmp",
    b"II": ".tif",
    b"MM": ".tif",
}


def read_suffixes() -> frozenset[str]:
    return BY_PILLOW | BY_PLUGIN if has_plugin() else BY_PILLOW


def unread_suffixes() -> frozenset[str]:
    return OTHER_SUFFIXES | BY_PLUGIN - read_suffixes()


def has_plugin() -> bool:
    return find_spec("pillow_heif") is not None


@cache
def register_plugin() -> bool:
    """Let Pillow open HEIC in this process; return whether it can."""
    if has_plugin():
        import pillow_heif

        pillow_heif.register_heif_opener()
    return has_plugin()


def is_heif(head: bytes) -> bool:
    """True if a file's first bytes may be HEIC; AVIF shares some of these brands."""
    return head[4:8] == b"ftyp" and head[8:12] in HEIF_BRANDS


def suffix_of_content(head: bytes) -> str:
    """Return the suffix for a file that begins so, or nothing where it is of no format that is read."""
    if head[4:8] == b"ftyp":
        return ".avif" if head[8:12] in AVIF_BRANDS else ".heic" if is_heif(head) else ""
    return MAGIC.get(head[:2], "")
