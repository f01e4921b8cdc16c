"""docs/from-the-original.md: the meaning here of every name of the original's files, from their tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from simpletuner.importing.original import DEFAULTS, MEANINGS, SAME_RESULT
from simpletuner.importing.translation import ORIGINAL_FAMILIES, ORIGINAL_OPTIMIZERS, OriginalOptimizer
from simpletuner.settings.declared.errors import REASONS
from simpletuner.settings.declared.knob import shown_default
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.foreign.original_names import (
    DECIDES,
    EIGHT_BIT,
    LIBRARIES,
    NOT_HERE,
    OFF,
    OPTIMIZERS,
    REFUSED,
)
from simpletuner.settings.foreign.original_tables import ASKS_FOR_NOTHING, RENAMED
from simpletuner.settings.resolving.sources import NOT_SETTINGS, OTHER_PROGRAMS

HEAD = """\
# From the original's files

The original is SimpleTuner. Many of its names are settings here as well ([options.md](options.md)), so a config of such
names alone runs as it stands, and so do its dataset files ([dataset-file.md](dataset-file.md)). Every other name is
another name of a setting, has no effect, or is refused; this page lists them all. A file with such names is
translated by `config import`; `train` names that command. The page is written by `simpletuner config docs --original`.

`simpletuner config import FILE --output run.toml` writes a file of this version, which `train --config=run.toml` runs:
a line per setting, and comments that say what changed, what was left out, and why. FILE is config.json, config.toml,
config.env, the WebUI's file, a list of datasets, or a folder such as `config/foo`, with the file that the original
takes there. Where the original's defaults are others and the result depends on them, they are written, too: those of
its settings, its optimizers, its families and its LoRA targets. What it does not read (warm-up steps with
lr_scheduler=constant) is left out. Files of other trainers: [from-other-trainers.md](from-other-trainers.md).

- A file that would train something else here ends the import with exit code 2 and writes nothing: names under
  "Refused, and decisive", optimizers and bases that this version has not got, references, audio and other
  datasets that it cannot read, methods of a family, and names that are not known. All are listed; with `--partial` a
  file of what is left is written, with the rest in its comments.
- What is refused and does not decide what is trained is left out, and stands in the file's comments and on stderr.
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
`lora_type` = standard is LoRA.
`validation_step_interval` = 0 validates only before the first step and after the last; `resume_from_checkpoint` = null
is `latest`.

"""
VARIABLES = """\
## config.env

Variables of other programs are passed on to the ranks; those that are set in the shell take precedence. They begin with
{prefixes}. These names are not used:

"""


def original_page() -> str:
    renamed = [(marked([name]), f"`{setting}`") for setting, text in RENAMED.items() for name in bare(text)]
    optimizers = [
        (f"`{name}`", f"`{there.ours}`", values_of(there), OPTIMIZERS.get(name, ("", ""))[1] or there.note)
        for name, there in ORIGINAL_OPTIMIZERS.items()
    ]
    values = [(f"`{name}` = `{value}`", reason) for (name, value), reason in REASONS.items()]
    others = {reason: names for reason, names in REFUSED.items() if reason not in DECIDES}
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
        + section("Other defaults", WRITTEN, ("setting", "there", "here"), defaults)
        + section("Other defaults of families", FORCED, ("family", "there"), families())
        + section("Other defaults without effect on what is trained", "", ("names", "because of"), same_results())
        + section("Optimizers", OWN_VALUES, ("there", "here", "its values", "what it costs"), optimizers)
        + f"In a run 8-bit ones are refused: {EIGHT_BIT}. So are others of {libraries}: {NOT_HERE}.\n\n"
        + section("Values that are refused", "", ("value", "why"), values)
        + section("No effect", IDLE, ("names", "why"), by_reason(ASKS_FOR_NOTHING))
        + section("Refused, and decisive", OFF_VALUES, REFUSED_HEADER, by_reason(DECIDES))
        + section("Refused", OFF_VALUES, REFUSED_HEADER, by_reason(others))
        + VARIABLES.format(prefixes=prefixes)
        + table(("name", "instead"), ignored)
    )


WRITTEN = "`config import` writes them where the file says nothing else."
FORCED = "Written by `config import`, whatever the file says; a limit (≤) holds unless i_know_what_i_am_doing is set."
OWN_VALUES = """\
Values of `optimizer`. The original reads `adam_beta1` and the like only with DeepSpeed's optimizers; `config import`
writes the values that each optimizer has there."""
MEANING = "Reported with the line, for files with names that only the original has."
IDLE = "Accepted with any value; one line per file counts them."
REFUSED_HEADER = ("names", "why, and what to do instead")
OFF_WORDS = ", ".join(f"`{word}`" for word in OFF if word)
OFF_VALUES = f"Accepted where the value says off ({OFF_WORDS}, or empty), or is in brackets."


def meanings() -> list[Sequence[str]]:
    return [(f"`{meaning.setting}`", meaning.text) for meaning in MEANINGS]


def values_of(there: OriginalOptimizer) -> str:
    return ", ".join(f"{name.removeprefix('adam_')} {value:g}" for name, value in there.settings.items())


def families() -> Iterator[Sequence[str]]:
    for name, family in ORIGINAL_FAMILIES.items():
        forced = [f"`{setting}` = {value}" for setting, value in family.forces.items()]
        limits = [f"`{setting}` ≤ {value}" for setting, value in family.limits.items()]
        yield f"`{name}`", ", ".join([*forced, *limits, *([f"lost: {family.lost}"] if family.lost else [])])


def same_results() -> Iterator[Sequence[str]]:
    for reason in dict.fromkeys(SAME_RESULT.values()):
        yield ", ".join(f"`{name}`" for name, other in SAME_RESULT.items() if other == reason), reason


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
