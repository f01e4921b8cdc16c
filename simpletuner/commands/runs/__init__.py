"""`simpletuner status` and `simpletuner runs`: what runs do and did, from the files in their output folders."""

from __future__ import annotations

import typer

from simpletuner.commands.runs.compare import compare
from simpletuner.commands.runs.export import export
from simpletuner.commands.runs.losses import losses


def build_runs() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Learn from runs, and export from them.")
    app.command("compare")(compare)
    app.command("export")(export)
    app.command("losses")(losses)
    return app
