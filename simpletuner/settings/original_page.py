"""docs/from-the-original.md: what becomes of every name of the original's files, from the tables that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simpletuner.settings.errors import REASONS
from simpletuner.settings.knob import shown_default
from simpletuner.settings.original import EIGHT_BIT, LIBRARIES, NOT_HERE, OFF, OPTIMIZERS
from simpletuner.settings.original_names import ASKS_FOR_NOTHING, RENAMED
from simpletuner.settings.original_refusals import REFUSED
from simpletuner.settings.original_warnings import DEFAULTS, MEANINGS
from simpletuner.settings.sections import setting_fields
from simpletuner.settings.variables import NOT_SETTINGS, OTHER_PROGRAMS

HEAD = """\
# From the original's files

The original is SimpleTuner. Its config.json and config.env go on working where this version has what they ask for; many
names are the same ([options.md](options.md)), and [data.md](data.md) is about its dataset files. Every other name is
another name of a setting, has no effect, or is refused; this page lists them all. `simpletuner config validate FILE`
says what becomes of one file. The page is written by `simpletuner config docs --original`.

`simpletuner config import FILE --output run.toml` writes a file of this version, which `train --config=run.toml` runs:
a line per setting, and comments that say what changed, what was left out, and why. FILE is config.json, config.toml,
config.env, the WebUI's file, a list of datasets, or a folder such as `config/foo`, with the file that the original
takes there. Where the original's defaults are others and the result depends on them, they are written, too.

- What is refused below is left out, and stands in the file's comments and on stderr: the file runs without it. What
  decides what is trained (family, LoRA, ControlNet) ends the import with exit code 2 and no file.
- Datasets that this version refuses as they are become a copy, `run.datasets.json`, with the same reasons.
- Relative paths stay where the original was started in the same folder (the one that holds `config/`); else they
  become absolute ones.
- Values of variables such as `HF_TOKEN` are never copied. `TRAINER_EXTRA_ARGS` and `DEBUG_EXTRA_ARGS` are taken apart
  into settings.

"""
NULL = """\
## Values for "not set"

In a file of the original null is a setting that is not set. So is 0 for `num_train_epochs`, `max_train_steps`,
`minimum_image_size`, `snr_gamma` and `tokenizer_max_length`. `flow_schedule_shift` = 0 is off, which is 1 here;
`flow_schedule_auto_shift` takes its place as there, but another number beside it, which wins there, is refused here.
`validation_step_interval` = 0 validates only before the first step and after the last; `resume_from_checkpoint` = null
is `latest`. Two names of one setting may both stand in a file if they say the same.

"""
VARIABLES = """\
## config.env

Variables of other programs are passed on to the ranks; those that are set in the shell take precedence. They begin with
{prefixes}. These names are not used:

"""


def original_page() -> str:
    """All of docs/from-the-original.md."""
    renamed = [(marked([name]), f"`{setting}`") for setting, text in RENAMED.items() for name in bare(text)]
    optimizers = [(f"`{name}`", f"`{ours}`", cost) for name, (ours, cost) in OPTIMIZERS.items()]
    values = [(f"`{name}` = `{value}`", reason) for (name, value), reason in REASONS.items()]
    ours = setting_fields()
    defaults = [(f"`{name}`", theirs, shown_default(ours[name]) or "empty") for name, theirs in DEFAULTS.items()]
    ignored = [(f"`{name.upper()}`", reason) for name, reason in NOT_SETTINGS.items() if reason]
    prefixes = ", ".join(f"`{prefix}`" for prefix in OTHER_PROGRAMS)
    libraries = ", ".join(f"`{name}`" for name in LIBRARIES)
    return (
        HEAD
        + section("Another name", "", ("there", "here"), renamed)
        + NULL
        + section("The same name with another meaning", MEANING, ("setting", "here"), meanings())
        + section("Other defaults", "", ("setting", "there", "here"), defaults)
        + section("Optimizers", "Values of `optimizer`.", ("there", "here", "what it costs"), optimizers)
        + f"8-bit ones are refused: {EIGHT_BIT}. So are others of {libraries}: {NOT_HERE}.\n\n"
        + section("Values that are refused", "", ("value", "why"), values)
        + section("No effect", IDLE, ("names", "why"), by_reason(ASKS_FOR_NOTHING))
        + section("Refused", OFF_VALUES, ("names", "why, and what to do instead"), by_reason(REFUSED))
        + VARIABLES.format(prefixes=prefixes)
        + table(("name", "instead"), ignored)
    )


MEANING = "Reported with the line, for files with names that only the original has."
IDLE = "Accepted with any value; one line per file counts them."
OFF_WORDS = ", ".join(f"`{word}`" for word in OFF if word)
OFF_VALUES = f"Accepted where the value says off ({OFF_WORDS}, or empty), or is in brackets."


def meanings() -> list[Sequence[str]]:
    return [(f"`{meaning.setting}`", meaning.text) for meaning in MEANINGS]


def by_reason(texts: Mapping[str, str]) -> list[Sequence[str]]:
    return [(marked(text.split()), reason) for reason, text in texts.items()]


def bare(text: str) -> list[str]:
    """Names without the values that ask for nothing."""
    return [word.partition("=")[0] for word in text.split()]


def marked(words: Iterable[str]) -> str:
    """Format names, each with the values that ask for nothing."""
    pairs = (word.partition("=") for word in words)
    return ", ".join(f"`{name}`" + (f" ({values.replace('|', ', ')})" if values else "") for name, _, values in pairs)


def section(title: str, text: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"## {title}\n\n" + (f"{text}\n\n" if text else "") + table(header, rows) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
