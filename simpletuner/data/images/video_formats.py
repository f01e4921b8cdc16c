"""Formats of video files: those that PyAV reads, and animated WebP by Pillow."""

from __future__ import annotations

from importlib.util import find_spec

from simpletuner.data.images.image_formats import BY_PILLOW, BY_PLUGIN, OTHER_SUFFIXES
from simpletuner.errors import EnvironmentNotReady
from simpletuner.extras import install_command

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
