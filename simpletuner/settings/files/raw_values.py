"""Values as written, with their place: from files, from command lines, and secrets as references to their
source.

A secret is stored and shown as a reference, `{env:NAME}` or `{file:PATH#KEY}`. A reference is accepted
wherever the secret is, so files with references can be shared and replayed. Command lines include those in a
variable of the original's config.env.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, SecretStr

from simpletuner.errors import BrokenRule, Mistake, SettingsError, SimpleTunerError, explain_system_errors
from simpletuner.settings.files.config_files import FileEntry, file_place
from simpletuner.settings.files.formats import read_entries
from simpletuner.settings.values.parsed import check_url
from simpletuner.system.files.paths import ENVIRONMENT, descriptor_of, expand_path, variable_named

IN_FILE = re.compile(r"\{file:(?P<path>.+)#(?P<key>[^#{}]+)\}")


def file_reference(path: Path, key: str) -> str:
    # A pipe cannot be read again.
    return "" if descriptor_of(path) is not None else f"{{file:{path.absolute()}#{key}}}"


def is_reference(value: object) -> bool:
    return isinstance(value, str) and (ENVIRONMENT.fullmatch(value) or IN_FILE.fullmatch(value)) is not None


def file_of_reference(value: str) -> Path | None:
    """File that a reference names, if it names one. Raises ValueError for a path that cannot be."""
    found = IN_FILE.fullmatch(value)
    return expand_path(found["path"]) if found else None


def resolve_reference(value: object) -> object:
    """Secret that a reference names; any other value as it is. Raises ValueError where it is not there."""
    if not isinstance(value, str):
        return value
    if found := ENVIRONMENT.fullmatch(value):
        return variable_named(found[1])
    path = file_of_reference(value)
    return value_in_file(path, value.rpartition("#")[2].removesuffix("}")) if path else value


def value_in_file(path: Path, key: str) -> object:
    """Read one key of a config file. Raises ValueError if it is missing or the file is unreadable."""
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


@dataclass(frozen=True)
class RawValue:
    name: str
    value: Any
    place: str
    file: str = ""
    """The JSON file that was read for the value, if there was one."""
    written: Any = None
    """Value for messages, from which `value` was converted."""
    reference: str = ""
    """Reference that replaces a secret value: `{env:NAME}` or `{file:PATH#KEY}`."""

    @property
    def as_written(self) -> object:
        return self.value if self.written is None else self.written


@dataclass(frozen=True)
class Source:
    """A source of settings; `warnings` name what it holds that is not used."""

    name: str
    values: list[RawValue]
    warnings: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    needs_ranks: str = ""
    """Place of a request for several ranks without their number."""
    implicit: bool = False
    """Found rather than named by the user: the run's summary says what it decided."""
    is_file: bool = False
    """A config file or config.env, which may be one of the original's."""
    is_outranked: bool = False
    """config/config.env where a config file is named: what is no setting in it is a warning."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of other programs in config.env, which ranks are given."""
    left_out: list[RawValue] = field(default_factory=list)
    """Another program's values of keys that its file leaves out."""


def raw_value(path: Path, entry: FileEntry) -> RawValue:
    place, reference = file_place(path, entry.line), file_reference(path, entry.key)
    return RawValue(entry.key, entry.value, place, written=entry.written, reference=reference)


@dataclass(frozen=True)
class Origin:
    """Origin of a value: its place, the text there, and the values that it outranked."""

    place: str
    given: Any
    """Value as given; for a secret a reference to it."""
    source: str = ""
    outranks: tuple[Origin, ...] = ()
    reason: str = ""
    file: str = ""
    """The JSON file that the value was read from, where a source only names one."""

    def __str__(self) -> str:
        return self.place


EXTRA_ARGS = ("trainer_extra_args", "debug_extra_args")
"""Variables of the original that hold arguments of its trainer."""


def parse_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names, with dashes, and values; a flag without one is true, as the original's --push_to_hub."""
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
    """Arguments that a variable holds, each as a value. Raises ValueError for a quote that is not closed."""
    try:
        flags = list(parse_arguments(shlex.split(str(given.value))))
        shown = dict(parse_arguments(shlex.split(str(given.as_written))))
    except ValueError:
        raise ValueError("a quote in it is not closed") from None
    place = given.place if given.place.endswith(given.name) else f"{given.place} {given.name}"
    # A flag missing in the text as written comes from the environment: messages show the variable's name.
    return [
        RawValue(name.lstrip("-"), value, place, written=given.written and shown.get(name, given.written))
        for name, value in flags
    ]


def with_places(mistake: BrokenRule, origins: Mapping[str, Origin]) -> BrokenRule:
    return replace(mistake, place=places_of((mistake.setting, *mistake.others), origins))


def places_of(names: Iterable[str], origins: Mapping[str, Origin]) -> str:
    """Files and lines that set these names; empty if all were flags."""
    wanted = set(names)
    places = {name: origin.place for name, origin in origins.items() if name in wanted}
    if all(place.partition(" ")[0] == "flag" for place in places.values()):
        return ""
    return ", ".join(f"{name}: {place}" for name, place in places.items())


@contextmanager
def naming_places(origins: Mapping[str, Origin], *names: str) -> Iterator[None]:
    """Add places to the errors of a check that knows values, but not where they were set.

    `names` are the settings that an error is about if it does not list them.
    """
    try:
        with explain_system_errors():
            yield
    except SimpleTunerError as error:
        if isinstance(error, SettingsError) and error.mistakes:
            placed = [
                with_places(each, origins) if isinstance(each, BrokenRule) and not each.place else each
                for each in error.mistakes
            ]
            raise SettingsError(mistakes=placed, hint=error.hint) from None
        error.about = tuple(name for name in names if name in origins) or names[:1]
        if place := places_of(names, origins):
            error.message += f" [{place}]"
        raise
