"""CLI entry point. All errors are caught here, printed with a hint, and mapped to an exit code."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from simpletuner import __version__
from simpletuner.commands.listing import COMMANDS, LightGroup
from simpletuner.commands.shell.scripts import LINE, PROGRAMS
from simpletuner.errors import (
    SIGNAL_CODES,
    ExitCode,
    SettingsError,
    SimpleTunerError,
    describe_bug,
    explain_system_errors,
)
from simpletuner.extras import OTHER_PROGRAM, check_installation
from simpletuner.report import Report
from simpletuner.run_log import LOGGER, silence_torchao, stop_run_log
from simpletuner.system.files.paths import ensure_home
from simpletuner.system.processes.console import lasting, open_standard_streams

DEBUG = "SIMPLETUNER_DEBUG"
"""Set it, or pass --debug, to see the whole traceback of an error."""
LISTS = ("--help", "-h", "--version")
"""First words for which the names of all commands are enough."""


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{__version__}\n{OTHER_PROGRAM}")
        raise typer.Exit


def build_app(only: str = "") -> typer.Typer:
    """Assemble the command line: one short file per subcommand in `commands/`.

    With `only` the name of a command, just that one: the settings of all of them take Typer 80 ms. With one
    of LISTS all commands, but nothing of them that runs.
    """
    app = typer.Typer(
        cls=LightGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=False,
    )

    @app.callback(help="Fine-tune whole diffusion models on many GPUs and machines.")
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
        debug: bool = typer.Option(False, "--debug", help="Show the whole traceback of an error; after any command."),
    ) -> None: ...

    for name in [only] if only in COMMANDS else COMMANDS:
        (COMMANDS[name].list_in if only in LISTS else COMMANDS[name].add)(app, name)
    return app


@cache
def command_of(program: str, first_word: str = "") -> TyperGroup | TyperCommand:
    """Return the command that a program runs: the root command, or the subcommand named on the command line.

    Where its arguments begin with the name of a command, the others are left out. Built once in a process:
    that was a third of what tests of commands took.
    """
    command = get_command(build_app([*PROGRAMS[program], first_word][0]))
    for name in PROGRAMS[program]:
        assert isinstance(command, TyperGroup)
        command = command.commands[name]
    assert isinstance(command, TyperGroup | TyperCommand)
    return command


def run(program: str, arguments: Sequence[str]) -> None:
    """Run one command and exit with its code.

    Raises SettingsError for a command line that Typer does not understand.
    """
    if line := os.environ.get(LINE):  # not a command: a shell asks for completions
        from simpletuner.commands.shell.completions import print_completions, words_of

        words = words_of(line, PROGRAMS)
        print_completions(command_of(program, words[0] if len(words) > 1 else LISTS[0]), line)
        raise SystemExit(int(ExitCode.OK))
    command = command_of(program, next(iter(arguments), LISTS[0]))
    try:
        code = command(arguments, prog_name=program, standalone_mode=False, help_option_names=["-h", "--help"])
    except typer.Abort:
        raise KeyboardInterrupt from None
    except TyperException as error:
        text = error.format_message().replace("Value error, ", "")
        if text.startswith("Usage:"):  # a group without a command: its help
            typer.echo(text, err=True)
            raise SystemExit(int(ExitCode.USAGE)) from None
        said = text[0].lower() + " ".join(text[1:].rstrip(".").split())
        raise SettingsError(*with_hint(said, program, arguments)) from None
    if code == ExitCode.INTERRUPTED:  # Typer has caught it, and says nothing
        raise KeyboardInterrupt
    raise SystemExit(code or int(ExitCode.OK))


def with_hint(said: str, program: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Add the next step to Typer's message: the group that has the command, or the place of options."""
    root = get_command(build_app()) if program == "simpletuner" and arguments else None
    if isinstance(root, TyperGroup) and arguments[0] not in root.commands:
        groups = [each for each in root.commands.values() if isinstance(each, TyperGroup)]
        if having := [f"`simpletuner {each.name} {arguments[0]}`" for each in groups if arguments[0] in each.commands]:
            return said.partition(". Did you")[0], f"there is {', '.join(having)}"
        if arguments[0].startswith("-") and (named := next((each for each in arguments if each in root.commands), "")):
            return said, f"options come after the command: `simpletuner {named} {arguments[0]} ...`"
    return said, "`--help` after any command explains it"


def main(arguments: Sequence[str] | None = None, program: str = "simpletuner") -> None:
    """Run the command line. Errors of settings or machine end in one sentence and an exit code."""
    # Else the interpreter's end collects garbage several times: a second where torch is loaded.
    atexit.register(gc.freeze)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Read before Typer parses anything: a command line that does not parse must be traceable, too.
    if "--debug" in given:
        os.environ[DEBUG] = "1"  # the ranks that this process starts inherit it
    debug = bool(os.environ.get(DEBUG))
    silence_torchao()
    open_standard_streams()
    with lasting("stderr"):  # messages; results on stdout may end a command, as `| head` does
        run_safely(given, program, debug)


def run_safely(given: Sequence[str], program: str, debug: bool) -> None:
    """Run one command; print what it raises and exit with its code."""
    try:
        with explain_system_errors():
            arguments = [argument for argument in given if argument != "--debug"]
            if home := ensure_home(os.environ):
                Report().warn(f"there is no HOME, and user {os.getuid()} has no name: {home} is used; set HOME")
            is_asked = LINE in os.environ or os.environ.get("RANK", "0") != "0"  # by a shell, or by the launcher
            if not is_asked and (warning := check_installation(Path(__file__).parent)):
                Report().warn(warning)
            run(program, spelled(program, arguments))
    except SimpleTunerError as error:
        print_error(error)
        if debug:
            raise
        raise SystemExit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        if "RANK" not in os.environ:  # for ranks, their launcher prints it
            Report().say("stopped by SIGINT")
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None
    except Exception as error:
        if debug:
            raise
        # log.txt has the traceback, where there is a run, without a second one with --debug.
        LOGGER.info("traceback", exc_info=error)
        Report().error(describe_bug(error))
        raise SystemExit(int(ExitCode.BUG)) from None
    finally:
        stop_run_log()


def spelled(program: str, arguments: list[str]) -> list[str]:
    """Return the arguments with flags of settings as these are declared; warn of repeated ones."""
    is_list = program == "simpletuner" and (not arguments or arguments[0] in LISTS)
    if is_list or not any(each.startswith("--") for each in arguments):  # the settings take 0.06 CPU s to import
        return arguments
    from simpletuner.commands.options import normalize_argv, outranked_flags

    if os.environ.get("RANK", "0") == "0":  # each rank has the same command line
        Report().warn_all(outranked_flags(arguments))
    return normalize_argv(arguments)


def print_error(error: SimpleTunerError) -> None:
    """Print why a command ended; a requested stop is not an error."""
    report = Report()
    if error.exit_code not in SIGNAL_CODES:
        report.error(error)
        return
    report.say(error.message)
    if error.hint:
        report.say(f"hint: {error.hint}", style="dim")


def train_main() -> None:
    main(program="simpletuner-train")
