"""Validation of a config file with unsaved edits: origins, mistakes, warnings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simpletuner.errors import BrokenRule, Mistake, SettingsError, SimpleTunerError
from simpletuner.page.editing.documents import Document, find_outside, holds_table
from simpletuner.page.folders import Folders
from simpletuner.settings import Loaded, Origin, Settings
from simpletuner.settings.declared.errors import InvalidSettings
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.files.raw_values import Source
from simpletuner.settings.resolving.loading import canonical_name, resolve
from simpletuner.tools.run_check import check_run, errors_around


@dataclass(frozen=True)
class Examined:
    """The result of validation: settings as far as they are valid, origins, and mistakes."""

    settings: Settings
    origins: Mapping[str, Origin]
    mistakes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sentences by setting; a contradiction is there for each setting that it names."""
    general: Sequence[str] = ()
    """Sentences about no setting that there is: unknown keys, for example."""
    warnings: Sequence[str] = ()
    invalid: frozenset[str] = frozenset()
    """Settings whose value is wrong by itself, whatever the others are."""

    @property
    def count(self) -> int:
        distinct = {sentence for sentences in self.mistakes.values() for sentence in sentences}
        return len(distinct) + len(self.general)


def examine(document: Document, folders: Folders, environment: Mapping[str, str] = os.environ) -> Examined:
    """Check a document as `config validate` does, the fields that are not saved yet included.

    Raises SettingsError for a file that cannot be read at all.
    """
    # What was typed may name any file of the machine, which the settings layer would read: such fields count
    # as empty.
    outside = find_outside(document, folders)
    safe = replace(document, typed={**document.typed, **dict.fromkeys(outside, "")})
    loaded, errors = check(safe.sources(environment))
    mistakes = [mistake for error in errors for mistake in mistakes_of(error, loaded.origins)]
    mistakes += [(name, f"{error.message}; {error.hint}") for name, error in outside.items()]
    by_setting: dict[str, list[str]] = {}
    for name, sentence in dict.fromkeys(mistakes):
        by_setting.setdefault(name, []).append(sentence)
    general = [text for name in by_setting.keys() - setting_fields().keys() for text in by_setting.pop(name)]
    warnings, invalid = (loaded.warnings, ()) if isinstance(loaded, Loaded) else ((), loaded.invalid)
    broken = (name for name, value in document.changes.items() if holds_table(name) and is_broken_table(value))
    wrong = frozenset((*outside, *invalid, *broken))
    return Examined(loaded.settings, loaded.origins, by_setting, general, warnings, wrong)


def check(sources: Iterable[Source]) -> tuple[Loaded | InvalidSettings, list[SimpleTunerError]]:
    """Return settings as far as they are valid, and all errors that `config validate` would end with."""
    try:
        loaded = resolve(sources)
    except InvalidSettings as error:
        return error, [*errors_around(error)]
    try:
        check_run(loaded)
    except SimpleTunerError as error:
        return loaded, [error]
    return loaded, []


def mistakes_of(error: SimpleTunerError, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    """Yield each sentence with each setting next to which it is shown."""
    if not isinstance(error, SettingsError) or not error.mistakes:
        sentence = f"{error.message}; {error.hint}" if error.hint else error.message
        # Of the settings that a check looks at, those that somebody has set.
        for name in [name for name in error.about if name in origins] or error.about[:1] or [""]:
            yield name, sentence
        return
    for mistake in error.mistakes:
        names = (mistake.setting, *mistake.others) if isinstance(mistake, BrokenRule) else (mistake.setting,)
        for name in names:
            # A key within a table is named after it.
            owner = canonical_name(name.partition(".")[0]) or ""
            yield owner, sentence_of(mistake, is_beside=bool(owner))


def sentence_of(mistake: Mistake, is_beside: bool) -> str:
    """Describe the mistake; next to its field, omit the name, the value and the place, which are shown there."""
    if isinstance(mistake, BrokenRule):
        return mistake.message
    if not is_beside:
        return str(mistake)
    inner = mistake.setting.partition(".")[2]
    sentence = f"{inner}: {mistake.message}" if inner else mistake.message
    return f"{sentence}; {mistake.hint}" if mistake.hint else sentence


def is_broken_table(value: Any) -> bool:
    """Return whether something typed begins as JSON and does not parse."""
    return isinstance(value, str) and value.startswith("{")
