"""Messages about the fields of an accelerate file that do not become settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simpletuner.errors import BrokenRule, Mistake
from simpletuner.settings.declared.errors import did_you_mean, shorten
from simpletuner.settings.files.file_entries import FileEntry, file_place
from simpletuner.settings.foreign.accelerate.fields import ENGINES, TABLE, kind_of
from simpletuner.settings.foreign.key_table import MappedField
from simpletuner.settings.values.spelling import normalize_name

MAX_NAMED = 5
"""Largest number of unknown fields that are named; the others are counted."""
ALONE = ("no", "multi_cpu")
"""Values of distributed_type for which accelerate's default of one rank is not a slip."""


def warnings_of(name: str, fields: Sequence[MappedField]) -> list[str]:
    """Return a sentence for each field that is not used as it is written, and one for all unknown ones."""
    warnings = [
        f"{file_place(name, found.line)}: {found.path}: {found.note}"
        for found in fields
        if found.outcome == "set" and found.note
    ]
    warnings += [
        f"{file_place(name, found.line)}: {found.path} = {shorten(found.value)} is not used: {found.note}"
        for found in fields
        if found.outcome == "unused"
    ]
    unknown = [found for found in fields if found.outcome == "unknown"]
    if not unknown:
        return warnings
    place = file_place(name, unknown[0].line)
    return [*warnings, f"{place}: not used, since simpletuner does not know it: {first_of(unknown)}"]


def first_of(unknown: Sequence[MappedField]) -> str:
    """Name the first of the fields, each with the nearest known one, and count the others."""
    named = [f"{found.path} = {shorten(found.value)}{guess_field(found)}" for found in unknown[:MAX_NAMED]]
    more = len(unknown) - len(named)
    return ", ".join(named) + (f", and {more:,} more" if more else "")


def guess_field(found: MappedField) -> str:
    section, dot, name = found.path.rpartition(".")
    question = did_you_mean(name, TABLE.names_in(section + dot))
    return f" ({question})" if question else ""


def mistakes_of(name: str, fields: Iterable[MappedField]) -> list[Mistake]:
    """Return the fields that cannot be meant: another engine, a section that is none."""
    return [
        Mistake(found.path, found.note, file_place(name, found.line), shorten(found.value), guess_engine(found))
        for found in fields
        if found.outcome == "refused"
    ]


def guess_engine(found: MappedField) -> str:
    return did_you_mean(str(found.value).upper(), ENGINES) if found.path == "distributed_type" else ""


def missing_ranks(place: str) -> BrokenRule:
    """As `accelerate launch` does; a default of 1 would train something else than the file asks for."""
    message = f"num_processes is missing: {place} means several ranks: write it there, or give --num_processes=8"
    return BrokenRule("num_processes", message)


def place_of_ranks(name: str, entries: Iterable[FileEntry]) -> str:
    """Return where a file asks for several ranks; empty where it does not, or where that is a mistake anyway."""
    kind = kind_of(entries)
    asks = normalize_name(kind.value) not in ALONE and str(kind.value).upper() in ENGINES
    return f"distributed_type: {kind.value} ({file_place(name, kind.line)})" if asks else ""
