"""Find recipes by name: those of this package, or a file of the user's."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_trainable
from simpletuner.recipes.recipe import Recipe
from simpletuner.settings.declared.errors import nearest, shorten
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.files.config_files import explain_parsing
from simpletuner.settings.files.formats import read_text
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.resolving.loading import resolve
from simpletuner.settings.values.spelling import normalize_name

FOLDER = Path(__file__).parent
SUFFIX = ".toml"


def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}")))


def recipes() -> list[Recipe]:
    return [read_recipe(FOLDER / f"{name}{SUFFIX}") for name in recipe_names()]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name, or that of a path that ends in .toml.

    Raises SettingsError for one that does not exist, is not valid, or is for a model that cannot be trained.
    """
    if name.endswith(SUFFIX):
        return checked(read_recipe(Path(name)))
    spelled = {normalize_name(known): known for known in recipe_names()}
    found = spelled.get(normalize_name(name))
    if found is None:
        like = nearest(name, recipe_names())
        raise SettingsError(f"there is no recipe {shorten(name)}{like}", "`simpletuner recipes` lists all")
    return checked(read_recipe(FOLDER / f"{found}{SUFFIX}"))


def checked(recipe: Recipe) -> Recipe:
    """Return a recipe whose model can be trained, and whose values its settings accept."""
    check_trainable(Model(model_family=recipe.model_family, model_flavour=recipe.model_flavour))
    resolve([source_of(recipe)], complete=False)
    return recipe


def source_of(recipe: Recipe) -> Source:
    """Return a recipe's values as a source of settings, which mistakes name."""
    place = f"recipe {recipe.name}"
    model = {"model_family": recipe.model_family, "model_flavour": recipe.model_flavour}
    values = model | {name: chosen.value for name, chosen in recipe.settings.items()}
    return Source(place, [RawValue(name, value, place) for name, value in values.items()])


def read_recipe(path: Path) -> Recipe:
    with explain_parsing(path, "`simpletuner recipes` lists those that there are", "docs/recipes.md shows such a file"):
        content = tomllib.loads(read_text(path))
    try:
        return Recipe.model_validate({"name": path.stem} | content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise SettingsError(
            f"{path}: {where}: {message}" if where else f"{path}: {message}", "docs/recipes.md shows such a file"
        ) from None
