"""What the tab key offers: the words that may come next on a command line, read from the commands themselves.

Typer's own completer takes help for rich markup (`[default: 4]` vanishes, long lines break into further candidates),
and knows neither our forgiving spelling nor values that depend on earlier ones. So only its list of commands is used.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from simpletuner.commands.parse_state import ParseState, is_switch, names_of, takes_value
from simpletuner.models.registry import FAMILIES, TINY, flavours_of
from simpletuner.settings.loading import canonical_name
from simpletuner.settings.rules import UNSUPPORTED_VALUES
from simpletuner.settings.sections import setting_fields
from simpletuner.settings.spelling import SYNONYMS, choices_of, normalize_name

CURSOR = "\0"


@dataclass(frozen=True)
class Completion:
    """A word that may stand at the cursor, and what it means."""

    word: str
    help: str = ""


def completions_for(command: TyperGroup | TyperCommand, line: str, programs: Iterable[str]) -> list[Completion]:
    """Return what may replace the last word of `line`, the text of a command up to the cursor."""
    *before, word = words_of(line, programs)
    position = ParseState(command)
    for passed in before:
        position.pass_word(passed)
    waiting = position.waiting
    if waiting is not None and not (word.startswith("-") and is_switch(waiting)):
        return matching(word, values(position, waiting, word))
    if word.startswith("-") and not position.only_arguments:
        return flags_with_value(position, word) if "=" in word else flags(position, word)
    return matching(word, plain_words(position, word))


def words_of(line: str, programs: Iterable[str]) -> list[str]:
    """Return the words behind the program's name, as a shell reads them; the last one is at the cursor, maybe empty."""
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


def plain_words(position: ParseState, word: str) -> list[Completion]:
    """Return the subcommands, or the values of the argument that is next; all flags where nothing else can come."""
    if isinstance(position.command, TyperGroup):
        commands = {name: command for name, command in position.command.commands.items() if not command.hidden}
        return [Completion(name, command.get_short_help_str(limit=100)) for name, command in commands.items()]
    if argument := open_argument(position):
        return values(position, argument, word)
    return [] if word else flags(position, "--")


def open_argument(position: ParseState) -> TyperArgument | None:
    """Return the argument that is next; the last one if it repeats."""
    arguments = [parameter for parameter in position.command.params if isinstance(parameter, TyperArgument)]
    if position.arguments < len(arguments):
        return arguments[position.arguments]
    return arguments[-1] if arguments and arguments[-1].nargs < 0 else None


def flags(position: ParseState, word: str) -> list[Completion]:
    """Return the flags that begin with a word, spelled as it was begun; those given already only if they repeat."""
    open_options = [option for option in position.options() if option.multiple or option.name not in position.given]
    return [
        Completion(spelled, one_line(option.help or ""))
        for option in open_options
        for name in names_of(option)
        if (spelled := continued(word, name)).startswith(word)
    ]


def flags_with_value(position: ParseState, word: str) -> list[Completion]:
    """Return `--flag=value` for every value that begins as typed."""
    key, _, value = word.partition("=")
    option = position.option(key)
    found = matching(value, values(position, option, value)) if option and takes_value(option) else []
    return [Completion(f"{key}={candidate.word}", candidate.help) for candidate in found]


def continued(word: str, flag: str) -> str:
    """Return a knob's flag with its beginning as typed and dashes where these were begun; other flags as they are."""
    if canonical_name(flag) is None or not normalize_name(flag).startswith(normalize_name(word)):
        return flag
    rest = flag[len(word) :]
    return word + (rest.replace("_", "-") if "-" in word.lstrip("-") else rest)


def values(position: ParseState, parameter: TyperOption | TyperArgument, word: str) -> list[Completion]:
    """Return what a parameter accepts; nothing where anything goes, or a path."""
    if parameter.name in setting_fields():
        return values_of_knob(parameter.name, position.given.get("model_family", ""))
    items = parameter.shell_complete(typer.Context(position.command), word)
    return [Completion(item.value, item.help or "") for item in items if item.type == "plain"]


def values_of_knob(name: str, family: str) -> list[Completion]:
    """Return a knob's choices; flavours are those of the family, or of all if none is typed yet."""
    if name == "model_family":
        hubs = {key: [flavour.hub for flavour in flavours_of(key).values()] for key in FAMILIES}
        return [Completion(key, next(iter(hubs[key]), "")) for key in FAMILIES]
    if name == "model_flavour":
        known = [normalize_name(family)] if normalize_name(family) in FAMILIES else FAMILIES
        published = {name: flavour.hub for key in known for name, flavour in flavours_of(key).items()}
        return [Completion(*item) for item in (published | {TINY: "small, with random weights"}).items()]
    field = setting_fields()[name]
    accepted = (True, False) if field.annotation is bool else choices_of(field.annotation)
    accepted = accepted or tuple(dict.fromkeys(SYNONYMS.get(name, {}).values()))
    accepted = [value for value in accepted if value not in UNSUPPORTED_VALUES.get(name, ())]
    words = {value: str(value).lower() if isinstance(value, bool) else str(value) for value in accepted}
    return [Completion(word, "default" if value == field.default else "") for value, word in words.items()]


def matching(word: str, found: Sequence[Completion]) -> list[Completion]:
    """Return the candidates that begin with a word, in any case."""
    return [candidate for candidate in found if normalize_name(candidate.word).startswith(normalize_name(word))]


def one_line(text: str) -> str:
    """Return text without line breaks and tabs."""
    return " ".join(text.split())
