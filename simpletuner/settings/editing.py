"""Set one setting in a user's config file, and leave all else in it as it was, comments included.

Each format proposes texts (`proposals.py`); the first that reads back as the old entries plus the new one is written.
So what a format's editor does not foresee ends in a refusal, never in a damaged file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.settings.edit_text import EDITORS, Edit
from simpletuner.settings.formats import FORMATS, Entry, read_entries
from simpletuner.settings.loading import canonical_name
from simpletuner.settings.sources import PREFIX
from simpletuner.system.files import replace_file

BOM = "\ufeff"


def set_in_file(path: Path, name: str, value: str) -> bool:
    """Set a knob of text in a config file; return whether that changed the file.

    Raises SettingsError for a file that cannot be read, edited safely, or written.
    """
    new = edited(path, name, value)
    if new is not None:
        write(path, new)
    return new is not None


def edited(path: Path, name: str, value: str) -> str | None:
    """Return the text of a config file with a knob of text set in it; None if it says so already.

    Raises SettingsError for a file that cannot be read or edited safely, and for a value with characters that some
    formats escape and others do not.
    """
    if not re.fullmatch(r"[\w,. /~+-]*", value):
        raise SettingsError(
            f"`{value}` is not put into a file: it has characters that formats write differently",
            f"write it yourself: {name} = {json.dumps(value, ensure_ascii=False)}",
        )
    entries = read_entries(path)
    standing = [index for index, entry in enumerate(entries) if knob_of(path, entry) == name]
    if len(standing) > 1:
        lines = " and ".join(str(entries[index].line) for index in standing)
        raise SettingsError(f"{path} sets {name} twice, in lines {lines}", "keep one of them")
    edit = Edit(name, value, standing[0] if standing else None)
    if edit.index is not None and entries[edit.index].value == value:
        return None
    text = path.read_bytes().decode("utf-8")
    proposals = EDITORS[path.suffix.lower()](text.removeprefix(BOM), edit)
    new = next((new for new in proposals if reads_as(path, new, entries, edit)), None)
    if new is None:
        raise SettingsError(
            f"{path} cannot be edited without risk to what else it says", f"write it yourself: {name} = {edit.quoted}"
        )
    return BOM * text.startswith(BOM) + new


def write(path: Path, text: str) -> None:
    """Write the file anew. Raises SettingsError where that cannot be done."""
    try:
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}", "see who owns the file and its folder") from None


def knob_of(path: Path, entry: Entry) -> str | None:
    """Return the knob that an entry means; in files of pairs, our prefix is optional."""
    return canonical_name(entry.key.removeprefix(PREFIX) if path.suffix.lower() == ".env" else entry.key)


def reads_as(path: Path, text: str, before: list[Entry], edit: Edit) -> bool:
    """Return whether a text says the same as before in the same order, and beside it, once, what is to be set."""
    try:
        after = list(FORMATS[path.suffix.lower()](text))
    except ValueError:
        return False
    ours = [entry.value for entry in after if knob_of(path, entry) == edit.name]
    return ours == [edit.value] and others(path, after, edit) == others(path, before, edit)


def others(path: Path, entries: Iterable[Entry], edit: Edit) -> list[tuple[str, str]]:
    """Return the names and values of all other settings; as Python writes them, since 1 == True."""
    return [(entry.key, repr(entry.value)) for entry in entries if knob_of(path, entry) != edit.name]
