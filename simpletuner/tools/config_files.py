"""Config files that are written: one to start from, and settings in the formats of other programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
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


def new_config(
    model_family: str, model_flavour: str, num_processes: str, recipe: str = "", target: str = "config/config.toml"
) -> NewConfig:
    """Return a config file to start from, which will be `target`; `recipe` is a recipe's name or file.

    Raises SettingsError for a family that cannot be trained, and for a recipe that is not known or not for it.
    """
    found = find_recipe(recipe) if recipe else None
    if found and normalize_name(model_family) not in ("", found.model_family):
        raise SettingsError(
            f"recipe {found.name} is for model_family = {found.model_family}, not {model_family}",
            "the recipe has its family: leave out --model_family",
        )
    if not found and not model_family:
        known = [name for name, preset in presets().items() if preset.family_class]
        raise SettingsError("--model_family is missing: say what to train", f"known families: {', '.join(known)}")
    given = {"model_family": model_family, "model_flavour": model_flavour, "num_processes": num_processes}
    flags = from_flags({name: value for name, value in given.items() if value})
    settings = checked([source_of(found), flags] if found else [flags])
    return from_recipe(found, settings, target) if found else NewConfig(scaffold_toml(settings))


def checked(sources: list[Source]) -> Settings:
    settings = resolve(sources, complete=False).settings
    check_trainable(settings.model)
    return settings


def from_recipe(recipe: Recipe, settings: Settings, target: str) -> NewConfig:
    values = {name: each.value for name, each in recipe.settings.items()}
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
