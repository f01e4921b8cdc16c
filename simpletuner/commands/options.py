"""Command signatures with one flag per setting, generated from the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import typer
from typer.main import get_command
from typer.models import OptionInfo

from simpletuner.commands.help import FLAGS, MAKE_OPTIONS, help_all, parse_path
from simpletuner.errors import SettingsError
from simpletuner.settings.declared.table import canonical_name, setting_table
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG
from simpletuner.settings.values.spelling import SWITCH_WORDS, normalize_name

# For Typer: unknown flags go on to the settings layer, which suggests the nearest setting.
UNKNOWN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}


def with_settings(command: Callable[..., None], shown: Iterable[str] | None = None) -> Callable[..., None]:
    """Give `command(flags, config, **own)` one flag per setting; only flags that were typed reach `flags`.

    A command without `config` reads no file.

    `--help` shows all settings, or only those `shown`; `--help-all` shows all.
    """
    signature = inspect.signature(command, eval_str=True).parameters
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.items()
        if name not in ("flags", "config")
    ]

    def run(context: typer.Context, config: Path | None = None, **extra: object) -> None:
        from simpletuner.settings.files.raw_values import parse_arguments

        extra.pop("help_all", None)  # its callback has answered it
        flags = {name: value for name, value in context.meta[FLAGS].items() if value not in (None, ())}
        flags = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
        if ACCELERATE_CONFIG in extra and (value := extra.pop(ACCELERATE_CONFIG)) is not None:
            flags[ACCELERATE_CONFIG] = value
        unknown = dict(parse_arguments(context.args))  # the settings layer will refuse them
        if unknown:
            refuse_misspelled(unknown, [flag for parameter in parameters for flag in own_flags(parameter)])
        files = {"config": config} if "config" in signature else {}
        command(flags=flags | unknown, **files, **extra)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    files = file_parameters() if "config" in signature else ()
    parameters = [context, *files, *own, keyword("help_all", help_all(hidden=shown is None), bool)]
    with_signature(run, parameters)
    setattr(run, MAKE_OPTIONS, partial(setting_options, frozenset(setting_table() if shown is None else shown)))
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def with_signature(function: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the parameters of which Typer makes options."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def setting_options(shown: Collection[str], names: Collection[str] | None = None) -> list[object]:
    """Make an option for each setting, or those of some `names`, as Typer does for a command's parameters."""

    def command() -> None: ...

    made = setting_table() if names is None else names
    with_signature(command, [parameter_of(name, hidden=name not in shown) for name in made])
    app = typer.Typer(add_completion=False)
    app.command()(command)
    options = get_command(app).params
    for option in options:  # of text, for which Typer would make a pydantic adapter each: 15 ms
        option.process_value = as_typed
    return list(options)


def as_typed(ctx: object, value: object) -> object:
    return value


def refuse_misspelled(unknown: Iterable[str], own: Iterable[str]) -> None:
    """Raise SettingsError for what resembles an option of the command; settings are suggested elsewhere."""
    from simpletuner.settings.declared.errors import closest
    from simpletuner.settings.foreign.original_names import original_hint

    flags = {normalize_name(flag.lstrip("-")): flag for flag in own}
    for flag in unknown:
        if original_hint(normalize_name(flag.lstrip("-"))):  # a setting of the original, which has its own answer
            continue
        if meant := flags.get(closest(flag, [*flags, *setting_table()])):
            raise SettingsError(f"unknown option `{flag}`; did you mean `{meant}`?", "`--help` lists every option")


def own_flags(parameter: inspect.Parameter) -> list[str]:
    options = [option for option in (parameter.default, *get_args(parameter.annotation)) if type(option) is OptionInfo]
    # Within Annotated, typer.Option stores its first flag as the default.
    flags = [flag for option in options for flag in (option.default, *(option.param_decls or ()))]
    return [flag for flag in flags if isinstance(flag, str) and parameter.name not in setting_table()]


def file_parameters() -> list[inspect.Parameter]:
    config = "Config file (JSON, TOML, YAML or .env); else config/config.json, .toml, .yaml."
    accelerate = "Accelerate file; else ACCELERATE_CONFIG_FILE, or what `accelerate config` wrote; `none`: no file."
    return [
        keyword("config", typer.Option(None, "--config", help=config, metavar="PATH", parser=parse_path), Path | None),
        keyword(
            ACCELERATE_CONFIG, typer.Option(None, f"--{ACCELERATE_CONFIG}", help=accelerate, metavar="PATH"), str | None
        ),
    ]


def parameter_of(name: str, hidden: bool = False) -> inspect.Parameter:
    """The option of a setting, a text to Typer: flags and files meet the same spelling and validation."""
    row = setting_table()[name]
    option = typer.Option(
        None,
        f"--{name}",
        help=row.sentence + f" [{row.unit}]" * bool(row.unit) + f" [default: {row.default}]" * bool(row.default),
        metavar=row.metavar,
        show_default=False,
        hidden=hidden,
        rich_help_panel=row.section,
    )
    return keyword(name, option, list[str] | None if row.kind == "list" else str | None)


def keyword(name: str, option: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def as_arguments(flags: Mapping[str, object], config: Path | None) -> list[str]:
    """The inverse of `with_settings`: a command line with these flags, for the ranks."""
    pairs = [
        (name, value) for name, given in flags.items() for value in (given if isinstance(given, list) else [given])
    ]
    return [f"--config={config}"] * (config is not None) + [
        f"--{name.lstrip('-')}={value}"
        for name, value in pairs  # a flag of the original comes with its dashes
    ]


def normalize_argv(arguments: Sequence[str]) -> list[str]:
    """Rewrite known flags in canonical spelling, and bare boolean flags as `=true`."""
    return [part for index in range(len(arguments)) for part in normalize_argument(arguments, index)]


def outranked_flags(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each setting that two flags give two values: the last one counts, as scripts append flags.

    Several flags of a setting that is a list are its items.
    """
    given: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        name = canonical_name(key) or normalize_name(key.lstrip("-"))
        if not key.startswith("--") or not (name in setting_table() or name in ("config", ACCELERATE_CONFIG)):
            continue
        if name in setting_table() and setting_table()[name].kind == "list":
            continue
        if not equals:
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            is_bool = name in setting_table() and setting_table()[name].kind == "switch"
            value = "true" if is_bool and normalize_name(following) not in SWITCH_WORDS else following
        if given.setdefault(name, value) != value:
            from simpletuner.settings.declared.errors import shown_value

            yield f"--{name} is given twice: {shown_value(name, value)} counts, not {shown_value(name, given[name])}"
        given[name] = value


def normalize_argument(arguments: Sequence[str], index: int) -> list[str]:
    """Rewrite one argument; whether a bare boolean flag needs a value depends on the one after it."""
    argument = arguments[index]
    if not argument.startswith("--"):
        return [argument]
    key, equals, value = argument.partition("=")
    name = canonical_name(key)
    if name is None:
        return [argument]
    if equals or setting_table()[name].kind != "switch":
        return [f"--{name}{equals}{value}"]
    following = normalize_name(arguments[index + 1]) if index + 1 < len(arguments) else ""
    return [f"--{name}"] if following in SWITCH_WORDS else [f"--{name}=true"]
