"""Names of recipes for the tab key."""

from __future__ import annotations


def complete_recipe(typed: str) -> list[tuple[str, str]]:
    """Return the recipes of this package that begin as typed, each with its title."""
    from simpletuner.recipes.library import recipes

    return [(recipe.name, recipe.title) for recipe in recipes() if recipe.name.startswith(typed)]
