"""The mechanism by which files of other trainers are translated: a table of keys, and functions of meaning.

A trainer has a `KeyTable` for its run and one for a dataset. What several keys decide together is answered by
functions, which come first and take the keys that they answer; the table answers the others, one by one. A
key that neither knows is lost. The same mechanism fills settings (of a run) and keys of our dataset file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.original import Effect, UnmappedValue
from simpletuner.settings.declared.errors import is_secret, shorten
from simpletuner.settings.foreign.key_table import Convert, Ignores, KeyTable, MappedField, Maps, Refuses, map_field
from simpletuner.settings.foreign.original_names import is_off, names_of
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.paths import expand_path

Texts = Mapping[str, str]
"""Names of a trainer by what is said of them; `name=value|value` adds values that ask for nothing special."""


@dataclass(frozen=True)
class TakenKey:
    """A key that has become a setting, or a key of a dataset."""

    key: str
    written: Any
    value: Any
    note: str = ""


@dataclass
class Translation:
    """A file of another trainer while it is translated. `values` still wait for an answer, by full key."""

    trainer: str
    file: Path
    values: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    taken: dict[str, TakenKey] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of the trainer for what its file is silent about, by our names."""
    left_out: list[UnmappedValue] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    """Validation prompts with keys of validation_prompt_file."""
    only_datasets: bool = False
    """True if the file lists datasets, and no run is there."""
    datasets_file: Path | None = None
    """File that lists its datasets, if it is another one."""
    conditions: list[Translation] = field(default_factory=list)
    """Masks and references of a dataset, each a dataset of its own."""
    written: dict[str, Any] = field(init=False)
    """All values of the file."""

    def __post_init__(self) -> None:
        self.written = dict(self.values)

    def get(self, key: str, default: Any = None) -> Any:
        """Return what the file says, whether it is answered already or not; null counts as silence."""
        value = self.written.get(key)
        return default if value is None else value

    def word(self, key: str, default: str = "") -> str:
        return normalize_name(self.get(key, default))

    def number(self, key: str, default: float) -> float:
        """Return a finite number, also one that is written as text; the default for what is none."""
        try:
            number = float(self.get(key, default))
        except (TypeError, ValueError, OverflowError):
            return float(default)  # whoever checks the value has the sentence
        return number if math.isfinite(number) else float(default)

    def is_on(self, key: str, default: bool = False) -> bool:
        return not is_off(self.get(key, default))

    def place(self, key: str) -> str:
        line = self.lines.get(key, self.lines.get(key.partition(".")[0], 0))
        return f"{self.file}:{line}" if line else str(self.file)

    def put(self, setting: str, key: str, value: Any, note: str = "") -> None:
        """Translate a key to a setting or a key of our dataset file, by default with this value."""
        if key in self.written:
            self.taken[setting] = TakenKey(key, self.written[key], value, note)
        else:
            self.defaults[setting] = value
        self.values.pop(key, None)

    def of(self, setting: str, default: Any = None) -> Any:
        """Return the value that a setting has so far."""
        return self.taken[setting].value if setting in self.taken else self.defaults.get(setting, default)

    def rename(self, setting: str, key: str, default: Any = None) -> Any:
        """Let a key become a setting of the same value, where the file has one, or else with a default."""
        if self.get(key) not in (None, ""):
            self.put(setting, key, self.written[key])
        elif default is not None:
            self.defaults[setting] = default
        self.values.pop(key, None)
        return self.get(key, default)

    def remark(self, key: str, reason: str, value: object = None, effect: Effect = "look") -> None:
        """Report on a key, whatever else becomes of it; `value` is what silence means there."""
        shown = self.written.get(key) if value is None else value
        self.left_out.append(UnmappedValue(key, shown, self.place(key), reason, effect))

    def leave(self, effect: Effect, key: str, reason: str, value: object = None) -> None:
        self.remark(key, reason, value, effect)
        self.values.pop(key, None)

    def lose(self, key: str, reason: str, value: object = None) -> None:
        self.leave("lost", key, reason, value)

    def look(self, key: str, reason: str, value: object = None) -> None:
        self.leave("look", key, reason, value)

    def drop(self, keys: Iterable[str], reason: str) -> None:
        """Leave keys out that have no effect here."""
        for key in keys:
            if key in self.values:
                self.leave("none", key, reason)

    def refuse(self, keys: Iterable[str], reason: str) -> None:
        """Leave keys out that change what is trained, unless they are off."""
        for key in keys:
            if key in self.values:
                (self.drop([key], ASKS_FOR_NOTHING) if is_off(self.values[key]) else self.lose(key, reason))

    def as_entry(self) -> dict[str, Any]:
        """Return what has become of a dataset, by the keys of ours."""
        return self.defaults | {name: key.value for name, key in self.taken.items()}

    def below(self, section: str) -> list[str]:
        """Unanswered keys of a section."""
        return [key for key in self.values if key.startswith(f"{section}.")]

    def tables(self, values: Mapping[str, Any], key: str, lists: Sequence[str] = ()) -> list[Mapping[str, object]]:
        """Return the tables of a list, of which only `lists` have lists or tables as values.

        Raises SettingsError for values of other kinds.
        """
        found = values.get(key) or []
        for each in found if isinstance(found, list) else [found]:
            odd = each if isinstance(each, Mapping) else {key: each}
            for name, value in odd.items():
                if odd is not each or (isinstance(value, list | Mapping) and name not in lists):
                    kind = "a single value" if odd is each else "a list of tables"
                    raise SettingsError(f"{self.file}: {name} = {shorten(value)} is not {kind}", "correct that value")
        return found if isinstance(found, list) else [found]

    def within(self, values: Mapping[str, Any], key: str = "") -> Translation:
        line = self.lines.get(key, 0)
        file = self.datasets_file or self.file
        return Translation(self.trainer, file, dict(flatten(values)), dict.fromkeys(flat_keys(values), line))

    def answer(self, table: KeyTable) -> None:
        for key, value in list(self.values.items()):
            found = map_field(table, MappedField(key, table.aliases.get(key, key), value, "unknown"))
            if found.outcome == "set":
                self.put(found.setting, key, found.value)
            elif found.outcome == "neutral":
                self.leave("none", key, found.note)
            elif found.outcome == "unused":
                self.look(key, found.note)
            elif found.outcome == "refused":
                self.lose(key, found.note)
            elif is_off(value) or key.rpartition(".")[2].startswith(NOTES):
                self.leave("none", key, ASKS_FOR_NOTHING)
            elif is_secret(key):
                self.look(key, "a secret is not copied: set it in the environment")
            else:
                self.lose(key, f"not a key of {self.trainer} that is known here")


ASKS_FOR_NOTHING = "asks for nothing special"
NOTES = ("_", "$", "#", "//")
"""Beginnings of names that people use for comments."""
Translate = Callable[[Translation], None]


def key_table(
    maps: Texts,
    converted: Mapping[str, Maps],
    idle: Texts,
    look: Texts,
    lost: Texts,
    aliases: Mapping[str, str] | None = None,
) -> KeyTable:
    """Return the table of a trainer's keys: `maps` by our setting, the others by the reason that is said.

    `idle` has no effect here, `look` changes something besides the training, `lost` changes what is trained.
    """
    return KeyTable(
        {
            **{name: Maps(setting, neutral=neutral) for setting, name, neutral in names_of(maps)},
            **{name: Ignores(reason, warns=False) for reason, name, _ in names_of(idle)},
            **{name: Ignores(reason, neutral) for reason, name, neutral in names_of(look)},
            **{name: Refuses(reason, neutral) for reason, name, neutral in names_of(lost)},
            **converted,
        },
        aliases or {},
        is_off=is_off,
    )


@dataclass(frozen=True)
class ForeignTrainer:
    """A program whose files are translated."""

    name: str
    table: KeyTable
    meanings: tuple[Translate, ...]
    """Functions of meaning of a run, in order."""
    entries: Callable[[Translation, Mapping[str, object] | Sequence[object]], Iterator[Translation]]
    """Translations of the datasets that a run, or a dataset file, lists: (run, its or the file's values)."""
    dataset_file: str = ""
    """Key that names the file of datasets."""
    folders: Callable[[Translation], Mapping[str, object] | None] = lambda run: None
    """Values of a dataset file for the folders that a run without one names."""
    is_flat: bool = False
    """True if sections are read as if their keys stood side by side."""
    jobs: Callable[[Mapping[str, object]], Iterator[Mapping[str, object]]] = lambda values: iter([values])
    """Runs that a file describes."""

    def begin(self, file: Path, values: Mapping[str, object], lines: Mapping[str, int] | None = None) -> Translation:
        """Return a run without its datasets: what its functions of meaning make of it."""
        given = dict(side_by_side(values) if self.is_flat else flatten(values))
        run = Translation(self.name, file, given, lines or {})
        for meaning in self.meanings:
            meaning(run)
        return run


def flatten(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`section.key`, value); lists stay values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def flat_keys(values: Mapping[str, object]) -> list[str]:
    return [key for key, _ in flatten(values)]


def side_by_side(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the keys of all sections without them; those of a section go before the others."""
    yield from ((name, value) for name, value in values.items() if not isinstance(value, Mapping))
    yield from (each for value in values.values() if isinstance(value, Mapping) for each in value.items())


def first_existing(name: str, folders: Iterable[Path]) -> Path | None:
    """First file of this path in one of the folders. Raises SettingsError for what can be no path."""
    try:
        path = expand_path(name)
    except ValueError as error:
        raise SettingsError(f"{name!r}: {error}", "correct that path") from None
    paths = (folder / path for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113 - as above


# Conversions of values, which raise ValueError with the reason why there is none.


def one_of(names: Mapping[str, str], what: str) -> Convert:
    """Conversion by a table of a trainer's words."""

    def convert(value: object) -> str:
        if (name := normalize_name(value)) not in names:
            raise ValueError(f"this version does not have this {what}")
        return names[name]

    return convert


def nonzero(value: object) -> object:
    """Return a value, or None for 0, with which a name is off there."""
    return value or None


# Parts of meaning that several trainers share.

FASTER = "it changes time, memory or the names of files"
CACHES = "latents and text embeddings are encoded again, into caches of this program: those of others are not read"
INNER_DROPOUT = "what is between the two matrices of an adapter is dropped there, and its inputs here"
LION = {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_weight_decay": 0.0}
"""Defaults of Lion's packages (lion-pytorch, bitsandbytes)."""


PRODIGY = {
    "decouple": ("true",),
    **dict.fromkeys(("use_bias_correction", "safeguard_warmup"), ("false",)),
    "d_coef": ("1", "1.0"),
    "d0": ("1e_6", "1e_06", "0.000001"),
}
"""Defaults of Prodigy's package (prodigyopt), which ours has, too."""


def two_betas(run: Translation, key: str) -> None:
    """Take a list of two numbers as an optimizer's betas."""
    betas = run.get(key)
    if isinstance(betas, list) and len(betas) == 2:
        for setting, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            run.put(setting, key, beta)
    elif betas is not None:
        run.lose(key, "betas are a list of two numbers")
    run.values.pop(key, None)


def optimizer_arguments(run: Translation, key: str, arguments: object) -> None:
    """Take arguments of an optimizer as sd-scripts and musubi-tuner have them: `weight_decay=0.1`,
    `eps=1e-8`, `betas=0.9,0.99`."""
    for argument in arguments if isinstance(arguments, list) else [arguments] if arguments else []:
        name, _, text = str(argument).partition("=")
        settings = {
            "weight_decay": ("adam_weight_decay",),
            "eps": ("adam_epsilon",),
            "betas": ("adam_beta1", "adam_beta2"),
        }.get(name.strip(), ())
        values = [value.strip() for value in text.strip("()[] ").split(",")]
        if "prodigy" in run.word("optimizer_type") and normalize_name(text) in PRODIGY.get(name.strip(), ()):
            continue
        if len(values) != len(settings):
            run.remark(key, "it has no place here", argument, "lost")
            continue
        for setting, value in zip(settings, values, strict=True):
            run.taken[setting] = TakenKey(key, argument, value)
    run.values.pop(key, None)
