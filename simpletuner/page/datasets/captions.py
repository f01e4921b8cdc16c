"""Read, save and undo captions in text files. What somebody else has written meanwhile is never overwritten.

The journal, one append-only file for all datasets, has the text before and after each edit, written before
the caption file is. Undo reads it, so it works after the page has ended, and no text is lost.

`file_in` is the only way from the name of an image in a request to its file.
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
from typing import TYPE_CHECKING

from simpletuner.data.scan.captions import BYTE_ORDER_MARKS, MAX_BYTES, caption_file, decode_text
from simpletuner.data.storage.storage import UnreadableFileError
from simpletuner.errors import SettingsError
from simpletuner.run_log import APPEND
from simpletuner.runs.folder import Folders
from simpletuner.system.files.atomic import flush_to_disk, replace_file
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.checksums import value_checksum
from simpletuner.system.files.mounts import sync
from simpletuner.system.files.paths import ENVIRONMENT
from simpletuner.system.files.regular_files import MALFORMED, read_end, read_file

if TYPE_CHECKING:
    from simpletuner.tools.dataset.listing import ListedFacts

# Bytes read from the end of the journal: 10,000 edits of captions of 300 letters.
READ_BYTES = 8 << 20


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
        # Bytes that are neither UTF-8 nor UTF-16 are replaced.
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
        # A line that a full disk has cut short must not damage the next: each begins with a newline.
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


def why_hidden(folders: Folders, facts: ListedFacts) -> str:
    """Return a sentence if the dataset is read from outside of the page's folders, which are never shown;
    else empty."""
    outside = [place for place in facts["places"] if not folders.holds(place)]
    return f"{outside[0]} is not in the folders of the page: start it with --folder to see more." if outside else ""


def why_no_pictures(facts: ListedFacts) -> str:
    """Return a sentence for a dataset that is shown without pictures; else empty."""
    if facts["noun"] != "image":
        return f"Of {facts['noun']}s no pictures are shown."
    return "" if facts["folder"] else "Its images are in no folder of this machine: they are listed without pictures."


def file_in(folders: Folders, facts: ListedFacts, name: str) -> Path:
    """Return the real path of a file of a dataset. Raises SettingsError outside the page's folders."""
    if not facts["folder"]:
        raise SettingsError(f"{name} is in no folder of this machine", "its dataset is read from elsewhere")
    if ENVIRONMENT.search(name):  # which `resolve` would take for a variable
        raise SettingsError(f"{name} has the form of a variable", "rename it")
    return folders.resolve(Path(facts["folder"]) / name)


NO_FILE = "no file"
"""Value in place of a checksum."""


@dataclass(frozen=True)
class Caption:
    """The caption file of an image, as it is on the disk: None where there is none."""

    image: str
    path: Path
    content: bytes | None
    encoding: str
    """Value of `caption_encoding`; empty for UTF-8."""

    @property
    def checksum(self) -> str:
        return NO_FILE if self.content is None else value_checksum({}, self.content)

    @property
    def text(self) -> str:
        """Raises SettingsError for what is no text."""
        try:
            return (
                decode_text(self.content or b"", self.encoding).removeprefix("\ufeff").replace("\r\n", "\n").strip("\n")
            )
        except UnreadableFileError as error:
            raise SettingsError(f"{self.path.name} {error}", "save it as UTF-8, or name its caption_encoding") from None

    def encode(self, text: str) -> bytes:
        """Return a text as the file has it: its encoding, its mark, and its ends of lines."""
        old = self.content or b""
        if text:
            text = text.strip("\n") + "\n"
        if b"\r\n" in old:
            text = text.replace("\n", "\r\n")
        marked = next((name for mark, name in BYTE_ORDER_MARKS if old.startswith(mark)), "")
        # The first that is read again as what it is; UTF-8 with a mark always is.
        for encoding in filter(None, (marked, self.encoding, "utf-8", "utf-8-sig")):
            try:
                content = text.encode(encoding)
                if decode_text(content, self.encoding).removeprefix("\ufeff") == text:
                    return content
            except (UnicodeEncodeError, UnreadableFileError):
                continue
        raise SettingsError("this text cannot be saved: it has a character that is none", "remove it")


def open_caption(folders: Folders, facts: ListedFacts, name: str) -> Caption:
    """Read the caption file of an image.

    Raises SettingsError where it cannot be edited: outside the page's folders, a link, no text file.
    """
    if facts["not_editable"]:
        raise SettingsError(f"captions of {facts['id']} cannot be edited here", facts["not_editable"])
    path = caption_path(folders, facts, name)
    try:
        content = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        content = None
    return Caption(name, path, content, facts["caption_encoding"])


def caption_path(folders: Folders, facts: ListedFacts, name: str) -> Path:
    """Raises SettingsError for a link, which might be what other datasets read, too."""
    path = file_in(folders, facts, caption_file(name))
    if (Path(facts["folder"]) / caption_file(name)).is_symlink():
        raise SettingsError(f"{caption_file(name)} is a link, which is not followed", "edit the file that it leads to")
    return path


def save(caption: Caption, text: str) -> CaptionEdit | None:
    """Write a text; return None where it is what the file has. The caller has compared checksums."""
    content = caption.encode(text)
    if len(content) > MAX_BYTES:
        raise SettingsError(f"a caption has at most {MAX_BYTES >> 20} MiB", "shorten it")
    if caption.content is not None and caption.text == text.strip("\n"):
        return None
    return write(caption, content)


def undo(caption: Caption, edit: CaptionEdit) -> CaptionEdit:
    """Bring back the text before an edit, which is an edit itself.

    Raises SettingsError where the file is not as that edit has left it.
    """
    if as_text(caption.content) != edit.after:
        raise SettingsError(
            f"{caption.path.name} has changed since: nothing is undone", "the list of edits has all texts"
        )
    return write(caption, as_bytes(edit.before))


def write(caption: Caption, content: bytes | None) -> CaptionEdit:
    """Write the journal, then the file. Raises OSError."""
    edit = record(caption.path, caption.image, caption.content, content)
    if content is None:
        caption.path.unlink(missing_ok=True)
        flush_to_disk(caption.path.parent)
    else:
        replace_file(caption.path, content)
    return edit
