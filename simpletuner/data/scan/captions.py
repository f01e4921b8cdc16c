"""Read the captions of an image. What cannot be read for certain is refused: a guess would be trained on."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import PurePosixPath

from simpletuner.data.config.caption_rules import is_blank, split_lines
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.frame_folders import is_frame_folder
from simpletuner.data.scan.caption_variants import vary
from simpletuner.data.storage.storage import CAPTION_SUFFIX, Storage, UnreadableFileError

MAX_BYTES = 1 << 20
EXAMPLE_BYTES = 40

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_caption_file(storage: Storage, name: str, encoding: str = "") -> str:
    """Return the text of an image's caption file; empty where there is no such file.

    Raises UnreadableFileError for a caption file that is not text in UTF-8 or in `encoding`.
    """
    try:
        return decode_text(storage.read(caption_file(name), MAX_BYTES), encoding)
    except FileNotFoundError:
        return ""


def lines_of(text: str) -> list[str]:
    """Return the lines of a caption file of which anything shows."""
    return [line.strip() for line in split_lines(text) if not is_blank(line)]


def captions_of(dataset: ImageDataset, name: str, lines: Sequence[str]) -> tuple[str, ...]:
    """Return an image's captions, as the dataset's strategy says; `lines` are those of its text file."""
    phrase = dataset.instance_prompt or ""
    if dataset.caption_strategy == "instanceprompt":
        return (phrase,)
    if dataset.caption_strategy == "filename":
        lines = [line] if (line := PurePosixPath(caption_file(name)).stem.replace("_", " ").strip()) else []
    elif dataset.caption_lines == "one":
        lines = ["\n".join(lines)] if lines else []
    elif dataset.caption_lines == "first":
        lines = lines[:1]
    lines = [text for line in lines for text in vary(line, dataset.caption_filter_list, dataset.caption_shuffle)]
    prefix = f"{phrase} " if dataset.prepend_instance_prompt and phrase else ""
    return tuple(prefix + line for line in lines)


def caption_file(name: str) -> str:
    if is_frame_folder(name):
        return name[:-1] + CAPTION_SUFFIX
    return PurePosixPath(name).with_suffix(CAPTION_SUFFIX).as_posix()


def decode_text(content: bytes, encoding: str = "") -> str:
    """Decode UTF-8, or UTF-16 or UTF-32 with a byte order mark; what is neither, in `encoding`.

    Raises UnreadableFileError. Without `encoding` no other one is tried: Latin-1 decodes any bytes, so a wrong guess
    would never be noticed. Files of a folder where only some are in it stay UTF-8.
    """
    marked = next((name for mark, name in BYTE_ORDER_MARKS if content.startswith(mark)), "")
    if not encoding or marked or (is_utf8(content) and not content.isascii()):
        return decode_strictly(content, marked or "utf-8")
    return decode_strictly(content, encoding)  # ASCII as well: ISO-2022-JP and UTF-7 consist of it


def is_utf8(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


def decode_strictly(content: bytes, encoding: str) -> str:
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise UnreadableFileError(
            f"is not {name}: byte {error.start} is 0x{content[error.start]:02x}{example(content)}"
        ) from None
    if "\0" in text:
        raise UnreadableFileError(f"has a zero at byte {content.index(0)}: is it UTF-16 without a byte order mark?")
    return text


def example(content: bytes) -> str:
    """Return how a file without a mark would begin in the most frequent other encoding, for people to judge."""
    text = " ".join(content[:EXAMPLE_BYTES].decode("cp1252", "replace").split())
    return f' (as windows-1252: "{text}")' if text.isprintable() and "\ufffd" not in text else ""
