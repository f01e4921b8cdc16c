"""The journal of edited captions: each text before and after it was saved, written before the file is.

One append-only file for all datasets. Undo goes by it, so it works after the page has ended, and whatever else goes
wrong, the text that somebody has replaced is in it.
"""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from simpletuner.run_log import APPEND
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.promises import sync
from simpletuner.system.files.regular_files import read_end
from simpletuner.system.files.unread import MALFORMED

READ_BYTES = 8 << 20
"""From the end of the journal: 10,000 edits of captions of 300 letters."""


@dataclass(frozen=True)
class CaptionEdit:
    """The content of a caption file before and after it was saved; None where there was no file."""

    path: str
    image: str
    """The name of the image in its dataset."""
    before: str | None
    after: str | None
    time: float = 0.0
    id: str = ""

    @property
    def shown(self) -> tuple[str, str]:
        """The texts before and after, to be read: those of UTF-16 as such, other bytes that are no UTF-8 replaced."""
        return shown_text(self.before), shown_text(self.after)


def journal_path() -> Path:
    return user_home() / "caption_edits.jsonl"


def as_text(content: bytes | None) -> str | None:
    """Return any bytes as text from which `as_bytes` makes the same."""
    return None if content is None else content.decode("utf-8", "surrogateescape")


def as_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


def changed_since(edits: Iterable[CaptionEdit], seconds: float) -> set[str]:
    """Return the images whose captions differ from what they were then; `edits` are the last ones first."""
    spans: dict[str, tuple[str | None, str | None]] = {}
    for edit in edits:
        if edit.time > seconds:
            spans[edit.image] = edit.before, spans.get(edit.image, (None, edit.after))[1]
    return {image for image, (before, after) in spans.items() if before != after}


def shown_text(text: str | None) -> str:
    content = as_bytes(text) or b""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf16 else "utf-8-sig", "replace").replace("\0", "\ufffd")


def record(path: Path, image: str, before: bytes | None, after: bytes | None) -> CaptionEdit:
    """Append an edit, and return it once it is on the disk. Raises OSError."""
    edit = CaptionEdit(str(path), image, as_text(before), as_text(after), time.time(), f"{time.time_ns():x}")
    place = journal_path()
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(place, APPEND, 0o600)
    try:
        # A line that a full disk has cut short must not take the next one with it, so each begins with an end of line.
        os.write(descriptor, f"\n{json.dumps(asdict(edit))}\n".encode())
        sync(descriptor)
    finally:
        os.close(descriptor)
    return edit


def edits_below(folder: Path) -> Iterator[CaptionEdit]:
    """Yield the edits of captions in a folder, the last one first."""
    prefix = f"{folder}/"
    for line in reversed(read_end(journal_path(), READ_BYTES).splitlines()):
        with suppress(*MALFORMED):  # cut short: the line stays in the file
            row = json.loads(line)
            edit = CaptionEdit(**{name: row[name] for name in CaptionEdit.__annotations__ if name in row})
            if edit.path.startswith(prefix):
                yield edit
