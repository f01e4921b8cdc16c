"""Formats of image files, which Pillow and its plugin pillow-heif read, and of videos, which PyAV reads."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from simpletuner.errors import EnvironmentNotReady
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


VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".webp"})
READ_VIDEOS = "MP4, MOV, MKV, WebM, AVI, GIF and animated WebP"
INSTALL_VIDEO = install_command("video")
UNREAD_BESIDE_VIDEOS = (OTHER_SUFFIXES | BY_PILLOW | BY_PLUGIN) - VIDEO_SUFFIXES

# Boxes with which a file of QuickTime and MP4 may begin, at its fourth byte.
BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")


SUFFIXES = {"mov": ".mp4", "matroska": ".mkv", "avi": ".avi", "gif": ".gif"}
"""Suffix of files by FFmpeg's name for their container."""


def demuxer_of(head: bytes) -> str:
    """Return FFmpeg's name for the container that a file of these first bytes is; empty for none that is
    read.

    FFmpeg itself would also take a playlist, which opens other files and addresses.
    """
    if head[4:8] in BOXES:
        return "mov"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    return "gif" if head[:4] == b"GIF8" else ""


def suffix_of_video(head: bytes) -> str:
    """Return the suffix for a file that begins so, or nothing where it is of no format that is read."""
    return ".webp" if is_webp(head) else SUFFIXES.get(demuxer_of(head), "")


def is_webp(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def check_av(dataset: str) -> None:
    """Raise EnvironmentNotReady where PyAV, which reads the videos of a dataset, is not installed."""
    if find_spec("av") is None:
        raise EnvironmentNotReady(f"dataset `{dataset}` has videos, and PyAV (av) is not installed", INSTALL_VIDEO)
