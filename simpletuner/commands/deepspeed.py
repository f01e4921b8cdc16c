"""`simpletuner deepspeed`: build a configuration and see what it costs, check one, list templates."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.commands.output_file import refuse_overwriting, save
from simpletuner.errors import SettingsError
from simpletuner.report import Report

if TYPE_CHECKING:
    from simpletuner.commands.deepspeed_builder import Builder

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


class Stage(StrEnum):
    """What to share out over the ranks."""

    ONE = "1"
    TWO = "2"
    THREE = "3"
    AUTO = "auto"


def build_deepspeed() -> typer.Typer:
    """Return the commands of `simpletuner deepspeed`."""
    help_text = "Build and check configurations of DeepSpeed ZeRO."
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help_text)
    app.command("build", context_settings=UNKNOWN_FLAGS)(with_settings(build))
    app.command("validate")(validate)
    app.command("templates")(list_templates)
    return app


def build(
    flags: Mapping[str, Any],
    config: Path | None,
    *,
    stage: Annotated[Stage | None, typer.Option("--stage", help="ZeRO stage; auto: the lowest that fits.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu_memory", help="Memory of each GPU, such as 24GiB.", metavar="BYTES")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host_memory", help="Memory of each machine; empty: enough.", metavar="BYTES")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option("--parameters", help="Of the model; empty: as its files say.", metavar="NUMBER")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", help="Start from this template.", metavar="NAME")
    ] = None,
    save_template: Annotated[
        str | None, typer.Option("--save_template", help="Keep the result under this name.", metavar="NAME")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write to this file instead of stdout.")] = None,
    apply: Annotated[
        Path | None, typer.Option("--apply", help="Name the result in this config file.", metavar="FILE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Build DeepSpeed's JSON and see what it takes.

    Asks question by question in a terminal, or takes flags. What nobody chose stays `auto`: settings fill it in.
    """
    from simpletuner.commands.deepspeed_builder import Builder
    from simpletuner.commands.wizard import DEFAULT_OUTPUT
    from simpletuner.deepspeed.platform_support import check_platform
    from simpletuner.deepspeed.template_files import as_toml, own_path

    check_platform()
    output = output or (apply and apply.with_name(DEFAULT_OUTPUT.name))
    kept = own_path(save_template) if save_template is not None else None
    for path in filter(None, (output, kept)):
        refuse_overwriting(path, force)
    if output is not None and apply is not None and output.resolve() == apply.resolve():
        raise SettingsError(f"{apply} is to name the result, and cannot be it", "give another --output")
    report = Report()
    typed = dict(flags) | ({"zero_stage": stage.value} if stage and stage is not Stage.AUTO else {})
    builder = Builder.of(typed, config, template, apply, gpu_memory, host_memory, parameters)
    asks = stage is not Stage.AUTO and builder.load().settings.parallel.zero_stage is None
    if stage is Stage.AUTO:
        report.say(builder.choose())
    elif asks:
        output = asked(report, builder, output, force)
    result = builder.result()
    result.warn(report)
    result.tell(report)
    if result.lack and not asks:  # who was asked has seen at every question what fits
        builder.refuse_lack(result.lack)
    if apply is not None:
        builder.check_in(apply, result.json)
    write(report, result.json, output, apply)
    if kept is not None:
        save(kept, as_toml(result.json))
        report.say(f"kept as {kept}: --template={save_template}")


def asked(report: Report, builder: Builder, output: Path | None, force: bool) -> Path:
    """Ask a person for what is not chosen yet, and return where to write. Raises SettingsError if there is nobody."""
    from simpletuner.commands.wizard import Wizard

    if not sys.stdin.isatty():
        raise SettingsError(
            "nothing is chosen, and nobody is here to ask",
            "say --stage=2, --stage=auto --gpu_memory=24GiB, or --template=NAME",
        )
    dialogue = Wizard(report, builder)
    dialogue.run()
    return output or dialogue.file(force)


def write(report: Report, config: Mapping[str, Any], output: Path | None, apply: Path | None) -> None:
    """Write a configuration to a file, and that file's name into a config file, or all to stdout."""
    from simpletuner.settings.deepspeed.source import NAME
    from simpletuner.settings.editing import edit_text, set_in_file

    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        report.text(text)
        return
    if apply is None:
        save(output, text)
        report.say(f"{output} is written: set {NAME} to it, or `simpletuner train --{NAME}={output}`")
        return
    edit_text(apply, NAME, str(output))  # raises before anything is written
    save(output, text)
    set_in_file(apply, NAME, str(output))
    report.say(f"{output} is written, and {apply} names it: `simpletuner train --config {apply}`")


def validate(
    file: Annotated[Path, typer.Argument(help="DeepSpeed's JSON.")],
    num_processes: Annotated[
        str, typer.Option("--num_processes", help="Ranks, for the arithmetic of the batch.", metavar="INTEGER")
    ] = "1",
    as_json: AsJson = False,
) -> None:
    """Check a DeepSpeed JSON. Shows the settings that it becomes, and what is kept for DeepSpeed."""
    from simpletuner.deepspeed.checks import check_zero
    from simpletuner.settings.loading import explain_settings, resolve
    from simpletuner.settings.sources import from_flags

    report = Report()
    ranks = {"num_processes": num_processes} if num_processes != "1" else {}
    loaded = resolve([from_flags({"deepspeed_config": str(file), **ranks})], complete=False)
    for warning in (*loaded.warnings, *check_zero(loaded.settings)):
        report.warn(warning)
    rows = [row for row in explain_settings(loaded) if row.name in loaded.origins]
    if as_json:
        report.json({row.name: row.as_json() for row in rows})
    else:
        report.data_table("", [row.cells() for row in rows], ("setting", "value", "from", "because"))
    report.say(f"{file}: valid for {num_processes} rank{'s' * (num_processes != '1')}")


def list_templates(as_json: AsJson = False) -> None:
    """List templates: name, what for, where. Your own lie in SIMPLETUNER_HOME (else ~/.simpletuner)."""
    from simpletuner.deepspeed.template_files import templates

    found = templates(os.environ).values()
    if as_json:
        Report().json([{"name": one.name, "path": str(one.path), "config": dict(one.config)} for one in found])
        return
    rows = [(one.name, one.description, one.path if one.is_own else "simpletuner") for one in found]
    Report().data_table("", rows, ("name", "what for", "from"))
