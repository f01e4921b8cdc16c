"""How one setting may be written into the text of a config file: for each format, texts to try, the likeliest first.

Only the value is replaced, or one pair added in the style of the file; whether a text still says all else is for
`editing.py` to see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simpletuner.settings.formats import ASSIGNMENT, BLANK, JSON_TOKEN, is_toml
from simpletuner.settings.loading import canonical_name
from simpletuner.settings.sources import PREFIX

TOML_TEXT = r'"(?:\\.|[^"\\\n])*"(?!")|\'[^\'\n]*\'(?!\')'


@dataclass(frozen=True)
class Edit:
    """What is to be set, and where it stands already: the index among the file's entries, None if nowhere."""

    name: str
    value: str
    index: int | None

    @property
    def quoted(self) -> str:
        """Return the value as JSON, TOML, YAML and shells all read it."""
        return json.dumps(self.value, ensure_ascii=False)


def newline_of(text: str) -> str:
    """Return how the lines of a text end."""
    return "\r\n" if "\r\n" in text else "\n"


def replaced(text: str, start: int, end: int, new: str) -> str:
    """Return a text with a part of it replaced."""
    return text[:start] + new + text[end:]


def with_line(text: str, position: int, line: str) -> str:
    """Return a text with one more line at the start of a line, or at the end."""
    newline = newline_of(text)
    before, after = text[:position], text[position:]
    return before + newline * bool(before and not before.endswith("\n")) + line + newline + after


def json_proposals(text: str, edit: Edit) -> Iterator[str]:
    """Replace the value, or add a pair as the last, written like the ones before it."""
    spans = list(json_spans(text))
    if edit.index is not None:
        _, _, start, end = spans[edit.index]
        yield replaced(text, start, end, edit.quoted)
    elif spans:
        key_start, key_end, start, end = spans[-1]
        ahead = (
            text[spans[-2][3] : key_start] if len(spans) > 1 else "," + (text[text.index("{") + 1 : key_start] or " ")
        )
        dashes = "--" * text[key_start:].startswith('"--')
        yield replaced(text, end, end, f'{ahead}"{dashes}{edit.name}"{text[key_end:start]}{edit.quoted}')
    else:
        start, end = text.index("{"), text.rindex("}") + 1
        yield replaced(text, start, end, f'{{\n  "{edit.name}": {edit.quoted}\n}}'.replace("\n", newline_of(text)))


def json_spans(text: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield the outermost object's pairs: where the key starts and ends, and where the value does."""
    depth = 0
    for token in JSON_TOKEN.finditer(text):
        if token["colon"] and depth == 1:
            start = re.compile(r"\s*").match(text, token.end()).end()  # pyright: ignore[reportOptionalMemberAccess]
            yield token.start(), token.end("text"), start, json.JSONDecoder().raw_decode(text, start)[1]
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)


def toml_proposals(text: str, edit: Edit) -> Iterator[str]:
    """Replace text in quotes, or add a line below the last setting that stands before all tables."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)  # splitlines() also splits at characters that TOML does not
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    if edit.index is not None:
        for line, start in zip(lines, starts, strict=False):
            found = re.match(rf"[ \t]*(?P<key>[^=#\n]+?)[ \t]*=[ \t]*(?P<value>{TOML_TEXT})", line)
            if found and canonical_name(found["key"].strip("\"'")) == edit.name:
                yield replaced(text, start + found.start("value"), start + found.end("value"), edit.quoted)
        return
    headers = (n for n, line in enumerate(lines) if re.match(r"[ \t]*\[", line) and is_toml("".join(lines[:n])))
    table = next(headers, len(lines))
    last = next((n for n in reversed(range(table)) if not re.match(r"[ \t\r]*(#|\n|$)", lines[n])), None)
    for place in [table] if last is None else [last + 1, table]:
        yield with_line(text, starts[place], f"{edit.name} = {edit.quoted}")


def yaml_proposals(text: str, edit: Edit) -> Iterator[str]:
    """Replace a plain or quoted value; or add a line at the end, else before all others, or a pair within braces."""
    import yaml

    node = yaml.compose(text, yaml.SafeLoader)
    pair = f"{edit.name}: {edit.quoted}"
    if not isinstance(node, yaml.MappingNode):
        yield with_line(text, len(text), pair)
    elif edit.index is not None:
        for key, value in node.value:
            is_text = isinstance(value, yaml.ScalarNode) and value.style not in ("|", ">")
            if is_text and canonical_name(str(key.value)) == edit.name:
                yield replaced(text, value.start_mark.index, value.end_mark.index, edit.quoted)
    elif node.flow_style:
        end = node.end_mark.index - 1
        yield replaced(text, end, end, f", {pair}")
        yield replaced(text, end, end, pair)
    else:
        first = node.start_mark
        yield with_line(text, len(text), " " * first.column + pair)
        yield replaced(text, first.index, first.index, pair + newline_of(text) + " " * first.column)


def env_proposals(text: str, edit: Edit) -> Iterator[str]:
    """Replace a value, or add a line at the end, spelled like the last one."""
    found = list(pairs_in(text))
    if edit.index is not None:
        start, end = found[edit.index].span("value")
        yield replaced(text, start, end, edit.quoted)
        return
    key = found[-1]["key"] if found else PREFIX
    name = (PREFIX if key.startswith(PREFIX) else "") + (edit.name if key.islower() else edit.name.upper())
    export = "export " if found and re.match(r"[ \t]*export[ \t]", found[-1][0]) else ""
    yield with_line(text, len(text), f"{export}{name}={edit.quoted}")


def pairs_in(text: str) -> Iterator[re.Match[str]]:
    """Yield the assignments of a text that was read without a mistake."""
    position = 0
    while position < len(text):
        match = BLANK.match(text, position) or ASSIGNMENT.match(text, position)
        assert match is not None
        if match.re is ASSIGNMENT:
            yield match
        position = match.end()


EDITORS: dict[str, Callable[[str, Edit], Iterator[str]]] = {
    ".json": json_proposals,
    ".toml": toml_proposals,
    ".yaml": yaml_proposals,
    ".yml": yaml_proposals,
    ".env": env_proposals,
}
