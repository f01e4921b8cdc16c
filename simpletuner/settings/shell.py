"""Write words for a shell."""

from __future__ import annotations

import shlex


def in_lines(words: list[str]) -> str:
    """Return a command for bash; if there are several flags, each on a line of its own."""
    first = next((index + 1 for index in reversed(range(len(words))) if not words[index].startswith("--")), 0)
    parts = (word.partition("=") for word in words[first:])
    flags = [name + equals + quoted(value) for name, equals, value in parts]
    return (" \\\n  " if len(flags) > 1 else " ").join([" ".join(map(quoted, words[:first])), *flags]) + "\n"


def quoted(word: str) -> str:
    """Return a word on one line for bash: what cannot be seen is written as escaped bytes, in any locale."""
    if word.isprintable():
        return shlex.quote(word)
    seen = (
        character if character.isprintable() and character not in "\\'" else escaped(character) for character in word
    )
    return f"$'{''.join(seen)}'"


def escaped(character: str) -> str:
    """Return one character as `$'...'` writes it."""
    if character in "\\'":
        return "\\" + character
    return "\\n" if character == "\n" else "".join(f"\\x{byte:02x}" for byte in character.encode())
