"""Read a config file as names, values and lines: JSON, TOML, YAML, or shell-like pairs.

Every format keeps duplicate names (TOML refuses them itself, with the line), so that a mistake can name both
lines. tomlkit carries no lines; PyYAML is what accelerate reads its own files with, so both take them for the
same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.files.config_files import (
    FileEntry,
    NotParsed,
    NotSettings,
    check_depth,
    explain_parsing,
    json_mistake,
)
from simpletuner.settings.files.env_format import env_entries
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.files.paths import descriptor_of
from simpletuner.system.files.regular_files import read_file

Format = Callable[[str], Iterator[FileEntry]]
YAML_HEAD = re.compile(r"""---|[\w"'-]+[ \t]*:(\s|$)|%YAML""")
ENV_HEAD = re.compile(r"export[ \t]|[A-Za-z_]\w*=")


# 60,000 settings take 1.5 MiB.
MAX_FILE_BYTES = 4 << 20


def read_text(path: Path) -> str:
    """Read a file that a user has written. Raises OSError, and NotParsed for what is not UTF-8."""
    content = read_file(path, MAX_FILE_BYTES)  # bytes: newlines inside values stay as they are
    try:
        # Some editors begin a file with a byte order mark, which is no part of the first name.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NotParsed(line, "it is not UTF-8: save the file as UTF-8") from None


def read_entries(path: Path, environment: Mapping[str, str] = os.environ) -> list[FileEntry]:
    """Read a file of settings; `environment` has the variables that a .env file may name.

    Raises SettingsError where it cannot be read or does not parse.
    """
    with explain_parsing(path, "check the path", "correct that value"):
        return parse_entries(path, read_text(path), environment)


def read_list(path: Path) -> list[object] | None:
    """Return the list in a JSON file; None where it cannot be read or holds none."""
    with suppress(OSError, NotParsed, ValueError, RecursionError):
        listed = json.loads(read_text(path))
        check_depth(listed)
        return listed if isinstance(listed, list) else None
    return None


# Six times as many as there are settings: looking for the known name nearest to one takes a millisecond.
MAX_NAMES = 2_000


def parse_entries(path: Path, text: str, environment: Mapping[str, str] = os.environ) -> list[FileEntry]:
    """Parse the text of the file at `path`, which may not be there yet, or not any more.

    Raises SettingsError where it does not parse.
    """
    with explain_parsing(path, "check the path", "correct that value"):
        entries = list(format_of(path, environment)(text))
        if len(entries) > MAX_NAMES:
            raise NotParsed(entries[MAX_NAMES].line, f"a file of settings has at most {MAX_NAMES:,} names")
        for entry in entries:
            check_depth(entry.value)
        return entries


def format_of(path: Path, environment: Mapping[str, str]) -> Format:
    """Return the reader of a file. Raises SettingsError."""
    suffix = suffix_of(path)
    if suffix not in FORMATS:
        raise SettingsError(f"{path}: settings are read from {', '.join(FORMATS)} files", "give the file such a name")
    return partial(env_entries, environment=environment) if suffix == ".env" else FORMATS[suffix]


def suffix_of(path: Path) -> str:
    """File's suffix; `.env` is a whole name, too. For a pipe, the one that suits its text. Raises OSError."""
    if descriptor_of(path) is None and str(path) != os.devnull:
        suffix = path.suffix.lower() or path.name.lower()
        return ".env" if suffix == ".envrc" else suffix  # direnv's
    text = read_text(path)
    head = re.sub(r"\A(\s|#.*\n)+", "", text)
    if head.startswith("{"):
        return ".json"
    if YAML_HEAD.match(head):
        return ".yaml"
    # `SEED=1` is TOML, too; `MODEL_FAMILY=sdxl` is not.
    return ".env" if ENV_HEAD.match(head) and not is_toml(text) else ".toml"


class Pairs(dict[str, object]):
    """A JSON object that remembers all its pairs, duplicate names included."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


JSON_TOKEN = re.compile(r'(?P<text>"(?:\\.|[^"\\])*")(?P<colon>\s*:)?|[\[{]|[\]}]|\n')


def json_entries(text: str) -> Iterator[FileEntry]:
    """Read a JSON object. The outermost names, in order, are the strings before a colon at depth 1."""
    try:
        value = json.loads(text, object_pairs_hook=Pairs)
    except json.JSONDecodeError as error:
        raise json_mistake(error) from None
    if not isinstance(value, Pairs):
        raise NotSettings("a list" if isinstance(value, list) else "one value")
    # strict: both passes over the text must find the same names, or lines would be wrong from there on.
    for (key, item), (line, inner_lines) in zip(value.pairs, json_lines(text), strict=True):
        yield FileEntry(key, item, line, inner_lines)


def json_lines(text: str) -> list[tuple[int, dict[str, int]]]:
    """Line numbers of names, or of a list's objects, at depth 1, and of the names at depth 2.

    The text must parse. json has no positions, so this is a second pass over the tokens. Raises NotParsed for
    a duplicate key at any depth but the first: json would silently keep the last one.
    """
    lines: list[tuple[int, dict[str, int]]] = []
    open_names: list[dict[str, int]] = []
    is_list = text.lstrip().startswith("[")
    line = 1
    for token in JSON_TOKEN.finditer(text):
        if token[0] in ("{", "["):
            if len(open_names) == 1 and is_list:
                lines.append((line, {}))
            open_names.append({})
        elif token[0] in ("}", "]"):
            open_names.pop()
        elif token["colon"] and len(open_names) == 1:
            lines.append((line, {}))
        elif token["colon"]:
            name = json.loads(token["text"])
            names = lines[-1][1] if len(open_names) == 2 else open_names[-1]
            if name in names:
                raise NotParsed(line, f"duplicate key `{name}`")
            names[name] = line
        line += token[0].count("\n")
    return lines


def toml_entries(text: str) -> Iterator[FileEntry]:
    import tomllib

    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise toml_error(str(error), text.count("\n") + 1) from None
    lines = toml_lines(text)
    for key, value in values.items():
        yield FileEntry(key, value, lines.get(key, 0))


BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_document(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """Yield the lines of a table, and those of the tables in it, each below a heading of its own."""
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping) or is_tables(value)}
    yield from (toml_line(name, value) for name, value in values.items() if name not in tables)
    for name, value in tables.items():
        heading = f"{table}{name}"
        for each in value if is_tables(value) else [value]:
            yield from ("", f"[[{heading}]]" if is_tables(value) else f"[{heading}]")
            yield from toml_document(each, f"{heading}.")


def is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def toml_line(name: str, value: object) -> str:
    return f"{name} = {toml_text(toml_value(value))}"


def toml_value(value: object) -> object:
    """TOML has no null: `none` stands for it, JSON text for tables and lists that hold one."""
    holds_nothing = isinstance(value, dict | list) and "null" in json.dumps(value)
    return as_text(value) if value is None or holds_nothing else value


def toml_text(value: object) -> str:
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


# {3,5}: a long string may end in one or two quotes before the three that close it (TOML 1.0).
TOML_TOKEN = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*|[\[{]|[\]}]|\n""", re.DOTALL
)
TOML_NAME = re.compile(
    r"""[ \t]*(?P<table>\[*)[ \t]*(?:"(?P<double>(?:\\.|[^"\\\n])*)"|'(?P<single>[^'\n]*)'|(?P<bare>[\w-]+))"""
)


def toml_lines(text: str) -> dict[str, int]:
    """Return the line of each outermost name of a text that parses; tomllib has no positions.

    A line begins a statement unless it is within brackets or a long string.
    """
    lines: dict[str, int] = {}
    depth, in_table = 0, False
    starts = [(0, 1)]
    line = 1
    for token in TOML_TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        line += token[0].count("\n")
        if token[0] == "\n" and depth == 0:
            starts.append((token.end(), line))
    for position, number in starts:
        name = TOML_NAME.match(text, position)
        if name is None or (in_table and not name["table"]):
            continue
        in_table = bool(name["table"])
        # The first one counts: dotted keys of one table repeat its name.
        lines.setdefault(toml_name(name), number)
    return lines


def toml_name(found: re.Match[str]) -> str:
    import tomllib

    if found["double"] and "\\" in found["double"]:
        return next(iter(tomllib.loads(f'"{found["double"]}" = 0')))
    return found["double"] or found["single"] or found["bare"] or ""


def toml_error(message: str, last_line: int) -> NotParsed:
    # tomllib's words for a duplicate key are about its own tables.
    message = message.replace("Cannot overwrite a value", "a name is set twice")
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    reason, line, column = found.groups() if found else (message, last_line, "")
    is_path = reason.startswith(("Unescaped '\\'", "Invalid hex value"))
    hint = "write / for \\, or put the text in single quotes: '...'" if is_path else "correct that line"
    return NotParsed(int(line), reason[0].lower() + reason[1:] + (f", column {column}" if column else ""), hint)


def is_toml(text: str) -> bool:
    import tomllib

    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def yaml_entries(text: str) -> Iterator[FileEntry]:
    from simpletuner.settings.files.yaml_format import read_yaml  # PyYAML takes 15 ms to import

    return read_yaml(text)


FORMATS: dict[str, Format] = {
    ".json": json_entries,
    ".toml": toml_entries,
    ".yaml": yaml_entries,
    ".yml": yaml_entries,
    ".env": env_entries,
}
