"""Command lines that give the same settings again, quoted for bash."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.settings.values.spelling import as_text


@dataclass(frozen=True)
class Exported:
    """A text to save, and the command that replays it from a file of this name."""

    text: str
    name: str
    command: list[str]

    def replay(self, path: str = "") -> str:
        """The command for a shell, with the path where the text was saved."""
        names = {
            prefix + self.name: prefix + (path or self.name)
            for prefix in ("", "--config=", "--deepspeed_config=", "--filename=")
        }
        return format_command([names.get(word, word) for word in self.command])


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """A list becomes one flag per item, an empty one JSON: no flag at all would leave its default."""
    return [
        f"--{name}={as_text(item)}"
        for name, value in values.items()
        for item in ((value or [[]]) if isinstance(value, list) else [value])
    ]


def format_command(words: list[str]) -> str:
    """Format a command for bash; several flags get a line each."""
    first = next((index + 1 for index in reversed(range(len(words))) if not words[index].startswith("--")), 0)
    parts = (word.partition("=") for word in words[first:])
    flags = [name + equals + quoted(value) for name, equals, value in parts]
    return (" \\\n  " if len(flags) > 1 else " ").join([" ".join(map(quoted, words[:first])), *flags]) + "\n"


def quoted(word: str) -> str:
    """Quote a word on one line for bash: what is not printable is written as escaped bytes, in any locale."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        character if character.isprintable() and character not in "\\'" else escaped(character) for character in word
    )
    return f"$'{''.join(shown)}'"


def escaped(character: str) -> str:
    """Escape one character for `$'...'`."""
    if character in "\\'":
        return "\\" + character
    return "\\n" if character == "\n" else "".join(f"\\x{byte:02x}" for byte in character.encode())
