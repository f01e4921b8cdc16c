"""Read `NAME=value` lines as a shell: quotes, comments, `export`, `+=`, leading `~`, `$NAME`, `${NAME}`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.settings.files.config_files import FileEntry, NotParsed

ASSIGNMENT = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(?P<key>[A-Za-z_]\w*)(?P<append>\+?)=
    (?P<value>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^ \t\r\n'"\\;&|<>()])*)
    (?:(?:[ \t]*;[ \t\r]*|[ \t][ \t\r]*)(?:(?<=[ \t;])\#[^\n]*)?|\r*)(?:\n|$)""",
    re.VERBOSE | re.DOTALL,
)
BLANK = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|$)")
QUOTED = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<bare>(?:\\\n|[^'"\\])+)|\\(?P<escaped>.)""", re.DOTALL
)
NAME = "[A-Za-z_][A-Za-z0-9_]*"
TOKEN = re.compile(
    rf"""\\(?P<escaped>[$`"\\])|\$(?:\{{(?P<braced>{NAME})\}}|(?P<name>{NAME}))|(?P<other>[$`])|\\|[^\\$`]+"""
)
PAIRS_ONLY = "a line is NAME=value; quote a value with blanks or shell characters in it"
COMMANDS = "commands in `$(...)` or backticks are not run here: write the value itself"
LINES_OF_SHELLS = re.compile(
    r"\s*(source|\.|eval|cd|if|then|else|fi|unset|set|echo|mkdir|conda|module|layout|use|dotenv|PATH_add)(\s|$)"
)
NO_PROGRAM = (
    "this line is a command, and only assignments are read: remove it, and write what it would set as NAME=value"
)
NAMES_ONLY = "only $NAME and ${NAME} are replaced here: write the value itself, or put `$` in single quotes"
HOME_ONLY = "only `~` or `~/` at the start of a value is replaced here: write the folder itself"


@dataclass(frozen=True)
class Reference:
    """A variable in a word, to be replaced by its value."""

    name: str


def env_entries(text: str, environment: Mapping[str, str] = os.environ) -> Iterator[FileEntry]:
    """Yield the assignments of a text; variables are those of earlier lines, else of `environment`.

    A value that extends an earlier one of the same name takes its place. Raises NotParsed, also for a
    variable that is set nowhere.
    """
    entries: list[FileEntry] = []
    values = dict(environment)
    # A value from the environment may be a secret: messages show its name.
    shown = {name: f"${name}" for name in environment}
    for line, found in assignments(text):
        key = found["key"]
        parts = list(parse_word(found["value"], line))
        if found["append"] and key in values:
            parts.insert(0, Reference(key))
        value, written = (fill(parts, names, line) for names in (values, shown))
        if Reference(key) in parts:
            entries = [entry for entry in entries if entry.key != key]
        entries.append(FileEntry(key, value, line, written=written if written != value else None))
        values[key], shown[key] = value, written
    yield from entries


def assignments(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield the assignments with their lines. Raises NotParsed for a line that is none."""
    position, line = 0, 1
    while position < len(text):
        found = BLANK.match(text, position) or ASSIGNMENT.match(text, position)
        if found is None:
            raise NotParsed(line, reason_for(text[position:].partition("\n")[0]))
        if found.re is ASSIGNMENT:
            yield line, found
        line += text.count("\n", position, found.end())
        position = found.end()


def reason_for(line: str) -> str:
    """Error for a line that is no assignment."""
    if LINES_OF_SHELLS.match(line):
        return NO_PROGRAM
    if "$(" in line or "`" in line:
        return COMMANDS
    return NAMES_ONLY if "${" in line else PAIRS_ONLY


def parse_word(word: str, line: int) -> Iterator[str | Reference]:
    """Yield the parts of a word without its quotes. Raises NotParsed for what only a shell could replace."""
    if re.match(r"~(/|$)", word):
        yield str(Path.home())
        word = word[1:]
    for part in QUOTED.finditer(word):
        # A backslash before a newline joins two lines, except in single quotes.
        if part["single"] is not None or part["escaped"]:
            yield part["single"] or part["escaped"] or ""
        elif part["double"] is not None:
            joined = re.sub(r"\\(?:\n|(.))", lambda found: found[0] if found[1] else "", part["double"])
            yield from references(joined, line)
        else:
            joined = part["bare"].replace("\\\n", "")
            if re.match("~|.*:~", joined):
                raise NotParsed(line, HOME_ONLY)
            yield from references(joined, line)


def references(text: str, line: int) -> Iterator[str | Reference]:
    """Split text that is not in single quotes at its variables. Raises NotParsed."""
    for token in TOKEN.finditer(text):
        if token["other"]:
            is_command = token["other"] == "`" or text.startswith("(", token.end())
            raise NotParsed(line, COMMANDS if is_command else NAMES_ONLY)
        name = token["braced"] or token["name"]
        yield Reference(name) if name else token["escaped"] or token[0]


def fill(parts: list[str | Reference], values: Mapping[str, str], line: int) -> str:
    """Join the parts of a word. Raises NotParsed for a variable without a value."""
    unset = next((part for part in parts if isinstance(part, Reference) and part.name not in values), None)
    if unset is not None:
        raise NotParsed(line, f"${unset.name} is set neither in an earlier line nor in the environment")
    return "".join(values[part.name] if isinstance(part, Reference) else part for part in parts)
