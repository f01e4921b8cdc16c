"""Write the values of the original's files as TOML: a line per setting, and remarks as comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import get_args

from simpletuner.importing.original import Effect, Original, defaults_there, remark_on
from simpletuner.importing.sorting import same_value
from simpletuner.report import printable
from simpletuner.settings.declared.errors import shorten
from simpletuner.settings.declared.table import canonical_name, plain_name
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG
from simpletuner.settings.files.formats import toml_line
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.foreign.original_names import OPTIMIZERS
from simpletuner.settings.resolving.loading import Loaded, settings_as_json
from simpletuner.settings.values.spelling import normalize_name

MARK = "Written by `simpletuner config import`"
THEIR_DEFAULT = "the original's default"


def sources_of(original: Original, values: Mapping[str, object]) -> list[Source]:
    """Translated values as sources of settings: the original's defaults where ours differ, then the values.

    `values` are those that any source of the run gives.
    """
    own = {each.name: each for each in original.their_defaults}
    unmapped = {canonical_name(item.name) for item in original.left_out if item.effect != "none"}
    # A remark on another trainer's name takes nothing from the value found by its function.
    known = {*values, *(unmapped if original.is_simpletuner else ())}
    defaults = [
        own.get(name) or RawValue(name, theirs, THEIR_DEFAULT)
        for name, theirs in {**(defaults_there(values) if original.is_simpletuner else {}), **own}.items()
        if name not in known and theirs != "none"
    ]
    taken = [taken.value for name, taken in original.taken.items() if name != ACCELERATE_CONFIG]
    return [Source(THEIR_DEFAULT, defaults), Source(str(original.file), taken)]


def write_toml(original: Original, loaded: Loaded, root: Path) -> tuple[str, int, int]:
    """Return the text of the file, how many settings it has, and how many of them have changed."""
    values = settings_as_json(loaded)
    sources = (str(original.file), THEIR_DEFAULT)
    names = [name for source in sources for name, origin in loaded.origins.items() if origin.source == source]
    if ACCELERATE_CONFIG in original.taken:
        values[ACCELERATE_CONFIG] = original.taken[ACCELERATE_CONFIG].value.value
        names.insert(0, ACCELERATE_CONFIG)
    remarks = {name: list(remarks_about(name, values[name], original, loaded)) for name in names}
    lines = []
    for before, name in pairwise(["", *names]):
        # What is said of several settings in a row is said once.
        said = [] if remarks[name] and remarks.get(before) == remarks[name] else remarks[name]
        lines += [*map(comment, said), toml_line(name, values[name])]
    paths = "relative to the folder in which a command runs" if root == Path() else f"those of a run in {root}"
    head = comment(f"{MARK} from {original.file}. Paths are {paths}.")
    text = "\n".join([head, *lines, *remark_lines(original)]) + "\n"
    return text, len(names), sum(map(bool, remarks.values()))


def remarks_about(name: str, value: object, original: Original, loaded: Loaded) -> Iterator[str]:
    """Yield the differences of a setting from the original's: its name, its value, its meaning."""
    taken = original.taken.get(name)
    origin = loaded.origins.get(name)
    if taken is None:
        yield f"not set there: {origin}" if origin and origin.source == THEIR_DEFAULT else f"from {origin}"
        return
    renamed = plain_name(taken.given.name) != name
    changed = not same_value(name, taken.given.value, value)
    if renamed or changed or (taken.note and not original.is_simpletuner):
        reasons = [taken.note, OPTIMIZERS.get(normalize_name(taken.given.value), ("", ""))[1]]
        reasons.append(origin.reason if origin else "")
        there = f"{taken.given.name.lstrip('-')} = {shorten(taken.given.as_written)} there"
        yield ": ".join(filter(None, [there, *reasons]))
    values = {setting: each.value.value for setting, each in original.taken.items()}
    if original.is_simpletuner and (remark := remark_on(name, values)):
        yield remark


def remark_lines(original: Original) -> Iterator[str]:
    """Yield the comments at the end of the file: what was left out, by reason."""
    by_effect = {effect: [item for item in original.left_out if item.effect == effect] for effect in get_args(Effect)}
    idle = by_effect["none"]
    yield from section("Lost, so this file trains something else:", list(map(str, by_effect["lost"])))
    yield from section("Left out, look at these:", list(map(str, by_effect["look"])))
    by_reason = sorted(idle, key=lambda item: item.reason)
    groups = [(reason, list(items)) for reason, items in groupby(by_reason, lambda item: item.reason)]
    yield from section(
        "Left out, without effect here:",
        [f"{reason}: {', '.join(item.given for item in items)}" for reason, items in groups],
    )
    names = ", ".join(original.variables)
    where = "set them in the shell, or leave them in config/config.env, which passes them on to the ranks"
    yield from section("Variables of other programs:", [f"{names}: {where}"] if names else [])


def section(title: str, items: Sequence[str]) -> Iterable[str]:
    return ["", comment(title), *map(comment, items)] if items else []


def comment(text: str) -> str:
    return f"# {printable(text)}".replace("\n", " ").replace("\r", " ")
