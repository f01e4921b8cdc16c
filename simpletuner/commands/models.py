"""`simpletuner models`: what can be trained, what can be looked at, and what each needs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.report import Report

if TYPE_CHECKING:
    from simpletuner.models.registry import Flavour

WIDTH = 80

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def models(as_json: AsJson = False) -> None:
    """List model families and flavours: size, objective, what they need."""
    from simpletuner.models.registry import FAMILIES, installed_families

    report = Report()
    families = [described(key) for key in FAMILIES]
    installed = installed_families()
    if as_json:
        report.json(families + [{"model_family": key, "traits": path} for key, path in installed.items()])
        return
    for family in families:
        show(report, family)
    for key, path in installed.items():
        report.line(key, style="bold")
        report.line(f"  from an installed package: {path}", style="dim")
    report.say(
        "hint: every family that can be trained has a flavour `tiny`, built here with random weights", style="dim"
    )


def described(key: str) -> dict[str, Any]:
    """Return what there is to say of a family."""
    from simpletuner.models.registry import FAMILIES, flavours_of

    entry = FAMILIES[key]
    flavours = flavours_of(key)
    return {
        "model_family": key,
        "trainable": bool(entry.traits),
        "objective": entry.objective,
        "text_encoders": entry.text_encoders,
        "flavours": [flavour_as_json(name, flavour) for name, flavour in flavours.items()],
    }


def flavour_as_json(name: str, flavour: Flavour) -> dict[str, Any]:
    """Return what there is to say of a flavour."""
    return {
        "model_flavour": name,
        "hub": flavour.hub,
        "denoiser": flavour.architecture.class_name,
        "parameters": flavour.architecture.parameters,
        "untrainable": flavour.untrainable,
    }


def show(report: Report, family: dict[str, Any]) -> None:
    """Print a family and below it its flavours, the default first."""
    traits = [
        family["objective"],
        f"text by {family['text_encoders']}",
        *["blocks can be detected, no training yet"] * (not family["trainable"]),
    ]
    report.line(family["model_family"], style="bold")
    show_indented(report, "; ".join(traits))
    flavours = family["flavours"]
    name_width = max((len(flavour["model_flavour"]) for flavour in flavours), default=0)
    for flavour in flavours:
        report.line(line_of(flavour, name_width, "*" if flavour is flavours[0] else " "))
    for why in dict.fromkeys(flavour["untrainable"] for flavour in flavours if flavour["untrainable"]):
        names = [flavour["model_flavour"] for flavour in flavours if flavour["untrainable"] == why]
        show_indented(report, f"no training of {', '.join(names)}: {why}")


def line_of(flavour: dict[str, Any], name_width: int, mark: str) -> str:
    """Return a flavour's name, size and hub id; a long id on a line of its own."""
    from simpletuner.system.numbers import format_count

    size = format_count(flavour["parameters"]) if flavour["parameters"] else "?"
    start = f"  {mark} {flavour['model_flavour']:<{name_width}}  {size:>6}"
    fits = len(start) + 2 + len(flavour["hub"]) <= WIDTH
    return f"{start}  {flavour['hub']}" if fits else f"{start}\n      {flavour['hub']}"


def show_indented(report: Report, text: str) -> None:
    """Print text in lines below a family's name."""
    for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False):
        report.line(f"  {line}", style="dim")
