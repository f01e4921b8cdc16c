"""Read the captions of a picture. What cannot be read for certain is refused, never trained on as it comes."""

from __future__ import annotations

import codecs
import stat
from pathlib import Path

from simpletuner.data.datasets import ImageDataset

LARGEST_BYTES = 1 << 20

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class UnreadableCaptionError(ValueError):
    """Why a caption file is not read."""


def captions_of(dataset: ImageDataset, path: Path) -> tuple[str, ...]:
    """Return a picture's captions, one per non-empty line of a text file; empty where there is none.

    Raises UnreadableCaptionError for a file that is no text.
    """
    phrase = dataset.instance_prompt or ""
    if dataset.caption_strategy == "instanceprompt":
        return (phrase,)
    if dataset.caption_strategy == "filename":
        lines = [path.stem.replace("_", " ").strip()]
    else:
        lines = read_text(path.with_suffix(".txt")).splitlines()
    prefix = f"{phrase} " if dataset.prepend_instance_prompt and phrase else ""
    return tuple(prefix + line.strip() for line in lines if line.strip())


def read_text(path: Path) -> str:
    """Return what a text file says, "" where there is none. Raises UnreadableCaptionError."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableCaptionError("is no regular file")
        if found.st_size > LARGEST_BYTES:
            raise UnreadableCaptionError(f"has {found.st_size:,} bytes, which is no caption")
        content = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UnreadableCaptionError(f"cannot be read: {error.strerror}") from None
    return decoded(content)


def decoded(content: bytes) -> str:
    """Return text in UTF-8, or in UTF-16 or UTF-32 that begins with a byte order mark."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise UnreadableCaptionError(f"is not {name}: byte {error.start} is 0x{content[error.start]:02x}") from None
    if "\0" in text:
        raise UnreadableCaptionError(f"holds a zero at byte {content.index(0)}: is it UTF-16 without its mark?")
    return text
