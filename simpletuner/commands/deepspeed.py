"""`simpletuner deepspeed`: build a configuration and see the memory it needs, check one, list templates."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.commands.help import SettingsCommand, parse_path, path_argument, path_option
from simpletuner.commands.listing import AsJson, CommandGroup
from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.counting.zero_memory import stage_candidates
from simpletuner.deepspeed.builder import OFFLOAD_FOLDER, QUESTIONS, DeepSpeedBuilder, Question
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings.declared.knob import shown_default
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.values.spelling import choices_of
from simpletuner.system.files.atomic import refuse_overwriting, save
from simpletuner.system.numbers import format_gib

if TYPE_CHECKING:
    from simpletuner.deepspeed.builder import DeepSpeedBuilder


class StageOption(StrEnum):
    """Values of --stage."""

    ONE = "1"
    TWO = "2"
    THREE = "3"
    AUTO = "auto"


def build_deepspeed() -> typer.Typer:
    help_text = "Build and check configurations of DeepSpeed ZeRO."
    app = CommandGroup(help_text)
    app.command("build", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(build))
    app.command("validate")(validate)
    app.command("templates")(list_templates)
    return app


def build(
    flags: Mapping[str, object],
    config: Path | None,
    *,
    stage: Annotated[
        StageOption | None, typer.Option("--stage", help="ZeRO stage; auto: the lowest that fits.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu_memory", help="Memory of each GPU, such as 24GiB.", metavar="BYTES")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host_memory", help="Memory of each machine; empty: enough.", metavar="BYTES")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option("--parameters", help="Of the model; empty: read from its files.", metavar="NUMBER")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", help="Start from this template.", metavar="NAME")
    ] = None,
    save_template: Annotated[
        str | None, typer.Option("--save_template", help="Save the result under this name.", metavar="NAME")
    ] = None,
    output: Annotated[Path | None, path_option("--output", "Write to this file instead of stdout.")] = None,
    apply: Annotated[Path | None, path_option("--apply", "Name the result in this config file.", "FILE")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Build DeepSpeed's JSON and see the memory it needs.

    Asks one question at a time in a terminal, or takes flags. What is not chosen stays `auto`: settings fill it in.
    """
    from simpletuner.deepspeed.builder import DeepSpeedBuilder, format_template, user_template_path
    from simpletuner.deepspeed.requirements import check_platform

    check_platform()
    output = output or (apply and apply.with_name(DEFAULT_OUTPUT.name))
    template_path = user_template_path(save_template) if save_template is not None else None
    check_targets(output, template_path, apply, force)  # before the first question
    report = Report()
    # Until `auto` has chosen, the stage that allows all offloading: without, --offload_optimizer is refused.
    typed = dict(flags) | ({"zero_stage": "3" if stage is StageOption.AUTO else stage.value} if stage else {})
    builder = DeepSpeedBuilder.from_arguments(typed, config, template, apply, gpu_memory, host_memory, parameters)
    is_interactive = stage is not StageOption.AUTO and builder.load().settings.parallel.zero_stage is None
    if stage is StageOption.AUTO:
        report.say(builder.choose())
    elif is_interactive:
        output = run_wizard(report, builder, output, force)
    result = builder.result()
    result.print_warnings(report)
    result.print_estimate(report)
    if result.shortfall and not is_interactive:  # the wizard has shown after every question what fits
        builder.refuse_shortfall(result.shortfall)
    if apply is not None:
        builder.check_applies(apply, result.json)
    if builder.inline:
        report.say(f"kept of the deepspeed_config in {apply}: {', '.join(sorted(builder.inline))}")
    write(report, result.json, output, apply, force or is_interactive)
    if template_path is not None:
        save(template_path, format_template(result.json), force or is_interactive)
        report.say(f"saved as {template_path}: --template={save_template}")


def check_targets(output: Path | None, template: Path | None, apply: Path | None, force: bool) -> None:
    """Raise SettingsError for a file that would be overwritten, or that is to hold both settings and JSON."""
    for path in filter(None, (output, template)):
        refuse_overwriting(path, force)
    if output is not None and apply is not None and output.resolve() == apply.resolve():
        raise SettingsError(f"{apply} cannot be both --output and --apply", "give another --output")


def run_wizard(report: Report, builder: DeepSpeedBuilder, output: Path | None, force: bool) -> Path:
    """Ask for what is not chosen yet, and return where to write. Raises SettingsError without a terminal."""

    if not sys.stdin.isatty():
        raise SettingsError(
            "--stage is required without a terminal",
            "give --stage=2, --stage=auto --gpu_memory=24GiB, or --template=NAME",
        )
    wizard = Wizard(report, builder)
    wizard.run()
    return output or wizard.ask_output(force)


def write(report: Report, config: Mapping[str, Any], output: Path | None, apply: Path | None, replaces: bool) -> None:
    """Write the JSON to stdout, or to a file, whose name is then written into the config file `apply`."""
    from simpletuner.settings.editors.editing import edit_text, set_in_file
    from simpletuner.settings.resolving.deepspeed_source import NAME

    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        report.text(text)
        return
    if apply is None:
        save(output, text, replaces)
        report.say(f"{output} is written: set {NAME} to it, or `simpletuner train --{NAME}={output}`")
        return
    edit_text(apply, NAME, str(output))  # raises before anything is written
    # The JSON first: a config file never names one that is not there.
    save(output, text, replaces)
    set_in_file(apply, NAME, str(output))
    report.say(f"{output} is written, and {apply} names it: `simpletuner train --config {apply}`")


def validate(
    file: Annotated[Path, path_argument("DeepSpeed's JSON.")],
    num_processes: Annotated[
        str, typer.Option("--num_processes", help="Ranks, to check the batch size with.", metavar="INTEGER")
    ] = "1",
    as_json: AsJson = False,
) -> None:
    """Check a DeepSpeed JSON. Shows the settings that it becomes, and what is passed on to DeepSpeed."""
    from simpletuner.deepspeed.requirements import check_settings
    from simpletuner.settings.resolving.loading import resolve
    from simpletuner.settings.resolving.sources import from_flags
    from simpletuner.settings.showing.export import explain_settings

    report = Report()
    ranks = {"num_processes": num_processes} if num_processes != "1" else {}
    loaded = resolve([from_flags({"deepspeed_config": str(file), **ranks})], complete=False)
    for warning in (*loaded.warnings, *check_settings(loaded.settings)):
        report.warn(warning)
    rows = [row for row in explain_settings(loaded) if row.name in loaded.origins]
    if as_json:
        report.json({row.name: row.as_json() for row in rows})
    else:
        report.data_table("", [row.cells() for row in rows], ("setting", "value", "from", "because"))
    report.say(f"{file}: valid for {num_processes} rank{'s' * (num_processes != '1')}")


def list_templates(as_json: AsJson = False) -> None:
    """List templates: name, purpose, file. Your own are in SIMPLETUNER_HOME (else ~/.simpletuner)."""
    from simpletuner.deepspeed.builder import load_templates

    templates = load_templates(os.environ).values()
    if as_json:
        Report().json([{"name": each.name, "path": str(each.path), "config": dict(each.config)} for each in templates])
        return
    rows = [(each.name, each.description, "simpletuner" if each.is_shipped else each.path) for each in templates]
    Report().data_table("", rows, ("name", "purpose", "file"))


DEFAULT_OUTPUT = Path("config/deepspeed.json")


@dataclass
class Wizard:
    """Asks for the settings that no flag, file or template has given."""

    report: Report
    builder: DeepSpeedBuilder

    def run(self) -> None:
        """Ask all questions that apply, and show what has been built so far."""
        for question in QUESTIONS:
            loaded = self.builder.load()
            if question.setting in loaded.origins or not question.applies(loaded.settings.parallel):
                continue
            if question.setting == "zero_stage":
                self.compare_stages()
            self.ask_until_valid(question)
            if loaded.settings.parallel.zero_stage or question.setting == "zero_stage":
                self.show_result()

    def ask_output(self, force: bool) -> Path:
        """Ask where to write, until the file does not exist or may be overwritten."""
        while True:
            path = parse_path(self.report.ask("Write to", default=str(DEFAULT_OUTPUT)))
            if force or not path.is_file() or self.report.confirm(f"{path} exists already: overwrite it?"):
                return path

    def ask_until_valid(self, question: Question) -> None:
        while True:
            answer = self.ask(question)
            answers = {question.setting: answer}
            if answer == "nvme" and self.builder.load().settings.parallel.offload_param_path is None:
                answers[OFFLOAD_FOLDER.setting] = self.ask(OFFLOAD_FOLDER)
            try:
                self.builder.load(**answers)
            except SettingsError as error:
                self.report.error(error)
                continue
            # Only once the settings accept it: a refused answer would make every later question fail, too.
            self.builder.answers |= answers
            return

    def ask(self, question: Question) -> str:
        setting = setting_fields()[question.setting]
        choices = [str(choice) for choice in choices_of(setting.annotation)]
        # Below stage 3 DeepSpeed offloads nothing to files.
        if question.setting.startswith("offload_") and self.builder.load().settings.parallel.zero_stage != 3:
            choices = [choice for choice in choices if choice != "nvme"]
        return self.report.ask(question.text, choices, question.default or shown_default(setting))

    def compare_stages(self) -> None:
        builder = self.builder
        if builder.num_parameters is None:
            self.report.say("with --model_family or --parameters=2.6e9 this would show the memory of each choice")
            return
        has_folder = builder.load().settings.parallel.offload_param_path is not None
        folder = {} if has_folder else {OFFLOAD_FOLDER.setting: "/"}  # any folder: nvme needs one
        rows = []
        for candidate in stage_candidates(with_files=True):
            estimate = builder.estimate(**candidate, **folder)
            needed = (estimate.gpu_bytes, estimate.host_bytes)
            fits = ("no" if builder.budget.shortfall(*needed) else "yes") if builder.budget else ""
            rows.append((*candidate.values(), *map(format_gib, (*needed, estimate.disk_bytes)), fits))
        columns = ("stage", "optimizer", "weights", "per GPU", "per machine", "on its disk", "fits")
        self.report.table(f"{builder.num_parameters:,} parameters", rows, columns)

    def show_result(self) -> None:
        result = self.builder.result()
        self.report.say(json.dumps(result.json, indent=2))
        result.print_estimate(self.report)
        if result.shortfall:
            self.report.say(f"does not fit: it needs {result.shortfall}")
