"""`simpletuner runs export`: a pipeline or a LoRA of one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from simpletuner.commands.paths import path_argument, path_option
from simpletuner.report import Report
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.system.importing import no_collection


def setting_option(name: str) -> OptionInfo:
    """The option of a setting that names what the run's folder may not name."""
    return typer.Option(f"--{name}", help=setting_fields()[name].description, metavar="TEXT", show_default=False)


def export(
    folder: Annotated[Path, path_argument("Output folder of a run.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Name of the checkpoint; empty: the newest.", metavar="NAME")
    ] = "",
    output: Annotated[
        Path | None, path_option("--output", "Folder to write; empty: pipeline-STEP or lora-STEP in that of the run.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
    base: Annotated[str, setting_option("pretrained_model_name_or_path")] = "",
    config: Annotated[str, setting_option("single_file_config")] = "",
    revision: Annotated[str, setting_option("revision")] = "",
    families: Annotated[str, setting_option("model_families")] = "",
) -> None:
    """Write the pipeline or the LoRA of one checkpoint, as its run would at the end; print its folder.

    A base model of its own, its revision and a family of your own are not taken from the folder, which may be somebody
    else's: give them again.
    """
    from simpletuner.page.runs.folder import check_run
    from simpletuner.tools.recorded_settings import NAMED

    check_run(folder)
    report = Report()
    with report.phase("importing torch"), no_collection():
        from simpletuner.tools.checkpoint_export import export_checkpoint

    named = dict(zip(NAMED, (base, config, revision, families), strict=True))
    report.text(f"{export_checkpoint(folder, checkpoint, output, ema, named, report)}\n")
