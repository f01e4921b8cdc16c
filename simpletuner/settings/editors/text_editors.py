"""Edit one value of a JSON, TOML or .env file and leave the rest as it is written.

JSON: the text between two pairs is what the file already has between others. TOML: statements before all
tables are lines; a table goes from its header to its last line that says something. `.env`: `NAME=value` as a
shell reads it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.files.config_files import PREFIX
from simpletuner.settings.files.env_format import assignments
from simpletuner.settings.files.formats import JSON_TOKEN, TOML_NAME, TOML_TOKEN, toml_line, toml_name, toml_text

# In place of a value: the setting is taken out of the file.
REMOVED: Final = object()


@dataclass(frozen=True)
class Edit:
    """A setting and its new value as the format's reader returns it; `is_there`: the text has the setting."""

    name: str
    value: Any
    is_there: bool

    @property
    def removes(self) -> bool:
        return self.value is REMOVED


def newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def replace_span(text: str, start: int, end: int, new: str = "") -> str:
    return text[:start] + new + text[end:]


def insert_line(text: str, position: int, line: str) -> str:
    """Add a line at `position`, which is the start of a line or the end of the text."""
    newline = newline_of(text)
    before, after = text[:position], text[position:]
    return before + newline * bool(before and not before.endswith("\n")) + line + newline + after


def line_start(text: str, position: int) -> int:
    return text.rfind("\n", 0, position) + 1


def line_end(text: str, position: int) -> int:
    """Offset just after the newline of the line that contains `position`."""
    found = text.find("\n", position)
    return len(text) if found < 0 else found + 1


def indent_of(text: str, position: int) -> str:
    """Return the blanks at the start of a line."""
    found = re.compile(r"[ \t]*").match(text, line_start(text, position))
    return found[0] if found else ""


BLANKS = re.compile(r"\s*")


class Pair(NamedTuple):
    """Places of the key and the value of a pair in the outermost object."""

    key_start: int
    key_end: int
    start: int
    end: int


def edit_json(text: str, edit: Edit) -> Iterator[str]:
    """Replace or remove a value, or add a pair as the last, written like the ones before it."""
    pairs = list(json_pairs(text))
    if edit.is_there:
        index = next(n for n, pair in enumerate(pairs) if canonical_name(key_of(text, pair)) == edit.name)
        if edit.removes:
            yield without_pair(text, pairs, index)
        else:
            pair = pairs[index]
            yield replace_span(text, pair.start, pair.end, json_text(edit.value, text, pair.key_start))
    elif pairs:
        yield with_pair(text, pairs, edit)
    else:
        start, end = text.index("{"), text.rindex("}") + 1
        whole = json.dumps({edit.name: edit.value}, ensure_ascii=False, indent=2)
        yield replace_span(text, start, end, whole.replace("\n", newline_of(text)))


def json_pairs(text: str) -> Iterator[Pair]:
    depth = 0
    for token in JSON_TOKEN.finditer(text):
        if token["colon"] and depth == 1:
            blanks = BLANKS.match(text, token.end())
            start = blanks.end() if blanks else token.end()
            yield Pair(token.start(), token.end("text"), start, json.JSONDecoder().raw_decode(text, start)[1])
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)


def key_of(text: str, pair: Pair) -> str:
    return json.loads(text[pair.key_start : pair.key_end])


def json_text(value: object, text: str, position: int) -> str:
    """Write a value; a table over several lines where the file itself is."""
    indent = indent_of(text, position)
    if not isinstance(value, dict) or not value or "\n" not in text.strip():
        return json.dumps(value, ensure_ascii=False)
    whole = json.dumps(value, ensure_ascii=False, indent=indent or 2)
    return whole.replace("\n", newline_of(text) + indent)


def with_pair(text: str, pairs: list[Pair], edit: Edit) -> str:
    last = pairs[-1]
    first_gap = "," + (text[text.index("{") + 1 : last.key_start] or " ")
    # The comma, newline and indent between the last two pairs: a new one looks like them.
    ahead = text[pairs[-2].end : last.key_start] if len(pairs) > 1 else first_gap
    # Files of the original may write names as flags, `"--seed": 42`.
    dashes = "--" * text[last.key_start :].startswith('"--')
    value = json_text(edit.value, text, last.key_start)
    return replace_span(
        text, last.end, last.end, f'{ahead}"{dashes}{edit.name}"{text[last.key_end : last.start]}{value}'
    )


def without_pair(text: str, pairs: list[Pair], index: int) -> str:
    if len(pairs) == 1:
        return replace_span(text, text.index("{") + 1, text.rindex("}"))
    if index == len(pairs) - 1:
        return replace_span(text, pairs[-2].end, pairs[-1].end)
    return replace_span(text, pairs[index].key_start, pairs[index + 1].key_start)


SAYS_NOTHING = re.compile(r"[ \t\r]*(#[^\n]*)?(\n|$)")


class Statement(NamedTuple):
    """An assignment or a table, its extent, and the name that it belongs to."""

    name: str
    start: int
    end: int
    is_table: bool


def edit_toml(text: str, edit: Edit) -> Iterator[str]:
    """Replace a value, remove statements, or add a line below the last setting that precedes all tables."""
    found = list(statements(text))
    ours = [each for each in found if canonical_name(each.name) == edit.name]
    if edit.removes:
        yield without_statements(text, ours)
        return
    value = toml_text(edit.value)
    # In place where that is possible: the comment after the value stays.
    if len(ours) == 1 and not ours[0].is_table:
        start, end = value_span(text, ours[0])
        yield replace_span(text, start, end, value)
    if edit.is_there:  # a table, or several dotted keys: a line takes their place
        text = without_statements(text, ours)
        found = list(statements(text))
    table = next((each.start for each in found if each.is_table), len(text))
    before = [each for each in found if each.start < table]
    for place in [before[-1].end, table] if before else [table]:
        yield insert_line(text, place, toml_line(edit.name, edit.value))


def statements(text: str) -> Iterator[Statement]:
    """Yield all outermost statements of a text that parses; those in a table belong to it."""
    starts = [start for start in logical_lines(text) if not SAYS_NOTHING.match(text, start)]
    ends = [*starts[1:], len(text)] if starts else []
    table: Statement | None = None
    for start, following in zip(starts, ends, strict=True):
        end = end_of_statement(text, start, following)
        name = TOML_NAME.match(text, start)
        if name is not None and name["table"]:
            if table:
                yield table
            table = Statement(toml_name(name), start, end, is_table=True)
        elif table:
            table = table._replace(end=end)
        elif name is not None:
            yield Statement(toml_name(name), start, end, is_table=False)
    if table:
        yield table


def logical_lines(text: str) -> Iterator[int]:
    """Yield where lines begin that are not within brackets or a long string."""
    depth = 0
    yield 0
    for token in TOML_TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and depth == 0 and token.end() < len(text):
            yield token.end()


def end_of_statement(text: str, start: int, following: int) -> int:
    """End offset of a statement's last line. Comments and blank lines below belong to `following`."""
    lines = [position for position in logical_lines(text[start:following]) if position]
    return start + lines[0] if lines else following


def value_span(text: str, statement: Statement) -> tuple[int, int]:
    """Start and end offset of an assigned value, without a trailing comment."""
    equals = next(
        token.start()
        for token in re.finditer(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|=', text[statement.start : statement.end])
        if token[0] == "="
    )
    start, end, depth = statement.start + equals + 1, statement.end, 0
    for token in TOML_TOKEN.finditer(text, start, statement.end):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth == 0 and token[0].startswith("#"):
            end = token.start()
            break
    inner = text[start:end]
    return start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())


def without_statements(text: str, removed: list[Statement]) -> str:
    # From the end, so that the places of earlier ones stay right.
    for each in reversed(removed):
        text = replace_span(text, each.start, each.end)
    return text


def edit_env(text: str, edit: Edit) -> Iterator[str]:
    """Replace a value, remove a line, or add one at the end, spelled like the last one."""
    found = [pair for _, pair in assignments(text)]
    ours = [pair for pair in found if canonical_name(pair["key"].removeprefix(PREFIX)) == edit.name]
    if edit.removes:
        # From the end, so that the places of earlier ones stay right.
        for pair in reversed(ours):
            text = replace_span(text, *pair.span())
        yield text
        return
    value = quoted(edit.value)
    if edit.is_there:
        for pair in ours:
            yield replace_span(text, *pair.span("value"), value)
        return
    key = found[-1]["key"] if found else PREFIX
    name = (PREFIX if key.startswith(PREFIX) else "") + (edit.name if key.islower() else edit.name.upper())
    export = "export " if found and re.match(r"[ \t]*export[ \t]", found[-1][0]) else ""
    yield insert_line(text, len(text), f"{export}{name}={value}")


def quoted(value: str) -> str:
    # As most people write them.
    return f'"{value}"' if re.fullmatch(r"[\w,. /~+-]*", value) else shlex.quote(value)
