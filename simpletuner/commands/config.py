"""`simpletuner config`: show, check, start and export settings. Nothing here runs a model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.commands.help import SettingsCommand, path_argument, path_option
from simpletuner.commands.listing import AsJson, CommandGroup
from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.commands.shell.completions import complete_recipe
from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.report import Report
from simpletuner.settings import load, settings_as_json
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.system.files.atomic import refuse_overwriting, save
from simpletuner.system.numbers import count_noun


class Format(StrEnum):
    """Export formats."""

    CLI = "cli"
    JSON = "json"
    TOML = "toml"
    YAML = "yaml"
    ENV = "env"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    KUBEFLOW = "kubeflow"
    SKYPILOT = "skypilot"
    DSTACK = "dstack"
    AI_TOOLKIT = "ai-toolkit"
    KOHYA = "kohya"
    MUSUBI = "musubi"
    DIFFUSION_PIPE = "diffusion-pipe"
    ONETRAINER = "onetrainer"


OF_TRAINERS = (Format.AI_TOOLKIT, Format.KOHYA, Format.MUSUBI, Format.DIFFUSION_PIPE, Format.ONETRAINER)
"""Formats of other trainers."""


class Program(StrEnum):
    """Programs of which a file can be said to be."""

    SD_SCRIPTS = "sd-scripts"
    KOHYA_GUI = "kohya-gui"
    MUSUBI_TUNER = "musubi-tuner"
    DIFFUSION_PIPE = "diffusion-pipe"
    ONETRAINER = "onetrainer"
    AI_TOOLKIT = "ai-toolkit"


Output = Annotated[Path | None, path_option("--output", "Write to this file instead of stdout.")]


def build_config() -> typer.Typer:
    app = CommandGroup("Show, check, start and export settings.")
    app.command("show", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(show))
    app.command("validate")(validate)
    app.command("schema")(schema)
    app.command("docs")(docs)
    app.command("init", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(init))
    app.command("import")(import_original)
    app.command("export", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(export))
    return app


def show(
    flags: Mapping[str, object],
    config: Path | None,
    everything: Annotated[bool, typer.Option("--all", help="Show settings at their default, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is set: each value, where it came from and why."""
    from simpletuner.models.catalog.support import family_defaults
    from simpletuner.settings.showing.export import explain_settings

    report = Report()
    loaded = load(flags, config, complete=False)
    # Defaults that depend on the family, such as flow_schedule_shift, are shown with the value that counts.
    of_family = family_defaults(loaded.settings)
    rows = [
        replace(row, value=of_family[row.name][0], because=of_family[row.name][1]) if row.name in of_family else row
        for row in explain_settings(loaded)
        if everything or row.is_set
    ]
    report.warn_all(loaded.warnings)
    if as_json:
        report.json({row.name: row.as_json() for row in rows})
        return
    if rows:
        report.data_table("", [row.cells() for row in rows], ("setting", "value", "from", "because"))
    if not everything:
        others = count_noun(len(setting_fields()) - len(rows), "setting")
        report.say(f"{others} at their default: `--all` shows them, too", style="dim")


def validate(
    file: Annotated[
        Path | None, path_argument("JSON, TOML, YAML or .env file of settings; else the one that `train` would find.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a config file as `train` would, without running anything."""
    from simpletuner.settings.resolving.sources import collect_from_file, usual_config
    from simpletuner.tools.run_check import check_run, load_run

    file, report = file or usual_config(os.environ), Report()
    try:
        loaded = check_run(load_run(collect_from_file(file)))
    except SimpleTunerError as error:
        if not as_json:
            raise
        report.json({"file": str(file), "valid": False, "mistakes": sentences_of(error), "hint": error.hint})
        raise typer.Exit(int(error.exit_code)) from None
    if as_json:
        warnings = [str(warning) for warning in loaded.warnings]
        report.json({"file": str(file), "valid": True, "settings": len(loaded.origins), "warnings": warnings})
        return
    report.warn_all(loaded.warnings)
    report.say(f"{file}: {count_noun(len(loaded.origins), 'setting')}, all valid")


def sentences_of(error: SimpleTunerError) -> list[str]:
    mistakes = error.mistakes if isinstance(error, SettingsError) else ()
    return [str(mistake) for mistake in mistakes] or [error.message]


def schema() -> None:
    """Print the JSON Schema of config files, for editors."""
    from simpletuner.models.catalog.registry import AUTO, presets
    from simpletuner.settings.showing.scaffold import json_schema

    Report().json(json_schema([*presets(), AUTO]))


def docs(
    original: Annotated[
        bool, typer.Option("--original", help="The page of the original's names, docs/from-the-original.md.")
    ] = False,
) -> None:
    """Print the page of all settings, docs/options.md."""
    from simpletuner.importing.documentation import original_page
    from simpletuner.settings.showing.scaffold import options_page

    Report().text(original_page() if original else options_page())


def init(
    flags: Mapping[str, object],
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="Start from a recipe's values, with their sources; `simpletuner recipes` lists them.",
            metavar="NAME",
            show_default=False,
            autocompletion=complete_recipe,
        ),
    ] = "",
    output: Annotated[Path, path_option("--output", "Where to write it.")] = Path("config/config.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented config file to start from.

    Any setting may be given: it is checked as `train` would, and written into the file.
    """
    from simpletuner.tools.config_files import new_config

    report, new = Report(), new_config(flags, recipe, str(output))
    # The dataset file first: a stop between the two leaves no config that names a file that is missing.
    files = ({Path(new.datasets_file): new.datasets} if new.datasets else {}) | {output: new.text}
    for path in files:
        refuse_overwriting(path, force)
    for path, text in files.items():
        save(path, text, force)
    report.warn_all(new.warnings)
    has_images = not {"instance_data_dir", "data_backend_config"}.isdisjoint(flags)
    images = f"the folders in {new.datasets_file}" if new.datasets else "instance_data_dir in it"
    steps = "" if has_images else f"set {images}, then "
    report.say(f"{output} is written: {steps}`simpletuner train --config {shlex.quote(str(output))}`")


def import_original(
    source: Annotated[
        Path,
        path_argument("File of the original or of another trainer, a list of its datasets, or the original's folder."),
    ],
    output: Annotated[Path | None, path_option("--output", "Write to this TOML file instead of stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write what is left of a file that would train something else here.")
    ] = False,
    program: Annotated[
        Program | None, typer.Option("--from", help="Program that wrote the file, where its keys do not tell.")
    ] = None,
) -> None:
    """Turn files of other trainers into ours; comments say what changed and what was left out."""
    from simpletuner.commands.config_import import import_files

    import_files(source, output, force, partial, program.value if program else "")


def export(
    flags: Mapping[str, object],
    config: Path | None,
    to: Annotated[Format, typer.Option("--to", help="What to write.")],
    everything: Annotated[bool, typer.Option("--all", help="Include settings at their default.")] = False,
    output: Output = None,
) -> None:
    """Write settings in a format that replays them 1:1, or for another trainer. The command goes to stderr."""
    if to in OF_TRAINERS:
        from simpletuner.commands.config_export import export_to_trainer

        export_to_trainer(load(flags, config), to.value, output)
        return
    from simpletuner.settings.declared.errors import is_secret
    from simpletuner.tools.config_files import export_checked

    report = Report()
    loaded = load(flags, config, complete=False)
    result = export_checked(loaded, to.value, everything)
    if output is None:
        report.text(result.text)
    else:
        save(output, result.text)
    for name, reference in settings_as_json(loaded).items():
        if reference and is_secret(name):
            report.say(f"{name} is a secret and not written: a replay reads it from {reference}", style="dim")
    if to is not Format.CLI:
        # On stderr: stdout holds nothing but the export, for a shell to redirect into a file.
        report.say("replay with:", style="dim")
        report.say(result.replay(str(output or "")).rstrip(), style="dim")
