"""Read a config file as names, values and lines: JSON, TOML, YAML, or shell-like pairs.

Every format keeps duplicate names (TOML refuses them itself, with the line), so that a mistake can name both lines.
tomlkit carries no lines; PyYAML is what accelerate reads its own files with, so both take them for the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.system.files import read_file


@dataclass(frozen=True)
class FileEntry:
    """One name and value as written, and their line (0: a place without lines)."""

    key: str
    value: Any
    line: int = 0
    inner_lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of the names in a value that is itself names and values; of JSON and YAML."""


class NotSettings(ValueError):
    """A text that parses, but is no mapping."""


class NotParsed(ValueError):
    """A text that does not parse: the line, and why."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason = line, reason


def read_entries(path: Path) -> list[FileEntry]:
    """Read a file of settings. Raises SettingsError where it cannot be read or does not parse."""
    read = FORMATS.get(path.suffix.lower())
    if read is None and path.is_file():
        raise SettingsError(f"{path}: settings are read from {', '.join(FORMATS)} files", "give the file such a name")
    try:
        text = read_file(path).decode("utf-8-sig")  # bytes: newlines inside values stay as they are
        return list(read(text)) if read else []
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"cannot read {path}:{line}: it is not UTF-8", "save the file as UTF-8") from None
    except NotSettings as error:
        hint = "`simpletuner config init` writes one to start from"
        raise SettingsError(f"{path} holds {error}, not names and values", hint) from None
    except NotParsed as error:
        raise SettingsError(f"{path}:{error.line} does not parse: {error.reason}", "correct that line") from None
    except ValueError as error:
        raise SettingsError(f"{path} does not parse: {error}", "correct that value") from None


class Pairs(dict[str, Any]):
    """A JSON object that remembers all its pairs, those of one name included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


JSON_TOKEN = re.compile(r'(?P<text>"(?:\\.|[^"\\])*")(?P<colon>\s*:)?|[\[{]|[\]}]')


def json_entries(text: str) -> Iterator[FileEntry]:
    """Read a JSON object. The names of the outermost object, in order, are the strings before a colon at depth 1."""
    try:
        value = json.loads(text, object_pairs_hook=Pairs)
    except json.JSONDecodeError as error:
        raise NotParsed(error.lineno, f"{error.msg[0].lower()}{error.msg[1:]}, column {error.colno}") from None
    if not isinstance(value, Pairs):
        raise NotSettings("a list" if isinstance(value, list) else "one value")
    # json has no positions: a second pass over the tokens finds the line of each name at depth 1 and 2.
    lines: list[tuple[int, dict[str, int]]] = []
    depth = 0
    for token in JSON_TOKEN.finditer(text):
        if token["colon"] and depth in (1, 2):
            line = text.count("\n", 0, token.start()) + 1
            if depth == 1:
                lines.append((line, {}))
            else:
                lines[-1][1][json.loads(token["text"])] = line
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
    for (key, item), (line, inner_lines) in zip(value.pairs, lines, strict=True):
        yield FileEntry(key, item, line, inner_lines)


def toml_entries(text: str) -> Iterator[FileEntry]:
    """Read TOML. A line names a key if what stands above it is whole TOML, not the middle of a long string."""
    import tomllib

    lines = [line + "\n" for line in text.split("\n")]  # splitlines() also splits at characters that TOML does not
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise toml_error(str(error), len(lines)) from None
    for key, value in values.items():
        names = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
        numbers = (number for number, line in enumerate(lines) if names.match(line))
        yield FileEntry(key, value, next((number + 1 for number in numbers if is_toml("".join(lines[:number]))), 0))


def toml_error(message: str, last_line: int) -> NotParsed:
    """Split the message of TOML's reader into line and reason."""
    # tomllib's words for a duplicate key are about its own tables.
    message = message.replace("Cannot overwrite a value", "a name is set twice")
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    reason, line, column = found.groups() if found else (message, last_line, "")
    return NotParsed(int(line), reason[0].lower() + reason[1:] + (f", column {column}" if column else ""))


def is_toml(text: str) -> bool:
    import tomllib

    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def yaml_entries(text: str) -> Iterator[FileEntry]:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise NotSettings("a list" if isinstance(node, yaml.SequenceNode) else "one value")
        loader.flatten_mapping(node)  # `<<: *anchor`
        for key, value in node.value:
            inner = value.value if isinstance(value, yaml.MappingNode) else []
            inner_lines = {str(name.value): name.start_mark.line + 1 for name, _ in inner}
            yield FileEntry(
                str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1, inner_lines
            )
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise NotParsed(line, error.problem or str(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


ASSIGNMENT = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(?P<key>[A-Za-z_]\w*)=
    (?P<value>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^ \t\r\n'"\\;&|<>()])*)
    (?:(?:[ \t]*;[ \t\r]*|[ \t][ \t\r]*)(?:(?<=[ \t;])\#[^\n]*)?|\r*)(?:\n|$)""",
    re.VERBOSE | re.DOTALL,
)
BLANK = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|$)")
QUOTED = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|(?P<bare>[^'"\\]+)""", re.DOTALL
)


def env_entries(text: str) -> Iterator[FileEntry]:
    """Read `NAME=value` lines as a shell would, quotes, comments and `export` included; nothing is expanded."""
    position = 0
    while position < len(text):
        line = text.count("\n", 0, position) + 1
        if blank := BLANK.match(text, position):
            position = blank.end()
            continue
        found = ASSIGNMENT.match(text, position)
        if found is None:
            raise NotParsed(line, "a line is NAME=value; quote a value with blanks or shell characters in it")
        yield FileEntry(found["key"], "".join(unquote(part, line) for part in QUOTED.finditer(found["value"])), line)
        position = found.end()


def unquote(part: re.Match[str], line: int) -> str:
    """Remove the quotes of one part of a word, as a shell would."""
    if part["single"] is not None or part["escaped"] is not None:
        return part["single"] or (part["escaped"] or "").strip("\n")  # a backslash before a newline joins two lines
    text = part["bare"] or part["double"] or ""
    if re.search(r"(?<!\\)(?:\\\\)*[$`]", text) or (part["bare"] and re.match("~|.*:~", text)):
        raise NotParsed(line, "`$`, `~` and backticks are not expanded here: write the value itself")
    return re.sub(r'\\(\n|[$`"\\])', lambda found: found[1].strip("\n"), text) if part["double"] else text


FORMATS: dict[str, Callable[[str], Iterator[FileEntry]]] = {
    ".json": json_entries,
    ".toml": toml_entries,
    ".yaml": yaml_entries,
    ".yml": yaml_entries,
    ".env": env_entries,
}
