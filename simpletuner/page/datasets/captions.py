"""Read, save and undo captions in text files. What somebody else has written meanwhile is never overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.data.scan.captions import BYTE_ORDER_MARKS, MAX_BYTES, caption_file, decode_text
from simpletuner.data.storage.storage import UnreadableFileError
from simpletuner.errors import SettingsError
from simpletuner.page.datasets import journal
from simpletuner.page.datasets.files import file_in
from simpletuner.page.folders import Folders
from simpletuner.system.files.atomic import flush_to_disk, replace_file
from simpletuner.system.files.checksums import value_checksum
from simpletuner.system.files.regular_files import read_file

NO_FILE = "no file"
"""In place of a checksum."""


@dataclass(frozen=True)
class Caption:
    """The caption file of an image, as it is on the disk: None where there is none."""

    image: str
    path: Path
    content: bytes | None
    encoding: str
    """Of `caption_encoding`; empty for UTF-8."""

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


def open_caption(folders: Folders, facts: Mapping[str, Any], name: str) -> Caption:
    """Read the caption file of an image.

    Raises SettingsError where it is not to be edited: outside the page's folders, a link, or not in a text file.
    """
    if facts["not_editable"]:
        raise SettingsError(f"captions of {facts['id']} cannot be edited here", facts["not_editable"])
    path = caption_path(folders, facts, name)
    try:
        content = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        content = None
    return Caption(name, path, content, facts["caption_encoding"])


def caption_path(folders: Folders, facts: Mapping[str, Any], name: str) -> Path:
    """Raises SettingsError for a link, which might be what other datasets read, too."""
    path = file_in(folders, facts, caption_file(name))
    if (Path(facts["folder"]) / caption_file(name)).is_symlink():
        raise SettingsError(f"{caption_file(name)} is a link, which is not followed", "edit the file that it leads to")
    return path


def save(caption: Caption, text: str) -> journal.CaptionEdit | None:
    """Write a text; return None where it is what the file has. The caller has compared checksums."""
    content = caption.encode(text)
    if len(content) > MAX_BYTES:
        raise SettingsError(f"a caption has at most {MAX_BYTES >> 20} MiB", "shorten it")
    if caption.content is not None and caption.text == text.strip("\n"):
        return None
    return write(caption, content)


def undo(caption: Caption, edit: journal.CaptionEdit) -> journal.CaptionEdit:
    """Bring back the text before an edit, which is an edit itself.

    Raises SettingsError where the file is not as that edit has left it.
    """
    if journal.as_text(caption.content) != edit.after:
        raise SettingsError(
            f"{caption.path.name} has changed since: nothing is undone", "the list of edits has all texts"
        )
    return write(caption, journal.as_bytes(edit.before))


def write(caption: Caption, content: bytes | None) -> journal.CaptionEdit:
    """Write the journal, then the file. Raises OSError."""
    edit = journal.record(caption.path, caption.image, caption.content, content)
    if content is None:
        caption.path.unlink(missing_ok=True)
        flush_to_disk(caption.path.parent)
    else:
        replace_file(caption.path, content)
    return edit
