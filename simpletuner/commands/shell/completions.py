"""`simpletuner completion`: completions of a command line, read from the commands themselves.

Typer's own completer takes help for rich markup (`[default: 4]` vanishes, long lines break into further candidates),
and knows neither our tolerant spelling nor values that depend on earlier ones. So only its list of commands is used.

A half-typed command line is parsed first: its command, the options given so far, and the kind of word that comes next.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from simpletuner.commands.shell.scripts import INSTALL, PROGRAMS, script_for
from simpletuner.report import Report
from simpletuner.settings.declared.table import canonical_name, setting_table
from simpletuner.settings.values.spelling import SWITCH_WORDS, normalize_name


@dataclass
class ParseState:
    """A command, its options by name, the option that waits for a value, and the number of its arguments."""

    command: TyperGroup | TyperCommand
    given: dict[str, str] = field(default_factory=dict)
    waiting: TyperOption | None = None
    arguments: int = 0
    only_arguments: bool = False

    def pass_word(self, word: str) -> None:
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
        for parameter in self.command.get_params(typer.Context(self.command)):
            if isinstance(parameter, TyperOption) and not parameter.hidden:
                yield parameter


def is_switch(option: TyperOption) -> bool:
    """True for a flag that may come without a value."""
    return option.name in setting_table() and setting_table()[option.name].kind == "switch"


def may_follow(option: TyperOption, word: str) -> bool:
    """True if `word` can be the value of `option`, which precedes it."""
    return not is_switch(option) or normalize_name(word) in SWITCH_WORDS


def takes_value(option: TyperOption) -> bool:
    return not option.is_flag and not option.count


def names_of(option: TyperOption) -> list[str]:
    """An option's spellings, `--no-...` included."""
    return [*option.opts, *option.secondary_opts]


CURSOR = "\0"
# Rare flag -> the one that is meant if only these two are left: a shell would stop at their prefix.
RARE_FLAGS = {"model_families": "model_family"}


@dataclass(frozen=True)
class Completion:
    """A word that may replace the one at the cursor, and its meaning."""

    word: str
    help: str = ""


def completions_for(command: TyperGroup | TyperCommand, line: str, programs: Iterable[str]) -> list[Completion]:
    """Complete the last word of `line`, the text of a command up to the cursor."""
    *before, word = words_of(line, programs)
    state = ParseState(command)
    for passed in before:
        state.pass_word(passed)
    waiting = state.waiting
    # A bare boolean flag may be followed by the next flag; any other flag still needs its value.
    if waiting is not None and not (word.startswith("-") and is_switch(waiting)):
        return matching(word, values(state, waiting, word))
    if word.startswith("-") and not state.only_arguments:
        return flags_with_value(state, word) if "=" in word else flags(state, word)
    return matching(word, plain_words(state, word))


def words_of(line: str, programs: Iterable[str]) -> list[str]:
    """Split the words after the program's name as a shell does; the last, at the cursor, may be empty."""
    # A mark, since shlex drops the empty word after a blank. NUL cannot be typed: arguments end at it.
    lexer = shlex.shlex(line + CURSOR, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # an open quote: what it holds so far
        words.append(lexer.token)
    words[-1] = words[-1].removesuffix(CURSOR)
    start = next((index for index, word in enumerate(words) if Path(word).name in programs), 0)
    return words[start + 1 :] or [""]


def plain_words(state: ParseState, word: str) -> list[Completion]:
    """Subcommands, or values of the next argument; all flags where nothing else can follow."""
    if isinstance(state.command, TyperGroup):
        commands = {name: command for name, command in state.command.commands.items() if not command.hidden}
        return [Completion(name, command.get_short_help_str(limit=100)) for name, command in commands.items()]
    if argument := next_argument(state):
        return values(state, argument, word)
    return [] if word else flags(state, "--")


def next_argument(state: ParseState) -> TyperArgument | None:
    """The next argument; the last one if it repeats."""
    arguments = [parameter for parameter in state.command.params if isinstance(parameter, TyperArgument)]
    if state.arguments < len(arguments):
        return arguments[state.arguments]
    return arguments[-1] if arguments and arguments[-1].nargs < 0 else None


def flags(state: ParseState, word: str) -> list[Completion]:
    """Flags that begin with a word, spelled like it; those given already only if they repeat."""
    open_options = [option for option in state.options() if option.multiple or option.name not in state.given]
    found = {
        spelled: option
        for option in open_options
        for name in names_of(option)
        if (spelled := spelled_like(word, name)).startswith(word)
    }
    names = {str(option.name) for option in found.values()}
    hidden = {rare for rare, common in RARE_FLAGS.items() if names == {rare, common}}
    return [
        Completion(spelled, one_line(option.help or ""))
        for spelled, option in found.items()
        if option.name not in hidden
    ]


def flags_with_value(state: ParseState, word: str) -> list[Completion]:
    """`--flag=value` for every value that begins as typed."""
    key, _, value = word.partition("=")
    option = state.option(key)
    found = matching(value, values(state, option, value)) if option and takes_value(option) else []
    return [Completion(f"{key}={candidate.word}", candidate.help) for candidate in found]


def spelled_like(word: str, flag: str) -> str:
    """Spell a setting's flag as it was begun, with dashes or underscores; other flags have one spelling."""
    if canonical_name(flag) is None or not normalize_name(flag).startswith(normalize_name(word)):
        return flag
    rest = flag[len(word) :]
    return word + (rest.replace("_", "-") if "-" in word.lstrip("-") else rest)


def values(state: ParseState, parameter: TyperOption | TyperArgument, word: str) -> list[Completion]:
    """Values that a parameter accepts; none where it takes any text, or a path (shells complete these)."""
    if parameter.name in setting_table():
        return values_of_setting(parameter.name, state.given.get("model_family", ""))
    items = parameter.shell_complete(typer.Context(state.command), word)
    return [Completion(item.value, item.help or "") for item in items if item.type == "plain"]


def values_of_setting(name: str, family: str) -> list[Completion]:
    """Choices of a setting; flavours are those of the family, or of all if none is typed yet."""
    if name in ("model_family", "model_flavour"):
        return families() if name == "model_family" else flavours(normalize_name(family))
    row = setting_table()[name]
    return [Completion(word, "default" if word == row.default else "") for word in row.words]


def families() -> list[Completion]:
    from simpletuner.models.catalog.registry import AUTO, presets

    hubs = {key: [flavour.hub for flavour in preset.flavours.values()] for key, preset in presets().items()}
    return [*(Completion(key, next(iter(hubs[key]), "")) for key in hubs), Completion(AUTO, "any other pipeline")]


def flavours(family: str) -> list[Completion]:
    from simpletuner.models.catalog.registry import TINY, flavours_of, has_tiny, load_preset, presets

    known = [family] if load_preset(family) else presets()
    published = {name: flavour.hub for key in known for name, flavour in flavours_of(key).items()}
    tiny = {TINY: "small, with random weights"} if any(map(has_tiny, known)) else {}
    return [Completion(*item) for item in (published | tiny).items()]


def matching(word: str, found: Sequence[Completion]) -> list[Completion]:
    return [candidate for candidate in found if normalize_name(candidate.word).startswith(normalize_name(word))]


def one_line(text: str) -> str:
    return " ".join(text.split())


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


def complete_recipe(typed: str) -> list[tuple[str, str]]:
    """Return the recipes of this package that begin as typed, each with its title."""
    from simpletuner.recipes.library import recipes

    return [(recipe.name, recipe.title) for recipe in recipes() if recipe.name.startswith(typed)]
