"""Set settings in a user's config file, or remove them, and leave everything else in it as it was, comments
included.

For each format candidate texts are made, the likeliest first; the first that reads back as the old entries
plus the new one is written. So a layout that a format's editor does not foresee ends in a refusal, never in a
damaged file.

tomlkit and ruamel.yaml were tried for this: tomlkit puts a new key below the comment of the next table and
ends its line with LF in a CRLF file; ruamel.yaml changes 5 of the 6 YAML files of
tests/settings/editors/test_editing.py merely by reading and writing them, and reads YAML 1.2 (`yes` is text)
where accelerate's own reader takes 1.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.editors.text_editors import REMOVED, Edit, edit_env, edit_json, edit_toml
from simpletuner.settings.files.config_files import PREFIX, FileEntry
from simpletuner.settings.files.formats import FORMATS, parse_entries, read_entries, suffix_of, toml_value
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.files.atomic import replace_file
from simpletuner.system.files.regular_files import read_file

BOM = "\ufeff"


def set_in_file(path: Path, name: str, value: object) -> bool:
    """Set a setting in a config file; return whether that changed the file.

    Raises SettingsError for a file that cannot be read, edited safely, or written.
    """
    new = edit_text(path, name, value)
    if new is not None:
        write(path, new)
    return new is not None


def edit_text(path: Path, name: str, value: object) -> str | None:
    """Return the text of a config file with a setting set in it; None if it says so already.

    Raises SettingsError for a file that cannot be read or edited safely.
    """
    old = text_of(path)
    new = change_text(path, old, {name: value})
    return None if new == old else new


def text_of(path: Path) -> str:
    """Text of a config file, its byte order mark included. Raises SettingsError where it does not parse."""
    read_entries(path)
    return read_file(path).decode("utf-8")


def change_text(path: Path, text: str, changes: Mapping[str, object]) -> str:
    """Return the text of the config file at `path` with some settings set, and those that are REMOVED left
    out.

    Raises SettingsError for a text that does not parse, or that cannot be edited safely.
    """
    mark = BOM * text.startswith(BOM)
    text = text.removeprefix(BOM)
    for name, value in changes.items():
        text = change_one(path, text, name, value)
    return mark + text


def change_one(path: Path, text: str, name: str, value: object) -> str:
    before = parse_entries(path, text)
    found = [entry for entry in before if setting_of(path, entry) == name]
    if len(found) > 1:
        lines = " and ".join(str(entry.line) for entry in found)
        raise SettingsError(f"{path} sets {name} twice, in lines {lines}", "keep one of them")
    edit = Edit(name, as_read(path, value), bool(found))
    if [repr(entry.value) for entry in found] == wanted(edit):
        return text
    # The likeliest text first. Our own reader is the judge, so an editor may be simple: a layout that it does
    # not foresee is refused, not damaged.
    for candidate in EDITORS[suffix_of(path)](text, edit):
        if reads_as(path, candidate, before, edit):
            return candidate
    raise SettingsError(
        f"{path} cannot be edited without risk to what else it says",
        f"remove {name} yourself" if edit.removes else f"write it yourself: {name} = {shown(edit)}",
    )


def shown(edit: Edit) -> str:
    return json.dumps(edit.value, ensure_ascii=False)


def as_read(path: Path, value: object) -> object:
    """Value as the reader of a format returns it: TOML has no null, and in .env files all is text."""
    if value is REMOVED or suffix_of(path) in (".json", ".yaml", ".yml"):
        return value
    return as_text(value) if suffix_of(path) == ".env" else toml_value(value)


def wanted(edit: Edit) -> list[str]:
    # As Python writes them, since 1 == True.
    return [] if edit.removes else [repr(edit.value)]


def write(path: Path, text: str) -> None:
    """Replace the file. Raises SettingsError where that cannot be done."""
    try:
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}", "see who owns the file and its folder") from None


def setting_of(path: Path, entry: FileEntry) -> str | None:
    """The setting that an entry means; in .env files our prefix is optional."""
    return canonical_name(entry.key.removeprefix(PREFIX) if suffix_of(path) == ".env" else entry.key)


def reads_as(path: Path, text: str, before: list[FileEntry], edit: Edit) -> bool:
    """True if only the edited setting differs from `before`, appears once, and the order is unchanged."""
    try:
        after = list(FORMATS[suffix_of(path)](text))
    except ValueError:
        return False
    ours = [repr(entry.value) for entry in after if setting_of(path, entry) == edit.name]
    return ours == wanted(edit) and others(path, after, edit) == others(path, before, edit)


def others(path: Path, entries: Iterable[FileEntry], edit: Edit) -> list[tuple[str, str]]:
    """Names and values of all other settings."""
    return [(entry.key, repr(entry.value)) for entry in entries if setting_of(path, entry) != edit.name]


def edit_yaml(text: str, edit: Edit) -> Iterator[str]:
    from simpletuner.settings.editors import yaml_editor  # PyYAML takes 15 ms to import

    yield from yaml_editor.edit_yaml(text, edit)


EDITORS: dict[str, Callable[[str, Edit], Iterator[str]]] = {
    ".json": edit_json,
    ".toml": edit_toml,
    ".yaml": edit_yaml,
    ".yml": edit_yaml,
    ".env": edit_env,
}
