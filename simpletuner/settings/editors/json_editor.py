"""JSON: the text between two pairs is what the file already has between others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from simpletuner.settings.editors.edit import Edit, indent_of, newline_of, replace_span
from simpletuner.settings.files.formats import JSON_TOKEN
from simpletuner.settings.resolving.loading import canonical_name

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


def json_text(value: Any, text: str, position: int) -> str:
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
