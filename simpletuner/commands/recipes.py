"""`simpletuner recipes`: settings to start a fine-tune from, with the source of every number."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.commands.listing import AsJson
from simpletuner.commands.shell.completions import complete_recipe
from simpletuner.report import Report
from simpletuner.settings.values.spelling import as_text

if TYPE_CHECKING:
    from simpletuner.recipes.recipe import Recipe

WIDTH = 100

Name = Annotated[
    str,
    typer.Argument(
        help="Show all of this one: each value, its source, and what to expect. Or a recipe's .toml file.",
        metavar="NAME",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]


def recipes(name: Name = "", as_json: AsJson = False) -> None:
    """List recipes: values to start a fine-tune from, each number with its source."""
    from simpletuner.recipes import library

    report = Report()
    if name:
        print_recipe(report, library.find_recipe(name), as_json)
    elif as_json:
        report.json([described(recipe) for recipe in library.recipes()])
    else:
        rows = [row_of(recipe) for recipe in library.recipes()]
        report.data_table("", rows, ("recipe", "purpose", "model", "GPU memory", "version"))
        report.say("`simpletuner recipes NAME` shows one; `simpletuner config init --recipe=NAME` starts from it")


def row_of(recipe: Recipe) -> tuple[str, ...]:
    memory = f"{recipe.memory_gib:.1f} GiB" if recipe.memory_gib else "not counted"
    model = f"{recipe.model_family} {recipe.model_flavour}"
    return recipe.name, recipe.purpose, model, memory, f"{recipe.version} of {recipe.date}"


def described(recipe: Recipe) -> dict[str, object]:
    return recipe.model_dump(mode="json", exclude_defaults=True)


def print_recipe(report: Report, recipe: Recipe, as_json: bool) -> None:
    if as_json:
        report.json(described(recipe))
        return
    report.line(f"{recipe.label}: {recipe.title}", style="bold")
    report.line(f"model: {recipe.model_family} {recipe.model_flavour}; purpose: {recipe.purpose}")
    if recipe.memory_gib:
        report.line(f"memory: {recipe.memory_gib:.1f} GiB of one GPU, as `simpletuner plan` counts it")
    for title, text in (("data", recipe.data), ("expect (advice, not measured)", recipe.expect)):
        for line in textwrap.wrap(f"{title}: {text}", min(WIDTH, report.data.width), break_on_hyphens=False):
            report.line(line)
    chosen = {**recipe.settings, **{f"datasets: {key}": each for key, each in recipe.dataset_values.items()}}
    rows = [
        (name, as_text(each.value), each.source, "; ".join(filter(None, (each.says, each.because))))
        for name, each in chosen.items()
    ]
    report.data_table("", rows, ("setting", "value", "source", "there, or why"))
    for name, source in recipe.sources.items():
        report.line(f"{name}: {source.kind}, {source.title}")
        report.line(f"  {source.url}" + (f" (commit {source.commit[:12]})" if source.commit else ""), style="dim")
