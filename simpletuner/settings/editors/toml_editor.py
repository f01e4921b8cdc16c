"""TOML: statements before all tables are lines; a table goes from its header to its last line that says something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from simpletuner.settings.editors.edit import Edit, insert_line, replace_span
from simpletuner.settings.files.formats import TOML_NAME, TOML_TOKEN, toml_name
from simpletuner.settings.resolving.loading import canonical_name

SAYS_NOTHING = re.compile(r"[ \t\r]*(#[^\n]*)?(\n|$)")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
        yield insert_line(text, place, f"{edit.name} = {value}")


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
    """Return where a statement's last line ends: comments and empty lines below belong to what follows."""
    lines = [position for position in logical_lines(text[start:following]) if position]
    return start + lines[0] if lines else following


def value_span(text: str, statement: Statement) -> tuple[int, int]:
    """Return where the value of an assignment starts and ends, without the comment after it."""
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


def toml_text(value: Any) -> str:
    """Write a value on one line; JSON's strings are TOML's, but for one character that TOML wants escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, dict):
        pairs = [
            f"{key if BARE_KEY.fullmatch(key) else toml_text(key)} = {toml_text(item)}" for key, item in value.items()
        ]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    return json.dumps(value)
