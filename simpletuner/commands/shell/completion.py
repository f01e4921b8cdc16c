"""`simpletuner completion`: print a shell's completion script, and the completions that the script asks for."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from simpletuner.commands.shell.completions import completions_for
from simpletuner.commands.shell.scripts import INSTALL, PROGRAMS, script_for
from simpletuner.report import Report


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to print the script for.")]) -> None:
    """Print the script that completes commands, flags and values with the tab key."""
    report = Report()
    report.text(script_for(shell))
    if sys.stdout.isatty():
        report.say(f"hint: to install it: {INSTALL[shell]}", style="dim")


def print_completions(command: TyperGroup | TyperCommand, line: str) -> None:
    """Print completions for a shell's script: a word, a tab, and its meaning, one per line."""
    for candidate in completions_for(command, line, PROGRAMS):
        sys.stdout.write(f"{candidate.word}\t{candidate.help}\n")
