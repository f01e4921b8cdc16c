"""The state of a half-typed command line: which command, what was given to it, and what must come next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.resolving.loading import canonical_name
from simpletuner.settings.values.spelling import SWITCH_WORDS, SWITCHES, normalize_name


@dataclass
class ParseState:
    """A command, the options given to it by name, the option that waits for a value, and how many arguments it has."""

    command: TyperGroup | TyperCommand
    given: dict[str, str] = field(default_factory=dict)
    waiting: TyperOption | None = None
    arguments: int = 0
    only_arguments: bool = False

    def pass_word(self, word: str) -> None:
        """Advance past a complete word."""
        if self.waiting is not None and may_follow(self.waiting, word):
            self.given[str(self.waiting.name)], self.waiting = word, None
            return
        self.waiting = None
        if self.only_arguments or not word.startswith("-"):
            self.pass_plain(word)
        elif word == "--":
            self.only_arguments = True
        else:
            self.pass_option(*word.partition("="))

    def pass_plain(self, word: str) -> None:
        """Enter a subcommand, or advance past an argument."""
        known = self.command.commands if isinstance(self.command, TyperGroup) else {}
        if isinstance(command := known.get(word), TyperGroup | TyperCommand):
            self.command, self.given = command, {}
        else:
            self.arguments += 1

    def pass_option(self, key: str, equals: str, value: str) -> None:
        """Note an option; without `=` its value comes next."""
        if option := self.option(key):
            self.given[str(option.name)] = value
            self.waiting = option if not equals and takes_value(option) else None

    def option(self, key: str) -> TyperOption | None:
        """The option that a word means, in any spelling that the command line accepts."""
        spellings = {key, f"--{canonical_name(key)}"}
        return next((option for option in self.options() if spellings & set(names_of(option))), None)

    def options(self) -> Iterator[TyperOption]:
        """Options that help shows."""
        for parameter in self.command.get_params(typer.Context(self.command)):
            if isinstance(parameter, TyperOption) and not parameter.hidden:
                yield parameter


def is_switch(option: TyperOption) -> bool:
    """Return whether a setting's flag may come without a value."""
    return option.name in setting_fields() and setting_fields()[option.name].annotation in SWITCHES


def may_follow(option: TyperOption, word: str) -> bool:
    """Return whether a word is the value of the option before it."""
    return not is_switch(option) or normalize_name(word) in SWITCH_WORDS


def takes_value(option: TyperOption) -> bool:
    return not option.is_flag and not option.count


def names_of(option: TyperOption) -> list[str]:
    """An option's spellings, `--no-...` included."""
    return [*option.opts, *option.secondary_opts]
