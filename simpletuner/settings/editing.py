"""Set one setting in a user's config file, and leave everything else in it as it was, comments included.

For each format candidate texts are made, the likeliest first; the first that reads back as the old entries plus the
new one is written. So a layout that a format's editor does not foresee ends in a refusal, never in a damaged file.

tomlkit and ruamel.yaml were tried for this: tomlkit puts a new key below the comment of the next table and ends its
line with LF in a CRLF file; ruamel.yaml changes 5 of the 6 YAML files of tests/settings/test_editing.py merely by
reading and writing them, and reads YAML 1.2 (`yes` is text) where accelerate's own reader takes 1.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.settings.config_files import PREFIX
from simpletuner.settings.env_format import assignments
from simpletuner.settings.file_entries import FileEntry
from simpletuner.settings.formats import FORMATS, JSON_TOKEN, is_toml, read_entries, suffix_of
from simpletuner.settings.loading import canonical_name
from simpletuner.system.files import replace_file

TOML_TEXT = r'"(?:\\.|[^"\\\n])*"(?!")|\'[^\'\n]*\'(?!\')'
BOM = "\ufeff"


@dataclass(frozen=True)
class Edit:
    """A setting and its new value; `index` is its place among the file's entries, None if it is not there."""

    name: str
    value: str
    index: int | None

    @property
    def quoted(self) -> str:
        """The value as JSON, TOML, YAML and shells all read it."""
        return json.dumps(self.value, ensure_ascii=False)


def set_in_file(path: Path, name: str, value: str) -> bool:
    """Set a setting of text in a config file; return whether that changed the file.

    Raises SettingsError for a file that cannot be read, edited safely, or written.
    """
    new = edit_text(path, name, value)
    if new is not None:
        write(path, new)
    return new is not None


def edit_text(path: Path, name: str, value: str) -> str | None:
    """Return the text of a config file with a setting of text set in it; None if it says so already.

    Raises SettingsError for a file that cannot be read or edited safely, and for a value with characters that some
    formats escape and others do not.
    """
    if not re.fullmatch(r"[\w,. /~+-]*", value):
        raise SettingsError(
            f"`{value}` is not put into a file: it has characters that formats write differently",
            f"write it yourself: {name} = {json.dumps(value, ensure_ascii=False)}",
        )
    entries = read_entries(path)
    found = [index for index, entry in enumerate(entries) if setting_of(path, entry) == name]
    if len(found) > 1:
        lines = " and ".join(str(entries[index].line) for index in found)
        raise SettingsError(f"{path} sets {name} twice, in lines {lines}", "keep one of them")
    edit = Edit(name, value, found[0] if found else None)
    if edit.index is not None and entries[edit.index].value == value:
        return None
    text = path.read_bytes().decode("utf-8")
    candidates = EDITORS[suffix_of(path)](text.removeprefix(BOM), edit)
    new = next((new for new in candidates if reads_as(path, new, entries, edit)), None)
    if new is None:
        raise SettingsError(
            f"{path} cannot be edited without risk to what else it says", f"write it yourself: {name} = {edit.quoted}"
        )
    return BOM * text.startswith(BOM) + new


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
    """Whether a text has all other settings as before, in the same order, and the new value once."""
    try:
        after = list(FORMATS[suffix_of(path)](text))
    except ValueError:
        return False
    ours = [entry.value for entry in after if setting_of(path, entry) == edit.name]
    return ours == [edit.value] and others(path, after, edit) == others(path, before, edit)


def others(path: Path, entries: Iterable[FileEntry], edit: Edit) -> list[tuple[str, str]]:
    """Names and values of all other settings; as Python writes them, since 1 == True."""
    return [(entry.key, repr(entry.value)) for entry in entries if setting_of(path, entry) != edit.name]


def newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def replace_span(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def insert_line(text: str, position: int, line: str) -> str:
    """Add a line at `position`, which is the start of a line or the end of the text."""
    newline = newline_of(text)
    before, after = text[:position], text[position:]
    return before + newline * bool(before and not before.endswith("\n")) + line + newline + after


def edit_json(text: str, edit: Edit) -> Iterator[str]:
    """Replace the value, or add a pair as the last, written like the ones before it."""
    spans = list(json_spans(text))
    if edit.index is not None:
        _, _, start, end = spans[edit.index]
        yield replace_span(text, start, end, edit.quoted)
    elif spans:
        key_start, key_end, start, end = spans[-1]
        ahead = (
            text[spans[-2][3] : key_start] if len(spans) > 1 else "," + (text[text.index("{") + 1 : key_start] or " ")
        )
        dashes = "--" * text[key_start:].startswith('"--')
        yield replace_span(text, end, end, f'{ahead}"{dashes}{edit.name}"{text[key_end:start]}{edit.quoted}')
    else:
        start, end = text.index("{"), text.rindex("}") + 1
        yield replace_span(text, start, end, f'{{\n  "{edit.name}": {edit.quoted}\n}}'.replace("\n", newline_of(text)))


def json_spans(text: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each pair of the outermost object where the key starts and ends, and where the value does."""
    depth = 0
    for token in JSON_TOKEN.finditer(text):
        if token["colon"] and depth == 1:
            start = re.compile(r"\s*").match(text, token.end()).end()  # pyright: ignore[reportOptionalMemberAccess]
            yield token.start(), token.end("text"), start, json.JSONDecoder().raw_decode(text, start)[1]
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)


def edit_toml(text: str, edit: Edit) -> Iterator[str]:
    """Replace text in quotes, or add a line below the last setting that stands before all tables."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)  # splitlines() also splits at characters that TOML does not
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    if edit.index is not None:
        for line, start in zip(lines, starts, strict=False):
            found = re.match(rf"[ \t]*(?P<key>[^=#\n]+?)[ \t]*=[ \t]*(?P<value>{TOML_TEXT})", line)
            if found and canonical_name(found["key"].strip("\"'")) == edit.name:
                yield replace_span(text, start + found.start("value"), start + found.end("value"), edit.quoted)
        return
    headers = (n for n, line in enumerate(lines) if re.match(r"[ \t]*\[", line) and is_toml("".join(lines[:n])))
    table = next(headers, len(lines))
    last = next((n for n in reversed(range(table)) if not re.match(r"[ \t\r]*(#|\n|$)", lines[n])), None)
    for place in [table] if last is None else [last + 1, table]:
        yield insert_line(text, starts[place], f"{edit.name} = {edit.quoted}")


def edit_yaml(text: str, edit: Edit) -> Iterator[str]:
    """Replace a plain or quoted value; or add a line at the end, else before all others, or a pair within braces."""
    import yaml

    node = yaml.compose(text, yaml.SafeLoader)
    pair = f"{edit.name}: {edit.quoted}"
    if not isinstance(node, yaml.MappingNode):
        yield insert_line(text, len(text), pair)
    elif edit.index is not None:
        for key, value in node.value:
            is_text = isinstance(value, yaml.ScalarNode) and value.style not in ("|", ">")
            if is_text and canonical_name(str(key.value)) == edit.name:
                yield replace_span(text, value.start_mark.index, value.end_mark.index, edit.quoted)
    elif node.flow_style:
        end = node.end_mark.index - 1
        yield replace_span(text, end, end, f", {pair}")
        yield replace_span(text, end, end, pair)
    else:
        first = node.start_mark
        yield insert_line(text, len(text), " " * first.column + pair)
        yield replace_span(text, first.index, first.index, pair + newline_of(text) + " " * first.column)


def edit_env(text: str, edit: Edit) -> Iterator[str]:
    """Replace a value, or add a line at the end, spelled like the last one."""
    found = [pair for _, pair in assignments(text)]
    if edit.index is not None:
        for pair in found:
            if canonical_name(pair["key"].removeprefix(PREFIX)) == edit.name:
                yield replace_span(text, *pair.span("value"), edit.quoted)
        return
    key = found[-1]["key"] if found else PREFIX
    name = (PREFIX if key.startswith(PREFIX) else "") + (edit.name if key.islower() else edit.name.upper())
    export = "export " if found and re.match(r"[ \t]*export[ \t]", found[-1][0]) else ""
    yield insert_line(text, len(text), f"{export}{name}={edit.quoted}")


EDITORS: dict[str, Callable[[str, Edit], Iterator[str]]] = {
    ".json": edit_json,
    ".toml": edit_toml,
    ".yaml": edit_yaml,
    ".yml": edit_yaml,
    ".env": edit_env,
}
