"""Paths as a user types them: `~`, `{env:NAME}`, and the pipes that a shell hands over as `/dev/fd/63`.

What a shell, or an editor, would have replaced or cut off is refused: `$SCRATCH/out` was a folder of that
name.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import unicodedata
from collections.abc import MutableMapping
from pathlib import Path

DESCRIPTOR = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(?P<number>\d+)")
# Pattern that the original takes for a variable of the environment in a path.
ENVIRONMENT = re.compile(r"\{env:([^{}]*)\}")
VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)[^{}]*\}|(?P<plain>[A-Za-z_]\w*))|%(?P<windows>[A-Za-z_]\w*)%")
"""A variable as shells of Unix and Windows have it."""
# Unicode categories invisible at an end: control and format characters, separators, spaces.
INVISIBLE = "Cc Cf Zl Zp Zs"
JOINERS = "\u200c\u200d"
"""Format characters that are part of words, and of emoji."""
# Control characters that a backslash and a letter become in quoted text, as in a path of Windows.
ESCAPES = frozenset("\n\t\r\b\f\a\v\x1b")


def expand_path(text: str | Path) -> Path:
    """Replace a leading `~` by the home folder, and `{env:NAME}` by that variable of the environment.

    Raises ValueError for an empty text, for an unknown user, for a variable that is not set or empty, for one
    that only a shell replaces, and for invisible characters.

    A shell expands `~` only where a word begins, so `--output_dir=~/out` comes here as it was typed.
    """
    check_typed(str(text))
    name = ENVIRONMENT.sub(lambda found: variable_named(found[1]), str(text))
    if not name.strip():
        raise ValueError("a path cannot be empty; `.` is the current folder")
    check_visible(name)
    if not name.startswith("~"):
        path = Path(name)
        # pathlib drops the `./` of `./~x`. An absolute path means the same when written and read again.
        return path.absolute() if str(path).startswith("~") else path
    try:
        return Path(name).expanduser()
    except RuntimeError:
        user = name.partition("/")[0]
        raise ValueError(f"there is no home folder {user}; a file of this name is ./{user}") from None


def is_address(path: str | Path) -> bool:
    """True for s3://BUCKET/NAME and the like, also after pathlib has made `s3:/BUCKET/NAME` of it."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def refuse_address(path: Path) -> None:
    if is_address(path):
        raise ValueError("is an address: name a path of this machine")


def check_typed(text: str) -> None:
    """Raise ValueError for a variable that only a shell would replace.

    A path that is there under this very name is meant, unless the variable is set.
    """
    if found := VARIABLE.search(ENVIRONMENT.sub("", text)):
        name = found["braced"] or found["plain"] or found["windows"]
        if name in os.environ or not os.path.lexists(text):
            raise ValueError(f"{found[0]} is replaced by a shell, not here: write {{env:{name}}}")


def check_visible(name: str) -> None:
    """Raise ValueError for characters in a path that nobody sees: at its ends any, elsewhere those that
    end a line or move a cursor, unless such a path is there."""
    first, *_, last = name if len(name) > 1 else name * 2
    for letter in (first, last):
        if unicodedata.category(letter) in INVISIBLE.split():
            fix = f"remove it, or write {f'{name}/'!r}" if letter is last and os.path.lexists(name) else "remove it"
            raise ValueError(f"it {'begins' if letter is first else 'ends'} with {called(letter)}: {fix}")
    inside = next((each for each in name if unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp")), "")
    if inside and inside not in JOINERS and "\0" not in name and not os.path.lexists(name):
        fix = "write / for \\, or put it in single quotes" if inside in ESCAPES else "remove it"
        raise ValueError(f"it has {called(inside)} in it: {fix}")


def called(letter: str) -> str:
    """Name a character that has no picture."""
    names = {"\n": "a line feed", "\r": "a carriage return", "\t": "a tab", " ": "a blank"}
    name = names.get(letter) or f"a {unicodedata.name(letter, 'control character').lower()}"
    return f"{name} (U+{ord(letter):04X})"


def ensure_home(environment: MutableMapping[str, str]) -> str:
    """Set HOME where neither it nor the system's list of users names a folder, and return it; empty where
    there is one.

    Libraries would make a folder called `~` in the current one (huggingface_hub, platformdirs), or fail
    without the name of a user (torch's compiler), as in containers that are started with `--user 12345`.
    """
    if environment.get("HOME"):
        return ""
    try:
        pwd.getpwuid(os.getuid())
        return ""
    except KeyError:
        from tempfile import gettempdir  # 2 ms of each command

        home = Path(gettempdir(), f"home-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    if home.lstat().st_uid != os.getuid() or home.is_symlink():
        raise PermissionError(errno.EPERM, "there is no HOME, and its stand-in belongs to another user", str(home))
    environment["HOME"] = str(home)
    environment.setdefault("LOGNAME", str(os.getuid()))  # getpass.getuser() looks here first
    return str(home)


def variable_named(name: str) -> str:
    """Return the value of a variable. Raises ValueError where it has none."""
    if value := os.environ.get(name):
        return value
    raise ValueError(f"{{env:{name}}}: there is no {name} in the environment")


def shown_path(path: str | Path) -> str:
    # The number that a shell gave to `<(...)` means nothing to people.
    return "a pipe" if descriptor_of(path) else str(path)


def descriptor_of(path: str | Path) -> int | None:
    """The number of the open file of this process that a path such as /dev/stdin or /dev/fd/63 means."""
    found = DESCRIPTOR.fullmatch(str(path))
    return int(found["number"] or 0) if found else None
