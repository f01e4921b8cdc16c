"""Take the original's files apart: what becomes a setting, what is left out, and why.

Reading a file for a run is strict (`loading.py`); here everything that cannot be taken is kept as a remark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simpletuner.errors import Mistake, SettingsError
from simpletuner.settings.errors import did_you_mean, shorten, shown_value, to_mistake
from simpletuner.settings.file_entries import FileEntry, file_place
from simpletuner.settings.formats import read_entries, suffix_of
from simpletuner.settings.key_table import inner_entries
from simpletuner.settings.knob import kind_of
from simpletuner.settings.loading import canonical_name, plain_name, read_table
from simpletuner.settings.original import map_name
from simpletuner.settings.sections import SECTION_OF, setting_fields
from simpletuner.settings.sources import (
    ACCELERATE_CONFIG,
    NOT_SETTINGS,
    Origin,
    RawValue,
    is_accelerate_config,
    is_equal,
    is_variable,
    to_setting_type,
    validate_value,
)
from simpletuner.system.paths import expand_home

FILES = ("config.json", "config.toml", "config.env")
"""What the original looks for in a config folder, in this order."""
BACKEND = ("config_backend", "config_type")
EXTRA_ARGS = ("trainer_extra_args", "debug_extra_args")
LAUNCHERS = ("mixed_precision", "dynamo_backend", ACCELERATE_CONFIG)
"""With the section `launch`: what the original reads from config.env even where config.json holds the rest."""
DECISIVE = ("model_family", "model_type", "controlnet", "control", "refiner_training")
"""Names that say what is trained: what is left without them is another run."""
NEEDS_LOOK = {NOT_SETTINGS[name] for name in ("env", "accelerate_extra_args", "trainer_extra_args")}


@dataclass(frozen=True)
class LeftOut:
    """One value of the original's file that the new file does not have."""

    name: str
    value: Any
    place: str
    reason: str
    needs_look: bool = True
    """Whether it asks for something; otherwise it has no effect here."""

    @property
    def given(self) -> str:
        return f"{self.name.lstrip('-')} = {shown_value(self.name, self.value)}"

    def __str__(self) -> str:
        return f"{self.given} ({self.place}): {self.reason}"


class NotTaken(Exception):
    """Why a value that asks for something is left out."""


@dataclass(frozen=True)
class Taken:
    """One value that becomes a setting: as the original has it, and as it is written."""

    given: RawValue
    value: RawValue
    note: str = ""


@dataclass
class Original:
    """What the original's files say. `variables` are those of other programs, by name: their values may be secrets."""

    file: Path
    values: list[RawValue]
    left_out: list[LeftOut] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    taken: dict[str, Taken] = field(default_factory=dict)

    def leave_out(self, given: RawValue, reason: str, needs_look: bool = True) -> None:
        self.left_out.append(LeftOut(given.name, given.value, given.place, reason, needs_look))

    def drop(self, setting: str, reason: str) -> None:
        """Leave out a setting that was taken."""
        self.leave_out(self.taken.pop(setting).given, reason)


def read_original(path: Path) -> Original:
    """Read a file of the original, or the one that it would read in a config folder. Raises SettingsError."""
    if not path.is_dir():
        return read_one(path)
    found = [path / name for name in FILES if (path / name).is_file()]
    if not found:
        raise SettingsError(f"{path} holds none of {', '.join(FILES)}", "name the file of settings itself")
    beside = read_one(path / FILES[-1]) if path / FILES[-1] in found else None
    backend = next((given.value for given in beside.values if given.name.lower() in BACKEND), "") if beside else ""
    original = read_one(next((file for file in found if file.suffix == f".{backend}"), found[0]))
    if beside is not None and beside.file != original.file:
        original.variables = beside.variables
        add_launch_values(original, beside)
    return original


def read_one(path: Path) -> Original:
    entries = [entry for entry in read_entries(path) if entry.key != "$schema"]
    is_env = suffix_of(path) == ".env"
    variables = [entry.key for entry in entries if is_env and is_variable(entry.key)]
    wrapper = next((entry for entry in entries if entry.key == "config" and isinstance(entry.value, Mapping)), None)
    around = [entry for entry in entries if wrapper and entry is not wrapper]
    inside = list(inner_entries(wrapper)) if wrapper else [entry for entry in entries if entry.key not in variables]
    original = Original(path, [raw_value(path, entry) for entry in inside], variables=variables)
    for entry in around:
        original.leave_out(raw_value(path, entry), "the WebUI's own notes", needs_look=False)
    return original


def raw_value(path: Path, entry: FileEntry) -> RawValue:
    return RawValue(entry.key, entry.value, file_place(path, entry.line))


def add_launch_values(original: Original, beside: Original) -> None:
    """Add what a config.env says to the launcher; the rest of it the original does not read beside config.json."""
    known = {setting_of(given) for given in original.values}
    for given in beside.values:
        setting = setting_of(given)
        if (SECTION_OF.get(setting) == "launch" or setting in LAUNCHERS) and setting not in known:
            original.values.append(given)
        else:
            original.leave_out(given, f"{original.file.name} is read in its place", needs_look=False)


def setting_of(given: RawValue) -> str:
    if is_accelerate_config(given.name):
        return ACCELERATE_CONFIG
    found = map_name(given.name, canonical_name(given.name) or plain_name(given.name), given.value, True)
    return found.setting or found.key


def take_values(original: Original, root: Path) -> None:
    """Decide on every value. Raises SettingsError for one that says what is trained, and cannot be."""
    for given in original.values:
        try:
            taken = take_value(given, original, root)
        except NotTaken as reason:
            if plain_name(given.name) in DECISIVE:
                mistake = Mistake(given.name, str(reason), given.place, shorten(given.value))
                raise SettingsError(mistakes=[mistake], hint="it decides what is trained") from None
            original.leave_out(given, str(reason))
            continue
        if taken is None:
            continue
        name = taken.value.name
        if name not in original.taken:
            original.taken[name] = taken
            continue
        before = original.taken[name]
        is_same = same_value(name, before.value.value, taken.value.value)
        reason = (
            f"{before.given.name} ({before.given.place}) says {'the same' if is_same else shorten(before.given.value)}"
        )
        original.leave_out(given, reason, needs_look=not is_same)


def same_value(setting: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same, however they are written."""
    if setting in SECTION_OF:
        one, other = (to_setting_type(setting, value) for value in (one, other))
    return is_equal(one, other)


def take_value(given: RawValue, original: Original, root: Path) -> Taken | None:
    """Return the setting that a value becomes; None where it asks for nothing. Raises NotTaken."""
    name = canonical_name(given.name) or plain_name(given.name)
    if name in NOT_SETTINGS:
        original.leave_out(given, NOT_SETTINGS[name] or "it is no setting", NOT_SETTINGS[name] in NEEDS_LOOK)
        return None
    # An empty text is not set in the original.
    written = None if given.value == "" else given.value
    if is_accelerate_config(name) and not written:
        original.leave_out(given, "not set", needs_look=False)
        return None
    if is_accelerate_config(name):
        return Taken(given, replace(given, name=ACCELERATE_CONFIG, value=relocated(written, root)))
    found = map_name(given.name, name, written, True)
    if found.outcome in ("neutral", "unused"):
        original.leave_out(given, found.note, needs_look=False)
        return None
    if found.outcome != "set":
        like = did_you_mean(given.name, setting_fields())
        raise NotTaken(found.note or f"not a name that is known here{'; ' if like else ''}{like}")
    moved = relocate(found.setting, found.value, root)
    note = "" if moved == found.value else f"relative to {root} there"
    return Taken(given, check_value(found.setting, replace(given, name=found.setting, value=moved)), note)


def check_value(setting: str, given: RawValue) -> RawValue:
    """Read a table that is named by its file, and check the value by itself. Raises NotTaken."""
    mistakes: list[Mistake] = []
    given = read_table(setting, given, mistakes)
    try:
        validate_value(setting, given.value)
    except ValidationError as error:
        mistakes += [to_mistake(error.errors()[0], setting_fields()[setting], Origin(given.place, given.value))]
    if mistakes:
        raise NotTaken(f"{mistakes[0].message}{'; ' if mistakes[0].hint else ''}{mistakes[0].hint}")
    return given


def relocate(setting: str, value: Any, root: Path) -> Any:
    """Return a path that means the same from the folder in which this command runs; any other value as it is."""
    field = setting_fields()[setting]
    is_folder = setting in ("pretrained_model_name_or_path", "resume_from_checkpoint") and (root / str(value)).exists()
    is_table = kind_of(field.annotation) is dict and not str(value).lstrip().startswith("{")
    return relocated(value, root) if kind_of(field.annotation) is Path or is_folder or is_table else value


def relocated(value: Any, root: Path) -> Any:
    if not isinstance(value, str) or root == Path() or not value:
        return value
    return str(root / expand_home(value))


def working_folder(file: Path) -> Path:
    """The folder in which the original is started, which its paths are relative to: the one that holds config/."""
    here = Path.cwd()
    found = next((folder.parent for folder in file.resolve().parents if folder.name == "config"), here)
    return Path() if found == here else found


def first_existing(name: str, folders: Iterable[Path]) -> Path | None:
    return next((folder / expand_home(name) for folder in folders if (folder / expand_home(name)).is_file()), None)
