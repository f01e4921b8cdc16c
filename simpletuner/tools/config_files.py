"""Config files that are written: one to start from, and settings in the formats of other programs."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_trainable, presets
from simpletuner.models.catalog.support import check_context_parallel
from simpletuner.recipes.library import find_recipe, source_of
from simpletuner.recipes.recipe import Recipe
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.files.raw_values import Source
from simpletuner.settings.resolving.loading import resolve
from simpletuner.settings.resolving.places import naming_places
from simpletuner.settings.resolving.sources import from_flags
from simpletuner.settings.rules.rules import LORA_RATE
from simpletuner.settings.showing.export import Exported, export
from simpletuner.settings.showing.scaffold import scaffold_toml
from simpletuner.settings.values.spelling import normalize_name

WIDTH = 118


@dataclass(frozen=True)
class NewConfig:
    """The text of a TOML file, and that of the dataset file that it names; empty without one."""

    text: str
    datasets_file: str = ""
    datasets: str = ""


def own_output_dir(target: str, taken: Collection[str] = (), root: Path = Path()) -> str:
    """Return a folder for the runs of the config file `target`, which no other file says and in which nothing is.

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


def new_config(
    model_family: str,
    model_flavour: str,
    num_processes: str,
    recipe: str = "",
    target: str = "config/config.toml",
    model_type: str = "",
    output_dir: str = "",
    images: Path | None = None,
) -> NewConfig:
    """Return a config file to start from, which will be `target`; `recipe` is a name or file, `images` a folder.

    Raises SettingsError for a family that cannot be trained, for a recipe that is not known or not for it, and for a
    folder beside a recipe that lists datasets.
    """
    found = find_recipe(recipe) if recipe else None
    if found and normalize_name(model_family) not in ("", found.model_family):
        raise SettingsError(
            f"recipe {found.name} is for model_family = {found.model_family}, not {model_family}",
            "the recipe has its model_family: leave it out",
        )
    if not found and not model_family:
        known = [name for name, preset in presets().items() if preset.family_class]
        raise SettingsError("--model_family is missing: say what to train", f"known families: {', '.join(known)}")
    if found and model_type not in ("", kind := found.settings["model_type"].value):
        raise SettingsError(
            f"recipe {found.name} is for model_type = {kind}, not {model_type}",
            "the recipe has its model_type: leave it out",
        )
    given = {"model_family": model_family, "model_flavour": model_flavour, "num_processes": num_processes}
    given["model_type"] = model_type
    flags = from_flags({name: value for name, value in given.items() if value})
    settings = checked([source_of(found), flags] if found else [flags])
    own = {"output_dir": output_dir or own_output_dir(target)}
    if images is not None:
        if found and found.datasets:
            message = f"recipe {found.name} lists datasets, in place of instance_data_dir"
            raise SettingsError(message, "leave it out, and set the folders in the list")
        own["instance_data_dir"] = str(images)
    if found:
        return from_recipe(found, settings, target, own)
    notes = {}
    if settings.model.model_type == "lora":
        own |= {"model_type": "lora", "learning_rate": LORA_RATE}
        notes["learning_rate"] = "ten times the default, which is for all weights (docs/lora.md)"
    return NewConfig(scaffold_toml(settings, own, notes))


def checked(sources: list[Source]) -> Settings:
    settings = resolve(sources, complete=False).settings
    check_trainable(settings.model)
    return settings


def from_recipe(recipe: Recipe, settings: Settings, target: str, own: Mapping[str, Any]) -> NewConfig:
    values = {**own, **{name: each.value for name, each in recipe.settings.items()}}
    notes = {name: each.grounds() for name, each in recipe.settings.items()}
    share_batch(settings.launch.num_processes, values, notes)
    if recipe.model_flavour != settings.model.model_flavour:
        notes["model_flavour"] = f"the recipe is for {recipe.model_flavour}: its numbers are not proven for another one"
    datasets_file = ""
    if recipe.datasets:
        datasets_file = values["data_backend_config"] = str(Path(target).with_suffix(".datasets.json"))
        of_datasets = (f"{key} = {each.value}: {each.grounds()}" for key, each in recipe.dataset_values.items())
        notes["data_backend_config"] = "\n# ".join(["set its folders to your own", *of_datasets])
    text = scaffold_toml(settings, values, notes, [*head_of(recipe)])
    return NewConfig(text, datasets_file, recipe.datasets_text() if datasets_file else "")


def share_batch(num_processes: int, values: dict[str, Any], notes: dict[str, str]) -> None:
    """Divide the steps of accumulation by the number of GPUs, so that as many samples make a step as in the source."""
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
    """Yield the comments on top of a recipe's config file: its name and version, what it is for, and its sources."""
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
