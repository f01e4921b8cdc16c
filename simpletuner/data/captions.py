"""Read the captions of an image. What cannot be read for certain is refused: a guess would be trained on."""

from __future__ import annotations

import codecs
from pathlib import PurePosixPath

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.storage import Storage, UnreadableFileError

MAX_BYTES = 1 << 20

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_captions(dataset: ImageDataset, storage: Storage, name: str) -> tuple[str, ...]:
    """Return an image's captions, one per non-empty line of its text file; empty where there is none.

    Raises UnreadableFileError for a caption file that is not text.
    """
    phrase = dataset.instance_prompt or ""
    if dataset.caption_strategy == "instanceprompt":
        return (phrase,)
    if dataset.caption_strategy == "filename":
        lines = [PurePosixPath(name).stem.replace("_", " ").strip()]
    else:
        try:
            content = storage.read(caption_file(name), MAX_BYTES)
        except FileNotFoundError:
            return ()
        lines = decode_text(content).splitlines()
    prefix = f"{phrase} " if dataset.prepend_instance_prompt and phrase else ""
    return tuple(prefix + line.strip() for line in lines if line.strip())


def caption_file(name: str) -> str:
    return PurePosixPath(name).with_suffix(".txt").as_posix()


def decode_text(content: bytes) -> str:
    """Decode UTF-8, or UTF-16 or UTF-32 with a byte order mark. Raises UnreadableFileError.

    No other encoding is tried: Latin-1 decodes any bytes, so a wrong guess would never be noticed.
    """
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise UnreadableFileError(f"is not {name}: byte {error.start} is 0x{content[error.start]:02x}") from None
    if "\0" in text:
        raise UnreadableFileError(f"has a zero at byte {content.index(0)}: is it UTF-16 without a byte order mark?")
    return text
