"""Secrets as settings: what is written and shown of one is where it comes from, `{env:NAME}` or `{file:PATH#KEY}`.

Such a reference may stand wherever the secret may, so files that hold references can be shared and replayed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, SecretStr

from simpletuner.errors import SettingsError
from simpletuner.settings.files.formats import read_entries
from simpletuner.settings.values.hosts import check_url
from simpletuner.system.files.paths import ENVIRONMENT, descriptor_of, expand_path, variable_named

IN_FILE = re.compile(r"\{file:(?P<path>.+)#(?P<key>[^#{}]+)\}")


def file_reference(path: Path, key: str) -> str:
    """Return the reference to a key of a config file; empty for a pipe, which cannot be read again."""
    return "" if descriptor_of(path) is not None else f"{{file:{path.absolute()}#{key}}}"


def is_reference(value: object) -> bool:
    return isinstance(value, str) and (ENVIRONMENT.fullmatch(value) or IN_FILE.fullmatch(value)) is not None


def file_of_reference(value: str) -> Path | None:
    """Return the file that a reference names, if it names one. Raises ValueError for a path that cannot be."""
    found = IN_FILE.fullmatch(value)
    return expand_path(found["path"]) if found else None


def resolve_reference(value: Any) -> Any:
    """Return the secret that a reference names; any other value as it is. Raises ValueError where it is not there."""
    if not isinstance(value, str):
        return value
    if found := ENVIRONMENT.fullmatch(value):
        return variable_named(found[1])
    path = file_of_reference(value)
    return value_in_file(path, value.rpartition("#")[2].removesuffix("}")) if path else value


def value_in_file(path: Path, key: str) -> Any:
    """Return what a config file has for a key. Raises ValueError where it has not, or cannot be read."""
    try:
        values = {entry.key: entry.value for entry in read_entries(path)}
    except SettingsError as error:
        raise ValueError(error.message) from None
    if key not in values:
        raise ValueError(f"{path} has no {key}")
    return values[key]


def check_secret_url(url: SecretStr) -> SecretStr:
    check_url(url.get_secret_value())
    return url


SecretUrl = Annotated[SecretStr, BeforeValidator(resolve_reference), AfterValidator(check_secret_url)]
