"""YAML as names, values and lines, read by PyYAML as in accelerate; numbers are YAML 1.2's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml
from yaml.reader import Reader

from simpletuner.settings.files.config_files import MAX_DEPTH, TOO_DEEP, FileEntry, NotParsed, NotSettings

# Aliases of aliases make billions of values out of a few lines ("billion laughs").
MAX_NODES = 300_000
"""Names and values of a file with its aliases written out."""
MERGE = "tag:yaml.org,2002:merge"
# Numbers that YAML 1.1 and 1.2 read alike. PyYAML, at 1.1, reads `0123` as 83 and `1:30` as 90.
NUMBER = re.compile(r"[-+]?(0|[1-9]\d*|0x[0-9a-fA-F]+|(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\.(inf|Inf|INF)|\.(nan|NaN|NAN))")

# libyaml is eight times as fast: 60,000 settings in 0.4 s.
PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(PARSER):  # pyright: ignore[reportGeneralTypeIssues]
    """Keeps what only YAML 1.1 takes for a number as text, so that `revision: 0123456` stays as it is."""

    def construct_number(self, node: yaml.ScalarNode) -> object:
        if not NUMBER.fullmatch(str(node.value)):
            return node.value
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


for kind in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)


def read_yaml(text: str) -> Iterator[FileEntry]:
    """Read a YAML mapping. Raises NotParsed or NotSettings."""
    if control := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, control.start()) + 1
        raise NotParsed(line, f"the control character {control[0]!r} is not allowed: escape it in double quotes")
    try:
        check_nesting(text)
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise NotSettings("a list" if isinstance(node, yaml.SequenceNode) else "one value")
        check_size(node)
        for key, value in outermost_pairs(loader, node):
            inner = value.value if isinstance(value, yaml.MappingNode) else []
            inner_lines = {str(name.value): line_of(name) for name, _ in inner}
            yield FileEntry(name_of(key), loader.construct_object(value, deep=True), line_of(key), inner_lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or str(error)  # libyaml of PyYAML 6.0.4 refuses 1,000 levels itself
        raise NotParsed(line, TOO_DEEP if "maximum nesting depth" in problem else problem) from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def check_nesting(text: str) -> None:
    """Raise NotParsed for deep nesting: if it is very deep, composing it overflows the stack of libyaml."""
    depth = 0
    for event in yaml.parse(text, Loader=PARSER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise NotParsed(line_of(event), TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class Extent(NamedTuple):
    """Nodes and levels of a value with its aliases written out."""

    nodes: int
    depth: int


def check_size(node: yaml.MappingNode) -> None:
    """Raise NotParsed where aliases multiply, and for a duplicate key below the first level."""
    # By id, which no other node can take over: all of them live as long as the tree.
    known: dict[int, Extent] = {id(node): Extent(1, 0)}
    total = 0  # thousands of values may each merge the same thousands of names
    for key, value in node.value:
        extent = measure(value, known)
        total += extent.nodes
        if total > MAX_NODES:
            message = f"with its aliases written out it has more than {MAX_NODES:,} names and values"
            raise NotParsed(line_of(key), message)
        if extent.depth > MAX_DEPTH:
            raise NotParsed(line_of(key), TOO_DEEP)


def measure(node: yaml.Node, known: dict[int, Extent]) -> Extent:
    """Extent of a value. `known` holds the extents of all earlier nodes, so aliases are not followed."""
    if id(node) not in known:
        known[id(node)] = Extent(1, 0)  # for an alias within the node itself, which PyYAML refuses later
        inner = [measure(child, known) for child in children_of(node)]
        nodes, depth = sum(extent.nodes for extent in inner), max((extent.depth for extent in inner), default=0)
        known[id(node)] = Extent(nodes + 1, depth + 1)
    return known[id(node)]


def children_of(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        refuse_duplicates(node)
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def refuse_duplicates(node: yaml.MappingNode) -> None:
    """Raise NotParsed for a duplicate key: PyYAML silently keeps the last one."""
    names: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
            if key.value in names:
                raise NotParsed(line_of(key), f"duplicate key `{key.value}`")
            names.add(key.value)


def outermost_pairs(loader: Loader, node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Resolve `<<: *anchor`: the file's own names override merged ones, and later merges earlier ones."""
    own = [pair for pair in node.value if pair[0].tag != MERGE]
    loader.flatten_mapping(node)
    names = {name_of(key) for key, _ in own}
    merged = {name_of(key): (key, value) for key, value in node.value[: len(node.value) - len(own)]}
    return [*(pair for name, pair in merged.items() if name not in names), *own]


def name_of(key: yaml.Node) -> str:
    """The text of a key. Raises NotParsed for a list or a table."""
    if not isinstance(key, yaml.ScalarNode):
        raise NotParsed(line_of(key), "a name must be text, not a list or a table")
    return str(key.value)


def line_of(node: yaml.Node | yaml.Event) -> int:
    mark = node.start_mark
    return mark.line + 1 if mark else 0
