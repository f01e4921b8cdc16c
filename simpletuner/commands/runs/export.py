"""`simpletuner runs export`: a pipeline or a LoRA of one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.commands.paths import path_argument, path_option
from simpletuner.report import Report
from simpletuner.system.importing import no_collection


def export(
    folder: Annotated[Path, path_argument("Output folder of a run.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Name of the checkpoint; empty: the newest.", metavar="NAME")
    ] = "",
    output: Annotated[
        Path | None, path_option("--output", "Folder to write; empty: pipeline-STEP or lora-STEP in that of the run.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
) -> None:
    """Write the pipeline or the LoRA of one checkpoint, as its run would at the end; print its folder."""
    from simpletuner.page.runs.folder import check_run

    check_run(folder)
    report = Report()
    with report.phase("importing torch"), no_collection():
        from simpletuner.tools.checkpoint_export import export_checkpoint

    report.text(f"{export_checkpoint(folder, checkpoint, output, ema, report)}\n")
