"""Help of commands that take settings: flags in the groups of docs/options.md; and arguments that are paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from simpletuner.commands.listing import NamedValues
from simpletuner.errors import SettingsError
from simpletuner.settings.declared.table import GROUPS, setting_table
from simpletuner.system.files.paths import expand_path, refuse_address

OWN = "Options"
DEBUG = ("--debug", "Show the whole traceback of an error.")
"""Taken off the command line before Typer parses it."""


ALL = "simpletuner.all_settings"
"""Key of a context in which each setting is listed."""
# Attribute of a command's function: makes the options of settings.
MAKE_OPTIONS = "make_options"
FLAGS = "simpletuner.flags"
"""Key of a context with the values of settings' flags."""
HELP_ALL = ("--help-all", f"Show all {len(setting_table())} settings.")
SHORT = ("train", "init")
EXAMPLE = (
    "Example: simpletuner config init --recipe=sdxl-style --instance_data_dir=photos --output=photos.toml, then "
    "simpletuner train --config=photos.toml"
)


class TakesSettings(NamedValues, TyperCommand):
    """A command that takes a flag for each setting, besides its own options.

    These are made when they are asked for, which `--help` of the program never does: Typer takes 10 ms for those of
    each of twelve commands. Parsing a line takes those that it names.
    """

    own: list[Any]
    made: list[Any] | None

    @property
    def params(self) -> list[Any]:
        if self.made is None:
            self.made = [*self.own, *vars(self.callback)[MAKE_OPTIONS]()]
        return self.made

    @params.setter
    def params(self, own: list[Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.own, self.made = own, None

    def own_parameters(self) -> list[Any]:
        return self.own

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with the named options, or with all: for help, and to suggest one for what is none."""
        given = {argument.partition("=")[0] for argument in args if argument.startswith("-")}
        settings = [name for name in setting_table() if f"--{name}" in given]
        known = {*(f"--{name}" for name in settings), *(flag for each in self.own for flag in each.opts)}
        if not given <= known - {HELP_ALL[0]}:
            return super().parse_args(ctx, args)
        all_made, self.made = self.made, [*self.own, *vars(self.callback)[MAKE_OPTIONS](settings)]
        try:
            return super().parse_args(ctx, args)
        finally:
            self.made = all_made

    def invoke(self, ctx: Any) -> object:
        """Run the command: its function finds the settings in the context's `meta`."""
        ctx.meta[FLAGS] = {name: ctx.params.pop(name) for name in setting_table() if name in ctx.params}
        return super().invoke(ctx)


class SettingsCommand(TakesSettings):
    """Lists settings by section; of those in SHORT what `config init` writes, and an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        is_short = self.name in SHORT and not ctx.meta.get(ALL)
        few = essential_settings() if is_short else setting_table()
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OWN: []}
        for parameter in self.get_params(ctx):
            if parameter.name in setting_table() and parameter.name not in few:
                continue
            if (record := parameter.get_help_record(ctx)) is not None:
                name = "Arguments" if parameter.param_type_name == "argument" else section_of(parameter)
                sections.setdefault(name, []).append(record)
        sections[OWN] += [HELP_ALL, DEBUG] if is_short else [DEBUG]
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if is_short:
            formatter.write_paragraph()
            formatter.write_text(EXAMPLE)


def essential_settings() -> set[str]:
    """Return the settings that a file of `config init` has."""
    return {name for names in GROUPS.values() for name in names} | {"data_backend_config"}


def section_of(parameter: object) -> str:
    return getattr(parameter, "rich_help_panel", None) or OWN


def show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[ALL] = True
        for parameter in context.command.params:
            if isinstance(parameter, TyperOption):
                parameter.hidden = False
        typer.echo(context.get_help())
        raise typer.Exit


def help_all(hidden: bool) -> object:
    """The option that shows what `--help` leaves out; `hidden` where that is nothing."""
    text = "Show all settings, which may be given here as well."
    return typer.Option(False, "--help-all", is_eager=True, callback=show_all, hidden=hidden, help=text)


def path_option(flag: str, sentence: str, metavar: str = "PATH") -> object:
    return typer.Option(flag, help=sentence, metavar=metavar, parser=parse_path)


def path_argument(sentence: str) -> object:
    return typer.Argument(help=sentence, parser=parse_path)


def parse_path(text: str) -> Path:
    """Return the path that was typed. Raises SettingsError for an empty one and for an unknown user."""
    # Typer would take an empty path for the current folder, and a shell expands no `~` after `=`.
    try:
        path = expand_path(text)
        refuse_address(path)
    except ValueError as error:
        raise SettingsError(f"'{text}': {error}", "`--help` after any command explains it") from None
    return path
