"""Sort the values of the original's files: those that become settings, and the others with a reason.

A run refuses a file of the original; an import leaves out what it cannot take, with a remark, and knows what
of it changes the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from simpletuner.errors import Mistake, SettingsError
from simpletuner.importing.folders import has_caches
from simpletuner.importing.foreign_trainer import CACHES, Translation, first_existing
from simpletuner.importing.lycoris import lycoris_values
from simpletuner.importing.original import Effect, MappedValue, Original, UnmappedValue, names_accelerate, setting_of
from simpletuner.importing.translation import (
    OVERRIDES,
    OriginalConfig,
    is_lycoris,
    only_there,
    own_values,
    split_optimizer_config,
    split_sequences,
    translate,
    unread,
)
from simpletuner.settings.declared.errors import did_you_mean, is_secret, shorten, to_mistake
from simpletuner.settings.declared.knob import kind_of
from simpletuner.settings.declared.sections import SECTION_OF, setting_fields
from simpletuner.settings.declared.table import canonical_name, plain_name
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG
from simpletuner.settings.files.raw_values import Origin, RawValue, Source
from simpletuner.settings.foreign.key_table import Maps, Refuses
from simpletuner.settings.foreign.original_names import DECIDES, TABLE, is_off, map_name
from simpletuner.settings.resolving.loading import read_table
from simpletuner.settings.resolving.sources import NOT_SETTINGS, to_setting_type, validate_value
from simpletuner.settings.values.spelling import is_equal
from simpletuner.system.files.paths import expand_path

# Names whose value cannot be left out, not even with --partial: nothing would be left to train.
DECISIVE = ("model_family", "model_type", "controlnet", "control", "refiner_training")
NEEDS_LOOK = {NOT_SETTINGS[name] for name in ("env", "accelerate_extra_args")}
# Sections that do not change what is trained.
ASIDE = ("checkpoints", "compile", "hub", "launch", "logging", "validation")
ALSO_ASIDE = (
    *("attention_backend", "gradient_checkpointing", "offload_activations", "fuse_qkv_projections", "allow_tf32"),
    *("vae_dtype", "vae_enable_tiling", "vae_enable_slicing", "vae_batch_size", "text_encoder_batch_size"),
    *("cache_dir_vae", "cache_dir_text", "compress_disk_cache", "max_workers", "dataloader_prefetch_qlen"),
    *("preserve_data_backend_cache", "rescan", "ema_device", "optimizer_release_gradients"),
)
"""Other settings that only change time, memory or the last bits."""
CACHE_FOLDERS = ("cache_dir_vae", "cache_dir_text")
NOTE_OF_THEIRS = re.compile(r"[_$#]|//")
"""Beginnings of names that people use for comments."""


DRIVE = re.compile(r"[A-Za-z]:[\\/]")
"""Beginning of a path of Windows."""


class CannotMap(Exception):
    """Raised with the reason why a value that asks for something is left out."""


def effect_of(name: str) -> Effect:
    """Return the effect of leaving out a name of the original's, with a value that asks for something."""
    rule = TABLE.rules.get(name)
    setting = rule.setting if isinstance(rule, Maps) else name
    if isinstance(rule, Refuses):
        return "lost" if rule.reason in DECIDES else "look"
    if setting in SECTION_OF:
        return "look" if SECTION_OF[setting] in ASIDE or setting in ALSO_ASIDE else "lost"
    if is_secret(name):
        return "look"
    return "none" if NOTE_OF_THEIRS.match(name) else "lost"


def read_config(original: Original, accelerate: Iterable[Source]) -> OriginalConfig:
    """File as the original's program reads it. `accelerate` is what the file that it names says."""
    given = {}
    for each in original.values:
        name = plain_name(each.name)
        given[name if name in OVERRIDES else setting_of(each)] = each.value
    given |= {each.name: each.value for source in accelerate for each in source.values}
    json = read_table("deepspeed_config", RawValue("deepspeed_config", given.get("deepspeed_config"), ""), []).value
    has_deepspeed = isinstance(json, Mapping) or given.get("zero_stage") is not None
    has_fsdp = "fsdp_enable" in given and not is_off(given["fsdp_enable"])
    return OriginalConfig(given, has_fsdp, has_deepspeed, isinstance(json, Mapping) and "optimizer" in json)


def take_values(original: Original, config: OriginalConfig, root: Path) -> None:
    """Take every value or leave it out. Raises SettingsError where nothing is left to train."""
    original.their_defaults = list(own_values(config))
    ignored = dict(unread(config))
    for given in original.values:
        name = plain_name(given.name)
        name = name if name in OVERRIDES else setting_of(given)
        if name in ignored:
            original.leave_out(given, ignored[name], "none")
            continue
        for each, value in named_in(given, config, original, root):
            take_or_leave(each, value, config, original, root)
    places = {setting_of(each): each.place for each in reversed(original.values)}
    for name, value, reason in only_there(config):
        place = places.get(name) or f"{places['model_family']}, by default"
        original.left_out.append(UnmappedValue(name, value, place, reason, "lost"))


def named_in(
    given: RawValue, config: OriginalConfig, original: Original, root: Path
) -> Iterator[tuple[RawValue, RawValue]]:
    """Yield (what is written, a value) for all values that one of the file stands for."""
    named = config.given.get("lycoris_config")
    if setting_of(given) == "context_parallel_size":
        yield given, given
        yield from ((given, each) for each in split_sequences(given, config))
    elif not is_lycoris(given, config) or not isinstance(named, str) or not named:
        yield from ((each, each) for each in split_optimizer_config(given))
    elif (path := named_file(named, root, original)) is None:
        original.leave_out(given, f"its lycoris_config, {named}, is not here", "lost")
    else:
        try:
            yield from ((given, each) for each in lycoris_values(given, path, config.family_name))
        except ValueError as reason:
            original.leave_out(given, str(reason), "lost")


def named_file(named: str, root: Path, original: Original) -> Path | None:
    """Return a file that a file of the original names, from its own folder or the two above it.

    The original's own examples name config/examples/x.json, which lies in simpletuner/examples there.
    """
    folders = dict.fromkeys((root, original.file.parent, original.file.parent.parent))
    return first_existing(named, folders) or first_existing(Path(named).name, folders)


def take_or_leave(given: RawValue, value: RawValue, config: OriginalConfig, original: Original, root: Path) -> None:
    translated, note = translate(value, config)
    try:
        taken = take_value(translated, original, root)
    except CannotMap as reason:
        if plain_name(given.name) in DECISIVE:
            mistake = Mistake(given.name, str(reason), given.place, shorten(given.as_written))
            raise SettingsError(mistakes=[mistake], hint="it decides what is trained") from None
        original.leave_out(given, str(reason), effect_of(canonical_name(given.name) or plain_name(given.name)))
        return
    if taken is None:
        return
    taken = replace(taken, given=given, note="; ".join(filter(None, [note, taken.note])))
    name = taken.value.name
    if name in CACHE_FOLDERS and has_caches(taken.value.value):
        original.leave_out(given, CACHES)
    if name not in original.taken:
        original.taken[name] = taken
        return
    before = original.taken[name]
    is_same = same_value(name, before.value.value, taken.value.value)
    said = "the same" if is_same else shorten(before.given.as_written)
    original.leave_out(given, f"{before.given.name} ({before.given.place}) says {said}", "none" if is_same else "look")


BESIDE, WRITTEN = ("data_backend_config", "validation_prompt_file"), "written beside it"
# Of a warm-up of w steps, the k-th has (k - 1)/w of the rate in other trainers, and k/(w + 1) here.
FROM_ZERO = "its first step has rate 0 there, and a step's share here"


def take_translated(original: Original, run: Translation) -> None:
    """Take what another trainer's file means here; what has another value there is left out, as lost."""
    original.their_defaults = [
        RawValue(name, value, WRITTEN if name in BESIDE else f"{run.trainer} has it")
        for name, value in run.defaults.items()
        if value is not None
    ]
    original.left_out += run.left_out
    for setting, each in run.taken.items():
        place = run.place(each.key)
        given = RawValue(each.key, each.written, place)
        try:
            taken = check_value(setting, RawValue(setting, each.value, place))
        except CannotMap as reason:
            original.leave_out(given, str(reason), effect_of(setting))
        else:
            is_warmup = setting == "lr_warmup_steps" and not is_off(each.value)
            original.taken[setting] = MappedValue(given, taken, each.note or FROM_ZERO * is_warmup)
            if DRIVE.match(str(each.value)):
                original.leave_out(given, f"a path of Windows: set {setting} to where it is on this machine")


def same_value(setting: str, one: object, other: object) -> bool:
    """True if two values of a setting are equal once converted to its type."""
    if setting in SECTION_OF:
        one, other = (to_setting_type(setting, value) for value in (one, other))
    return is_equal(one, other)


def take_value(given: RawValue, original: Original, root: Path) -> MappedValue | None:
    """Return the setting that a value becomes, or None where it asks for nothing. Raises CannotMap."""
    name = canonical_name(given.name) or plain_name(given.name)
    if name in NOT_SETTINGS:
        effect = "look" if NOT_SETTINGS[name] in NEEDS_LOOK else "none"
        original.leave_out(given, NOT_SETTINGS[name] or "it is no setting", effect)
        return None
    # An empty text is not set in the original.
    written = None if given.value == "" else given.value
    if names_accelerate(given) and not written:
        original.leave_out(given, "not set", "none")
        return None
    if names_accelerate(given):
        return MappedValue(given, replace(given, name=ACCELERATE_CONFIG, value=relocated(written, root)))
    found = map_name(given.name, name, written)
    if found.outcome in ("neutral", "unused"):
        original.leave_out(given, found.note, "none")
        return None
    if found.outcome != "set":
        like = did_you_mean(given.name, setting_fields())
        raise CannotMap(found.note or f"not a name that is known here{'; ' if like else ''}{like}")
    moved = relocate(found.setting, found.value, root)
    note = "" if moved == found.value else f"relative to {root} there"
    return MappedValue(given, check_value(found.setting, replace(given, name=found.setting, value=moved)), note)


def check_value(setting: str, given: RawValue) -> RawValue:
    """Check a value by itself, after reading the JSON file that it may name. Raises CannotMap."""
    mistakes: list[Mistake] = []
    given = read_table(setting, given, mistakes)
    try:
        validate_value(setting, given.value)
    except ValidationError as error:
        mistakes += [to_mistake(error.errors()[0], setting_fields()[setting], Origin(given.place, given.as_written))]
    if mistakes:
        raise CannotMap(f"{mistakes[0].message}{'; ' if mistakes[0].hint else ''}{mistakes[0].hint}")
    return given


def relocate(setting: str, value: object, root: Path) -> object:
    """Path that means the same from the folder in which this command runs; any other value as it is."""
    field = setting_fields()[setting]
    may_be_path = setting in ("pretrained_model_name_or_path", "resume_from_checkpoint")
    is_folder = may_be_path and os.path.exists(root / str(value))  # noqa: PTH110 - pathlib raises for a long name
    is_table = kind_of(field.annotation) is dict and not str(value).lstrip().startswith("{")
    return relocated(value, root) if kind_of(field.annotation) is Path or is_folder or is_table else value


def relocated(value: object, root: Path) -> object:
    """Return a path that means the same from the folder in which this command runs."""
    if not isinstance(value, str) or root == Path() or not value:
        return value
    try:
        return str(root / expand_path(value))
    except ValueError:
        return value  # validation has the sentence


def working_folder(file: Path) -> Path:
    """Folder that the original's paths are relative to: where it is started, the one that holds config/."""
    here = Path.cwd()
    found = next((folder.parent for folder in file.resolve().parents if folder.name == "config"), here)
    return Path() if found == here else found
