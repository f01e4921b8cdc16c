"""The help that users read, whole, in help.txt; regenerate it with `python tests/test_help.py`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.core import TyperGroup

from simpletuner.app import LISTS, command_of, main

GOLDEN = Path(__file__).with_name("help.txt")
COMMANDS = (
    "--help",
    "detect-blocks --help",
    "models --help",
    "recipes --help",
    "config --help",
    "config init --help",
    "config validate --help",
    "config export --help",
    "dataset --help",
    "dataset check --help",
    "deepspeed --help",
    "deepspeed build --help",
    "deepspeed validate --help",
    "deepspeed templates --help",
    "cache list --help",
    "net check --help",
    "nfs check --help",
    "page --help",
    "train --help",
)


def render(command: str) -> str:
    """Return one command's help; of those that have every setting beside their own, what comes before them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(command.split())
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip()
    shown = text.partition("Model:\n")[0] + "...\n" if "export" in command or "build" in command else text + "\n"
    return f"$ simpletuner {command}\n{shown}"


def render_all() -> str:
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        return "\n".join(map(render, COMMANDS))
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def test_what_is_listed_without_its_module_is_what_the_command_says():
    listed, whole = (
        {name: each.get_short_help_str(1000) for name, each in command_of("simpletuner", word).commands.items()}
        for word in (LISTS[0], "")
    )
    assert listed == whole and list(listed) == list(whole)


def test_help_is_the_reviewed_one():
    assert render_all() == GOLDEN.read_text(encoding="utf-8")


def commands_of(group) -> Iterator:
    for each in group.commands.values():
        yield from commands_of(each) if isinstance(each, TyperGroup) else [each]


def test_all_commands_name_the_types_of_values_alike():
    for command in commands_of(command_of("simpletuner")):
        with typer.Context(command, info_name=command.name) as context:
            records = [each.get_help_record(context) for each in command.get_params(context)]
        names = [record[0] for record in records if record is not None]
        assert not [each for each in names if "<" in each], command.name


if __name__ == "__main__":
    GOLDEN.write_text(render_all(), encoding="utf-8")
