"""YAML editor: PyYAML's nodes have positions; lines are removed whole, with the comment after a value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.editors.text_editors import Edit, insert_line, line_end, line_start, newline_of, replace_span


def edit_yaml(text: str, edit: Edit) -> Iterator[str]:
    """Replace or remove a value, or add a line at the end or before all others, or a pair within braces."""
    node = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        for value in yaml_texts(edit.value):
            yield insert_line(text, len(text), f"{edit.name}: {value}")
        return
    found = [(key, value) for key, value in node.value if canonical_name(str(key.value)) == edit.name]
    if edit.removes:
        for key, value in found:
            yield from without_pair(text, key, value, bool(node.flow_style))
    elif edit.is_there:
        for key, value in found:
            yield from with_value(text, key, value, edit.value)
    else:
        yield from with_pair(text, node, edit)


def with_value(text: str, key: yaml.Node, value: yaml.Node, new: object) -> Iterator[str]:
    start, end = value.start_mark.index, content_end(text, value)
    is_beside = value.start_mark.line == key.start_mark.line
    for quoted in yaml_texts(new):
        if start < end and is_beside:
            yield replace_span(text, start, end, quoted)
        # An empty value is where the colon ends; a block below the key gives way to one on its line.
        colon = text.index(":", key.end_mark.index) + 1
        yield replace_span(text, colon, max(colon, end), f" {quoted}")


def with_pair(text: str, node: yaml.MappingNode, edit: Edit) -> Iterator[str]:
    for value in yaml_texts(edit.value):
        pair = f"{edit.name}: {value}"
        if node.flow_style:
            end = node.end_mark.index - 1
            # The second text is for braces that hold nothing, or that end in a comma.
            yield replace_span(text, end, end, f", {pair}")
            yield replace_span(text, end, end, pair)
        else:
            first = node.start_mark
            yield insert_line(text, len(text), " " * first.column + pair)
            yield replace_span(text, first.index, first.index, pair + newline_of(text) + " " * first.column)


def without_pair(text: str, key: yaml.Node, value: yaml.Node, is_flow: bool) -> Iterator[str]:
    start, end = key.start_mark.index, max(content_end(text, value), key.end_mark.index)
    if is_flow:
        after = re.compile(r"\s*,\s*").match(text, end)
        before = re.search(r",\s*$", text[:start])
        if after:
            yield replace_span(text, start, after.end())
        yield replace_span(text, before.start() if before else start, end)
    else:
        yield replace_span(text, line_start(text, start), line_end(text, end))


def content_end(text: str, node: yaml.Node) -> int:
    """End offset of a value. PyYAML's end mark of a block lies after the comments that follow it."""
    if isinstance(node, yaml.ScalarNode):
        if node.style not in ("|", ">"):
            return node.end_mark.index
        # Empty lines at the end belong to what follows; with `|+` the check of the candidate tells.
        return node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip())
    if getattr(node, "flow_style", False) or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return content_end(text, last[1] if isinstance(last, tuple) else last)


def yaml_texts(value: object) -> Iterator[str]:
    """Yield ways to write a value as JSON, which YAML reads but for two things.

    A number such as 1e-05 is text to YAML 1.1, and it wants some characters escaped that JSON leaves.
    """
    for only_ascii in (False, True):
        text = json.dumps(value, ensure_ascii=only_ascii)
        if isinstance(value, float):
            yield re.sub(r"^(-?\d+)e", r"\1.0e", text)
        else:
            yield text
            yield re.sub(r'("(?:\\.|[^"\\])*")|(?<=[\[ ])(-?\d+)e', lambda found: found[1] or f"{found[2]}.0e", text)
