"""`simpletuner models`: the model families and flavours, which of them can be trained, and the proof of one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.commands.listing import AsJson
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.preset import NEEDS_CLASS
from simpletuner.report import Report
from simpletuner.system.importing import no_collection

if TYPE_CHECKING:
    from simpletuner.models.automatic.findings import Check
    from simpletuner.models.catalog.preset import Flavour, Preset

WIDTH = 80

ANY = {
    "trainable": True,
    "by_its_pipeline": True,
    "objective": "any other pipeline of diffusers",
    "text_encoders": "its own encoders",
    "unsplittable": NEEDS_CLASS,
    "flavours": [],
}
"""Facts of model_family=auto, as those of a family."""

Checked = Annotated[
    str,
    typer.Option(
        "--check",
        metavar="MODEL",
        help="Prove on a pipeline's own components that model_family=auto trains it: a folder or a hub id.",
        show_default=False,
    ),
]
ClassPath = Annotated[
    str,
    typer.Option(
        "--class",
        metavar="MODULE:CLASS",
        help="With --check: compare this class of a family, instead of the built-in one.",
        show_default=False,
    ),
]


def models(as_json: AsJson = False, check: Checked = "", class_path: ClassPath = "") -> None:
    """List model families and flavours: size, objective, what they need. With --check: prove one pipeline."""
    if check:
        print_check(check, class_path, as_json)
        return
    if class_path:
        raise SettingsError("--class is for --check", "name a pipeline with --check=FOLDER")
    list_models(as_json)


def print_check(name: str, class_path: str, as_json: bool) -> None:
    """Print what was shown of a pipeline. Raises SettingsError for one that did not pass."""
    from simpletuner.models.catalog.support import check_path
    from simpletuner.settings.declared.sections import Model

    check_path(Model(pretrained_model_name_or_path=name))  # before torch is imported
    with no_collection():
        from simpletuner.tools.model_check import check_model_folder

    report = Report()
    with report.phase("proving the pipeline"):
        found = check_model_folder(name, class_path)
    if as_json:
        report.json(found.as_json())
    else:
        rows = [(each.name, "ok" if each.passed else "differs", format_measure(each)) for each in found.checks]
        report.data_table(f"{found.pipeline} in {found.model}", rows, ("check", "", "finding"))
    if found.refusal is not None:
        raise found.refusal


def format_measure(check: Check) -> str:
    if check.off is None:
        return check.finding
    return f"{check.finding} (off by {check.off:.1g}; allowed {check.limit:g})"


def list_models(as_json: bool) -> None:
    from simpletuner.models.catalog.registry import AUTO, installed_families, presets

    report = Report()
    families = [*(family_as_json(name, preset) for name, preset in presets().items()), {"model_family": AUTO, **ANY}]
    installed = installed_families()
    if as_json:
        # The key `traits` is from before families were classes; scripts may read it.
        report.json(families + [{"model_family": name, "traits": path} for name, path in installed.items()])
        return
    for family in families:
        print_family(report, family)
    for name, path in installed.items():
        report.line(name, style="bold")
        report.line(f"  from an installed package: {path}", style="dim")
    without = [name for name, preset in presets().items() if preset.family_class and preset.tiny is None]
    but = f" but {', '.join(without)}" if without else ""
    report.say(
        f"hint: every built-in family that can be trained{but} has a flavour `tiny`, with random weights", style="dim"
    )


def family_as_json(name: str, preset: Preset) -> dict[str, object]:
    return {
        "model_family": name,
        "trainable": bool(preset.family_class),
        "by_its_pipeline": preset.is_automatic,
        "objective": preset.objective,
        "text_encoders": preset.text_encoders,
        "unsplittable": preset.unsplittable,
        "flavours": [flavour_as_json(preset, flavour, published) for flavour, published in preset.flavours.items()],
    }


def flavour_as_json(preset: Preset, name: str, flavour: Flavour) -> dict[str, object]:
    from simpletuner.models.catalog.registry import LICENSES, alltoall_sizes, heads_of

    return {
        "model_flavour": name,
        "hub": flavour.hub,
        "denoiser": flavour.architecture.class_name,
        "parameters": flavour.architecture.parameters,
        "untrainable": flavour.untrainable,
        "license": flavour.license,
        "commercial_use": LICENSES[flavour.license].commercial_use if flavour.license else "",
        "alltoall_sizes": alltoall_sizes(heads_of(preset, flavour.architecture.config)),
    }


def print_family(report: Report, family: dict[str, Any]) -> None:
    facts = [
        family["objective"],
        f"text by {family['text_encoders']}",
        *["trains by its pipeline, proven at each start"] * family["by_its_pipeline"],
        *["blocks can be detected, no training yet"] * (not family["trainable"]),
    ]
    report.line(family["model_family"], style="bold")
    print_indented(report, ["; ".join(facts)])
    flavours = family["flavours"]
    if not flavours:
        report.line("  no published checkpoint is known: pretrained_model_name_or_path names a folder")
    name_width = max((len(flavour["model_flavour"]) for flavour in flavours), default=0)
    for flavour in flavours:
        report.line(format_flavour(flavour, name_width, "*" if flavour is flavours[0] else " "))
    notes = [f"no training of {', '.join(names)}: {why}" for why, names in by_value(flavours, "untrainable").items()]
    notes += license_notes(flavours)
    notes += [f"context_parallel_size: {format_sizes(family)}"] * family["trainable"]
    print_indented(report, notes)


def license_notes(flavours: list[dict[str, Any]]) -> Iterator[str]:
    from simpletuner.models.catalog.registry import describe_license

    groups = by_value(flavours, "license")
    for name, flavour_names in groups.items():
        of = "" if len(flavour_names) == len(flavours) else f" of {', '.join(flavour_names)}"
        yield f"license{of}: {describe_license(name)}"
    unknown = [flavour["model_flavour"] for flavour in flavours if not flavour["license"]]
    if unknown:
        of = f" of {', '.join(unknown)}" if groups else ""
        yield f"license{of}: see the card at the hub"


def by_value(flavours: list[dict[str, Any]], key: str) -> dict[str, list[str]]:
    """Return the names of the flavours by what each has under a key, those that have something."""
    found: dict[str, list[str]] = {}
    for flavour in (each for each in flavours if each[key]):
        found.setdefault(flavour[key], []).append(flavour["model_flavour"])
    return found


def format_sizes(family: dict[str, Any]) -> str:
    """Format how many ranks can share a sample's tokens; flavours with other heads are named."""
    if family["unsplittable"]:
        return f"1, since {family['unsplittable']}"
    names: dict[str, list[str]] = {}
    for flavour in (each for each in family["flavours"] if not each["untrainable"]):
        names.setdefault(", ".join(map(str, flavour["alltoall_sizes"])), []).append(flavour["model_flavour"])
    several = len(names) > 1
    by_alltoall = [sizes + f" ({', '.join(group)})" * several for sizes, group in names.items()]
    return f"any by allgather; by alltoall {'; '.join(by_alltoall)}"


def format_flavour(flavour: dict[str, Any], name_width: int, mark: str) -> str:
    """Format a flavour's name, size and hub id; a long id is on its own line."""
    from simpletuner.system.numbers import format_count

    size = format_count(flavour["parameters"]) if flavour["parameters"] else "?"
    start = f"  {mark} {flavour['model_flavour']:<{name_width}}  {size:>6}"
    fits = len(start) + 2 + len(flavour["hub"]) <= WIDTH
    return f"{start}  {flavour['hub']}" if fits else f"{start}\n      {flavour['hub']}"


def print_indented(report: Report, texts: Sequence[str]) -> None:
    """Print at once: rich takes 0.1 ms for each call."""
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False)]
    if lines:
        report.line("\n".join(f"  {line}" for line in lines), style="dim")
