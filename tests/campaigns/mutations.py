"""What can be wrong with a settings file: other names and values, and other bytes."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from settings_files import IMAGES, KINDS, MODEL, PICTURES, Case, as_plain_text, corpus, dump

DEEP: Any = 0
for _ in range(150):
    DEEP = [DEEP]
ODD_TEXTS = (
    *("", " ", "none", "null", "auto", "nan", "-inf", "true", "True", "0x10", "1_000", "1e5", "-0", "2020-01-01", "0"),
    *("~", "~nobody/x", "~/x", "../..", "/dev/zero", "x.json", PICTURES, "a=b", "[", "[1, 2]", '{"a": 1}', "--seed=1"),
    *("a\x1b[31mb", "a\x00b", "a\ud800", "\u202eabc", "a\nerror: b", "\x7f\x85", "\u0661", "x" * 5000, "Bär", "\ufeff"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e308, 5e-324, math.nan, math.inf, 10**30, -(10**30), 1 << 63),
    *([], {}, [[]], [None], [1, "a"], {"a": 1}, {"": None}, {"a": {"b": math.nan}}, DEEP, 10**400),
)


Container = dict[str, Any] | list[Any]


def containers(value: Any, levels: int = 6) -> Iterator[Container]:
    """Yield all tables and lists that hold something, but not the inner levels of what is nested deeply."""
    if isinstance(value, dict | list) and value and levels:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item, levels - 1)


def pick(place: Container, draw: random.Random) -> Any:
    return draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))


def odd_value(place: Any, draw: random.Random) -> None:
    place[pick(place, draw)] = copy.deepcopy(draw.choice(draw.choice((ODD_VALUES, ODD_TEXTS))))


def another_value(place: Any, draw: random.Random) -> None:
    place[pick(place, draw)] = copy.deepcopy(place[pick(place, draw)])


def as_words(place: Any, draw: random.Random) -> None:
    key = pick(place, draw)
    place[key] = as_plain_text(place[key])


def nest(place: Any, draw: random.Random) -> None:
    key = pick(place, draw)
    place[key] = draw.choice(([place[key]], {str(key): place[key]}, [[place[key]], 1]))


def drop(place: Any, draw: random.Random) -> None:
    del place[pick(place, draw)]


def rename(place: Any, draw: random.Random) -> None:
    """Misspell a key, or call it what another one is called."""
    if isinstance(place, dict):
        key = pick(place, draw)
        place[misspelled(str(key), draw)] = place.pop(key)


def add(place: Any, draw: random.Random) -> None:
    if isinstance(place, dict):
        place[draw.choice(corpus())[0]] = copy.deepcopy(draw.choice(ODD_VALUES))
    else:
        place.append(copy.deepcopy(draw.choice(ODD_VALUES)))


def twice(place: Any, draw: random.Random) -> None:
    """Say a key a second time in another spelling."""
    if isinstance(place, dict):
        key = pick(place, draw)
        place[draw.choice((f"--{key}", str(key).upper(), str(key).replace("_", "-")))] = copy.deepcopy(place[key])


def misspelled(key: str, draw: random.Random) -> str:
    at = draw.randrange(len(key) + 1)
    return draw.choice(
        (
            *(key[:at] + key[at + 1 :], key[:at] + key[at:][:1] + key[at:], key[:at] + "\x1b" + key[at:]),
            *(key.upper(), key.replace("_", "-"), f"--{key}", f"{key}.x", "", " ", "\ud800", "x" * 300, "0", "a b"),
            draw.choice(corpus())[0],
        )
    )


def line_gone(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[:at] + lines[at + 1 :]) if (at := draw.randrange(len(lines) + 1)) < len(lines) else content


def line_twice(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    line = draw.choice(lines)
    lines.insert(draw.randrange(len(lines) + 1), line)
    return b"".join(lines)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def flipped(content: bytes, draw: random.Random) -> bytes:
    """Flip one bit."""
    changed = bytearray(content or b" ")
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


SIGNS = (b"\x00", b"\x1b", b"\xff", b"\x85", b"\r", b"\n", b"\t", b"{", b"}", b"[", b"]", b'"', b"'", b"#", b"$", b"\\")
SIGNS += (b":", b",", b"=", b"&a ", b"*a", b"<<: ", b"- ", b"!!python/object:os.system ", b"\xef\xbb\xbf", b"\xc2\x85")


def sign(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.choice(SIGNS) + content[at + draw.randrange(2) :]


def encoded(content: bytes, draw: random.Random) -> bytes:
    text = content.decode("utf-8", "replace")
    return text.encode(draw.choice(("utf-16", "utf-8-sig", "latin-1", "utf-32", "cp1252")), "replace")


def line_ends(content: bytes, draw: random.Random) -> bytes:
    return content.replace(b"\n", draw.choice((b"\r\n", b"\r", b"\n\n", b"\n  ", b" ")))


def joined(content: bytes, draw: random.Random) -> bytes:
    """Put another file, or the same, behind it."""
    make, name, _ = KINDS[draw.choice(list(KINDS))]
    try:
        other = dump(make(draw), name.rpartition(".")[2]).encode()
    except (TypeError, ValueError):
        other = content
    return content + draw.choice((other, content))


def digits(content: bytes, draw: random.Random) -> bytes:
    places = [at for at, byte in enumerate(content) if chr(byte).isdigit()] or [len(content)]
    at = draw.choice(places)
    return content[:at] + draw.choice((b"9" * 20, b"-", b"0", b"1e999", b"0.1.2", b"9" * 5000)) + content[at + 1 :]


OF_VALUES = (odd_value, odd_value, odd_value, another_value, as_words, nest, drop, rename, rename, add, twice)
OF_BYTES = (line_gone, line_twice, cut, flipped, sign, sign, encoded, line_ends, joined, digits)
PLACES: tuple[Callable[[Path], object] | None, ...] = (
    Path.mkdir,
    os.mkfifo,
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: None,
)


def draw_case(draw: random.Random) -> Case:
    """Draw a file, and up to four mutations of its values and of its bytes."""
    kind = draw.choice(list(KINDS))
    make, name, setting = KINDS[kind]
    value, done = make(draw), []
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        mutation = draw.choice(OF_VALUES)
        if places := list(containers(value)):
            mutation(draw.choice(places), draw)
            done.append(mutation.__name__)
    try:
        content = dump(value, name.rpartition(".")[2]).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError, yaml.YAMLError):  # it has no such value
        content = json.dumps(value, indent=1).encode()
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
        mutation = draw.choice(OF_BYTES)
        content = mutation(content, draw)
        done.append(mutation.__name__)
    files = {name: content}
    if setting:
        images = {} if kind == "datasets" else IMAGES
        files["c.json"] = json.dumps(MODEL | images | {"output_dir": "out", setting: name}, indent=1).encode()
    place = draw.choice(PLACES) if draw.random() < 0.02 else None
    return Case("c.json" if setting else name, files, kind, name, done, place)
