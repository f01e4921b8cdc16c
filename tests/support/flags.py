"""Command lines for tests: common flags first, what a test says otherwise after them."""

from __future__ import annotations

from collections.abc import Iterable


def last_wins(arguments: Iterable[str]) -> list[str]:
    """Return arguments without the flags that later ones give another value; the command line refuses both."""
    arguments = list(arguments)
    names = [argument.partition("=")[0] for argument in arguments]
    return [
        argument
        for index, argument in enumerate(arguments)
        if not argument.startswith("--")
        or names[index] == "--validation_prompt"
        or names[index] not in names[index + 1 :]
    ]
