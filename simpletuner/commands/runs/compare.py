"""`simpletuner runs compare`: settings that differ, curves, and images of the same prompts, in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.commands.paths import path_argument, path_option
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.system.files.atomic import save


def compare(
    folders: Annotated[list[Path], path_argument("Output folders of two to six runs.")],
    output: Annotated[Path, path_option("--output", "File to write.")] = Path("comparison.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print settings and losses as JSON for scripts; write no file.")
    ] = False,
) -> None:
    """Compare runs: settings that differ, curves, and images of the same prompts side by side."""
    from simpletuner.page.runs.folder import check_run
    from simpletuner.training.html_report.comparison import comparison_facts, render_comparison
    from simpletuner.training.metrics.comparison import STYLES

    runs = {str(folder): folder.resolve() for folder in folders}
    if not 2 <= len(runs) <= len(STYLES):
        raise SettingsError(f"{len(runs)} of 2 to {len(STYLES)} runs are named", "name the output folder of each")
    for folder in folders:
        check_run(folder)
    if as_json:
        Report().json(comparison_facts(runs))
        return
    save(output, render_comparison(runs, output.resolve().parent))
    Report().say(f"{output} compares {' and '.join(runs)}")
