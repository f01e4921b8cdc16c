"""Add to mistakes, errors and warnings the places where their settings were set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from simpletuner.errors import BrokenRule, SettingsError, SimpleTunerError, explain_system_errors
from simpletuner.settings.files.raw_values import Origin


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
