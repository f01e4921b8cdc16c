"""Command-line arguments as names and values, also those that a variable of the original's config.env holds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from simpletuner.settings.files.raw_values import RawValue

EXTRA_ARGS = ("trainer_extra_args", "debug_extra_args")
"""Variables of the original that hold arguments of its trainer."""


def parse_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names, with their dashes, and values; a flag without one is true, such as the original's --push_to_hub."""
    waiting = ""  # the flag whose value may come next
    for argument in arguments:
        is_flag = re.match(r"-[^\d.]", argument) is not None  # -1 is a value
        if waiting:
            yield waiting, "true" if is_flag else argument
            if not is_flag:
                waiting = ""
                continue
        name, equals, value = argument.partition("=")
        waiting = name if is_flag and not equals else ""
        if not waiting:
            yield name, value
    if waiting:
        yield waiting, "true"


def split_arguments(given: RawValue) -> list[RawValue]:
    """Return the arguments that a variable holds, each as a value. Raises ValueError for a quote that is not closed."""
    try:
        flags = list(parse_arguments(shlex.split(str(given.value))))
        shown = dict(parse_arguments(shlex.split(str(given.as_written))))
    except ValueError:
        raise ValueError("a quote in it is not closed") from None
    place = given.place if given.place.endswith(given.name) else f"{given.place} {given.name}"
    # A flag that is not in the text as it was written comes from the environment: messages show the variable's name.
    return [
        RawValue(name.lstrip("-"), value, place, written=given.written and shown.get(name, given.written))
        for name, value in flags
    ]
