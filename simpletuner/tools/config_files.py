"""Config files that are written: one to start from, and settings in the formats of other programs."""

from __future__ import annotations

import os
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_trainable, presets
from simpletuner.models.catalog.support import check_context_parallel, check_runnable
from simpletuner.recipes.library import find_recipe, source_of
from simpletuner.recipes.recipe import Recipe
from simpletuner.settings import Loaded, settings_as_json
from simpletuner.settings.declared.errors import is_secret
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.files.config_files import PREFIX
from simpletuner.settings.files.raw_values import RawValue, Source, naming_places
from simpletuner.settings.resolving.sources import from_flags
from simpletuner.settings.rules.rules import LORA_RATE
from simpletuner.settings.showing.export import Exported, export
from simpletuner.settings.showing.scaffold import RIVALS, scaffold_toml
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.paths import shown_path
from simpletuner.tools.run_check import check_run, load_run

WIDTH = 118


@dataclass(frozen=True)
class NewConfig:
    """The text of a TOML file, and that of the dataset file that it names; empty without one."""

    text: str
    datasets_file: str = ""
    datasets: str = ""
    warnings: tuple[str, ...] = ()


def own_output_dir(target: str, taken: Collection[str] = (), root: Path = Path()) -> str:
    """Folder for the runs of the config file `target`, which no other file says and in which nothing is.

    A folder of runs is one project's: two files with one output_dir would be taken for the same run.
    """
    path = Path(target)
    stem = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    name = re.sub(r"[^\w. -]+", "-", stem).strip(". ") or "run"
    # A run of the default output_dir is all of that folder: runs in it are not listed.
    parent = "outputs/" if (root / "output" / "checkpoints").exists() else "output/"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    free = (each for each in names if f"{parent}{each}" not in taken and not os.path.lexists(root / parent / each))
    return f"{parent}{next(free)}"


def new_config(given: Mapping[str, object], recipe: str = "", target: str = "config/config.toml") -> NewConfig:
    """New config file, for `target`: the typed flags, then those of the recipe.

    Raises what `train` would for the settings, the model and, where they are named, the images; SettingsError
    for an unknown or unfit recipe, a folder beside a recipe with datasets of its own, and a target that is no
    TOML.
    """
    refuse_other_format(target)
    found = without_rivals(find_recipe(recipe), given) if recipe else None
    if found:
        refuse_beside(found, given)
    flags = from_flags(given)
    loaded = load_run([source_of(found), flags] if found else [flags], complete=False)
    if not loaded.settings.model.model_family:  # after what was mistyped: --model_famly is no missing family
        known = [name for name, preset in presets().items() if preset.family_class]
        raise SettingsError("--model_family is missing: say what to train", f"known families: {', '.join(known)}")
    refuse_secrets(loaded)
    check_trainable(loaded.settings.model)
    as_json = settings_as_json(loaded)
    origins = loaded.origins.items()
    typed = {name: as_json[name] for name, origin in origins if origin.source == flags.name and name in as_json}
    new = (
        from_recipe(found, loaded.settings, target, typed)
        if found
        else from_flags_alone(loaded.settings, target, typed)
    )
    return replace(new, warnings=check_as_train(new.text, target, typed))


def refuse_other_format(target: str) -> None:
    """Raise SettingsError for the name of no TOML file: `train --config` reads a file as its suffix says."""
    path = Path(target)
    if path.suffix.lower() != ".toml" and not target.startswith("/dev/"):
        raise SettingsError(f"{shown_path(path)}: a new config file is TOML", "give it a name that ends in .toml")


def without_rivals(recipe: Recipe, given: Mapping[str, object]) -> Recipe:
    """Return the recipe without its values that what was typed decides by another name."""
    left_out = {own for typed, own in RIVALS.items() if typed in given}
    return recipe.model_copy(update={"settings": {k: v for k, v in recipe.settings.items() if k not in left_out}})


def refuse_beside(recipe: Recipe, given: Mapping[str, object]) -> None:
    """Raise SettingsError for what a recipe decides, and was typed otherwise."""
    kinds = {"model_family": recipe.model_family, "model_type": recipe.settings["model_type"].value}
    for name, own in kinds.items():
        if normalize_name(given.get(name, "")) not in ("", own):
            raise SettingsError(
                f"recipe {recipe.name} is for {name} = {own}, not {given[name]}",
                f"the recipe has its {name}: leave it out",
            )
    if recipe.datasets and "instance_data_dir" in given:
        message = f"recipe {recipe.name} lists datasets, in place of instance_data_dir"
        raise SettingsError(message, "leave it out, and set the folders in the list")


def refuse_secrets(loaded: Loaded) -> None:
    """Raise SettingsError for a secret among the flags: a file of settings would show it."""
    for name, value in loaded.origins.items():
        if is_secret(name) and value.given:
            message = f"{name} is a secret, which `config init` writes into no file"
            raise SettingsError(message, f"leave it out, and set {PREFIX}{name.upper()} in the environment")


def check_as_train(text: str, target: str, typed: Collection[str]) -> tuple[str, ...]:
    """Warnings of `train` for the text of a config file. Raises what it would: of images if one names them.

    A value that was typed is named as a flag: the file does not exist yet.
    """
    values = tomllib.loads(text)
    given = [RawValue(name, value, "flag" if name in typed else target) for name, value in values.items()]
    loaded = load_run([Source(target, given)])
    has_images = not {"instance_data_dir", "data_backend_config"}.isdisjoint(typed)
    return (check_run if has_images else check_runnable)(loaded).warnings


def from_flags_alone(settings: Settings, target: str, typed: Mapping[str, object]) -> NewConfig:
    notes = {}
    own: dict[str, Any] = {"output_dir": typed.get("output_dir") or own_output_dir(target)}
    if settings.model.model_type == "lora" and "learning_rate" not in typed:
        own["learning_rate"] = LORA_RATE
        notes["learning_rate"] = "ten times the default, which is for all weights (docs/lora.md)"
    return NewConfig(scaffold_toml(settings, {**own, **typed}, notes))


def from_recipe(recipe: Recipe, settings: Settings, target: str, typed: Mapping[str, object]) -> NewConfig:
    values = {name: each.value for name, each in recipe.settings.items()}
    notes = {name: each.grounds() for name, each in recipe.settings.items()}
    notes |= {
        name: f"in the recipe {values[name]}: {notes[name]}"
        for name in typed
        if typed[name] != values.get(name, typed[name])
    }
    if typed.keys().isdisjoint(("gradient_accumulation_steps", "global_batch_size")):
        share_batch(settings.launch.num_processes, values, notes)
    if recipe.model_flavour != settings.model.model_flavour:
        notes["model_flavour"] = f"the recipe is for {recipe.model_flavour}: its numbers are not proven for another one"
    datasets_file = ""
    if recipe.datasets and "data_backend_config" not in typed:
        datasets_file = values["data_backend_config"] = str(Path(target).with_suffix(".datasets.json"))
        of_datasets = (f"{key} = {each.value}: {each.grounds()}" for key, each in recipe.dataset_values.items())
        notes["data_backend_config"] = "\n# ".join(["set its folders to your own", *of_datasets])
    values["output_dir"] = typed.get("output_dir") or own_output_dir(target)
    text = scaffold_toml(settings, {**values, **typed}, notes, [*head_of(recipe)])
    return NewConfig(text, datasets_file, recipe.datasets_text() if datasets_file else "")


def share_batch(num_processes: int, values: dict[str, Any], notes: dict[str, str]) -> None:
    """Divide the steps of accumulation by the number of GPUs, so that a step has the source's samples."""
    name = "gradient_accumulation_steps"
    steps = values[name]
    if num_processes == 1:
        return
    if steps % num_processes:
        notes[name] += f"; with {num_processes} GPUs a step has {num_processes} times as many samples"
    else:
        values[name] = steps // num_processes
        notes[name] += f"; {steps} in the recipe, shared by {num_processes} GPUs"


def head_of(recipe: Recipe) -> Iterator[str]:
    """Yield the comments on top of a recipe's config file: name, version, purpose and sources."""
    yield f"Recipe {recipe.label}: {recipe.title}."
    for title, text in (("Data", recipe.data), ("Expect (advice, not measured)", recipe.expect)):
        yield from textwrap.wrap(f"{title}: {text}", WIDTH, break_on_hyphens=False, break_long_words=False)
    yield "Below, each value of the recipe has its source and what is written there, or is `not proven here`. Sources:"
    for name, source in recipe.sources.items():
        yield f"  {name}: {source.kind}, {source.title}"
        yield f"    {source.url}" + (f" (commit {source.commit[:12]})" if source.commit else "")


def export_checked(loaded: Loaded, to: str, everything: bool) -> Exported:
    """Return settings in a format, after the checks that are made before a file is written.

    Raises SettingsError for a denoiser that cannot be split, and for a format that cannot say them.
    """
    with naming_places(loaded.origins, "model_family", "model_flavour", "context_parallel_size"):
        check_context_parallel(loaded.settings)
    return export(loaded, to, everything)
