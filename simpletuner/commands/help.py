"""Help of commands that take settings: flags in the groups of docs/options.md, and only those that a command uses."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

OWN = "Options"
DEBUG = ("--debug", "Show the whole traceback of an error.")
"""Taken off the command line before Typer parses it."""


class SettingsCommand(TyperCommand):
    """A command whose settings are listed by section."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OWN: []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                name = "Arguments" if parameter.param_type_name == "argument" else section_of(parameter)
                sections.setdefault(name, []).append(record)
        sections[OWN].append(DEBUG)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def section_of(parameter: Any) -> str:
    return getattr(parameter, "rich_help_panel", None) or OWN


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help with all settings, and exit."""
    if wanted:
        for parameter in context.command.params:
            if isinstance(parameter, TyperOption):
                parameter.hidden = False
        typer.echo(context.get_help())
        raise typer.Exit


def help_all(hidden: bool) -> Any:
    """The option that shows what `--help` leaves out; `hidden` where that is nothing."""
    text = "Show all settings, which may be given here as well."
    return typer.Option(False, "--help-all", is_eager=True, callback=show_all, hidden=hidden, help=text)
