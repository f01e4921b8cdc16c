"""What a value of DeepSpeed's JSON must be; numbers may be written as 5e8, as its own samples do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A sort of value: its name for people, and a function that reads it, or raises ValueError."""

    name: str
    read: Callable[[Any], Any]


def read_flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError
    return value


def read_number(value: Any) -> float:
    """Return a number that is no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return value


def read_whole(value: Any) -> int:
    """Return a whole number, whatever it is written as."""
    number = read_number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def read_text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ValueError
    return value


def read_texts(value: Any) -> list[str]:
    """Return a list of texts; one text is a list of one."""
    if not isinstance(value, str | list):
        raise ValueError
    return [read_text(item) for item in ([value] if isinstance(value, str) else list(value))]


FLAG = Kind("true or false", read_flag)
TEXT = Kind("text", read_text)
TEXTS = Kind("a list of texts", read_texts)


def whole(least: int = 0) -> Kind:
    """Return the kind of whole numbers from `least` on."""
    return Kind(f"a whole number of at least {least}", lambda value: within(read_whole(value), least))


def number(least: float = 0, most: float = math.inf) -> Kind:
    """Return the kind of numbers between two bounds."""
    upper = "" if most == math.inf else f" and at most {most:g}"
    return Kind(f"a number of at least {least:g}{upper}", lambda value: within(read_number(value), least, most))


def read_even(value: Any) -> int:
    """Return an even number."""
    number = within(read_whole(value), 2)
    if number % 2:
        raise ValueError
    return number


EVEN = Kind("an even number of at least 2", read_even)


def words(*known: str) -> Kind:
    """Return the kind of one of some words."""

    def read(value: Any) -> str:
        word = read_text(value).lower()
        if word not in known:
            raise ValueError
        return word

    return Kind(f"one of {', '.join(known)}", read)


def within(value: Any, least: float, most: float = math.inf) -> Any:
    """Return a number between two bounds. Raises ValueError for others."""
    if not least <= value <= most:
        raise ValueError
    return value
