"""Every command of the program: its module, which is imported where it runs, and what `--help` of the program says.

`--help` imports none of them: with all modules and settings it took 0.18 CPU s in place of 0.08.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


class NamedValues:
    """Of a command: its help names the types of values as it names those of settings."""

    params: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for each in self.own_parameters():
            each.display_type = partial(value_name, each)

    def own_parameters(self) -> list[Any]:
        """Return the parameters that are no settings, which have names of their own."""
        return self.params


class UntypedDefaults(NamedValues):
    """Of a command: empty defaults stay as they are. To convert one, Typer imports pydantic, 0.07 CPU s."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for each in self.params:
            if each.nargs == 1 and not (each.multiple or each.required or each.callback):
                keep_default(each)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        if option is not None:
            keep_default(option)  # its callback does nothing then
        return option


def keep_default(parameter: Any) -> None:
    convert = type(parameter).process_value

    def process_value(ctx: typer.Context, value: Any) -> Any:
        source = ctx.get_parameter_source(parameter.name)
        is_default = source is not None and source.name == "DEFAULT"
        return value if is_default and value in (None, "") else convert(parameter, ctx, value)

    parameter.process_value = process_value


def value_name(parameter: Any, ctx: object) -> str:
    """Return what stands for a value in help; nothing for an argument, whose name says it."""
    if parameter.param_type_name == "argument":
        return ""
    values = parameter.type_descriptor
    if values.choices:
        return "|".join(str(getattr(each, "value", each)) for each in values.choices)
    from simpletuner.settings.declared.table import TYPE_NAMES

    return TYPE_NAMES[next(iter(get_args(values.annotation)), values.annotation)]


class LightCommand(UntypedDefaults, TyperCommand):
    """A command without settings."""


class LightGroup(UntypedDefaults, TyperGroup):
    """The program, or a group of its commands."""


class CommandGroup(typer.Typer):
    """A group of commands, whose help is that of the group without one."""

    def __init__(self, summary: str) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode=None, help=summary)

    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = LightCommand, **options: Any) -> Any:
        return super().command(name, cls=cls, **options)


@dataclass(frozen=True)
class Listed:
    """A command, or a group of commands."""

    place: str
    """Module and function, which returns a group if it is called build_*."""
    summary: str
    """First sentence of its help."""
    takes_settings: bool = False

    def add(self, app: typer.Typer, name: str) -> None:
        from simpletuner.private_api.of_pydantic import leave_out_plugins

        leave_out_plugins()  # before a command imports pydantic; `--help` adds none
        module_name, _, function = self.place.partition(":")
        module = import_module(f"simpletuner.commands.{module_name}")
        command = getattr(module, function)
        if function.startswith("build_"):
            app.add_typer(command(), name=name)
        elif self.takes_settings:
            from simpletuner.commands.help import SettingsCommand
            from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings

            made = with_settings(command, getattr(module, "SHOWN", None))
            app.command(name, cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(made)
        else:
            app.command(name, cls=LightCommand)(command)

    def list_in(self, app: typer.Typer, name: str) -> None:
        """Add the name and the summary alone."""

        def command() -> None: ...

        app.command(name, help=self.summary)(command)


COMMANDS = {
    "train": Listed("train:train", "Fine-tune a model.", takes_settings=True),
    "detect-blocks": Listed(
        "detect_blocks:detect_blocks", "Show which blocks of a denoiser FSDP should wrap.", takes_settings=True
    ),
    "plan": Listed("plan:plan", "Show the memory, time and disk that a run takes.", takes_settings=True),
    "models": Listed(
        "models:models",
        "List model families and flavours: size, objective, what they need. With --check: prove one pipeline.",
    ),
    "recipes": Listed(
        "recipes:recipes", "List recipes: values to start a fine-tune from, each number with its source."
    ),
    "page": Listed("page:page", "Serve a page for all settings, exports, caches and runs."),
    "status": Listed("runs:status", "Show what a run is doing, or how it ended."),
    "sample": Listed("sample:sample", "Sample one prompt with the weights of a run, and print the image's path."),
    "completion": Listed(
        "shell.completions:completion", "Print the script that completes commands, flags and values with the tab key."
    ),
    "config": Listed("config:build_config", "Show, check, start and export settings."),
    "dataset": Listed("dataset:build_dataset", "Look at images and captions."),
    "deepspeed": Listed("deepspeed:build_deepspeed", "Build and check configurations of DeepSpeed ZeRO."),
    "cache": Listed("cache:build_cache", "List and clear what runs cache."),
    "nfs": Listed("nfs:build_nfs", "Look after the folder that all nodes share."),
    "runs": Listed("runs:build_runs", "Learn from runs, and export from them."),
    "lora": Listed("lora:build_lora", "Merge, extract, resize and average LoRAs."),
    "net": Listed("net:build_net", "Look after the network between the ranks."),
}
