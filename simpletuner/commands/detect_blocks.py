"""`simpletuner detect-blocks`: show which classes of a denoiser FSDP should wrap, and why."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from simpletuner.commands.help import path_option
from simpletuner.commands.listing import AsJson
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import format_count

if TYPE_CHECKING:
    from simpletuner.counting.block_detection import Detection
    from simpletuner.parallel.model.blocks import BlockClass

SETTING = "fsdp_transformer_layer_cls_to_wrap"
# The settings that name the model: the flags of this command.
SHOWN = ("model_family", "model_flavour", "pretrained_model_name_or_path", "revision", "model_families")

Refresh = Annotated[bool, typer.Option("--refresh", help="Detect again, even if the result is cached.")]
Lora = Annotated[bool, typer.Option("--lora", help="Show the attention projections that model_type=lora adapts.")]
Apply = Annotated[Path | None, path_option("--apply", f"Write {SETTING} into this config file.", "FILE")]

WIDTH = 80
LONGEST_NAME = 41
MAX_OUTSIDE_SHOWN = 4
EIGHTHS = " ▏▎▍▌▋▊▉█"


def detect_blocks(
    flags: Mapping[str, object],
    config: Path | None,
    refresh: Refresh = False,
    as_json: AsJson = False,
    apply: Apply = None,
    lora: Lora = False,
) -> None:
    """Show which blocks of a denoiser FSDP should wrap. Nothing is downloaded, no weights are loaded."""
    with no_collection():
        from simpletuner.counting.block_detection import detect

    report = Report()
    loaded = load(flags, config or apply, complete=False)
    loaded.pass_on_variables(os.environ)  # HF_TOKEN opens a gated repository
    found = detect(loaded.settings.model, refresh, report.warn)
    if as_json:
        report.json(found.as_json())
    elif lora:
        print_lora_targets(report, found, loaded.settings.lora.lora_rank)
    else:
        print_detection(report, found)
    if apply is not None:
        apply_to(apply, found, report)


def apply_to(file: Path, found: Detection, report: Report) -> None:
    """Write the recommended classes into a config file. Raises SettingsError when there are none."""
    from simpletuner.settings.editors.editing import set_in_file

    if not found.blocks.recommended:
        raise SettingsError(f"{found.denoiser} has no blocks to wrap: nothing is written", "set fsdp_auto_wrap_policy")
    value = ",".join(found.blocks.recommended)
    changed = set_in_file(file, SETTING, value)
    report.say(f"{file}: {SETTING} = {value}" if changed else f"{file} has that value already")


def print_detection(report: Report, found: Detection) -> None:
    """Print the classes that matter, the recommendation, and the source of the architecture."""
    total = found.blocks.total_parameters
    report.line(f"{model_name(found)}: {found.denoiser}", style="bold")
    report.line(f"{total:,} parameters, {decimal(2 * total)} in bf16, {decimal(4 * total)} in fp32")
    rows = [
        item for item in found.blocks.classes if item.recommended or item.is_block or item.no_split or item.repeated
    ]
    name_width = max((len(item.class_name) for item in rows), default=0)
    for style, line in format_table(rows, min(name_width, LONGEST_NAME)):
        report.line(line, style=style)
    for name, text in summary(found, len(found.blocks.classes) - len(rows)):
        for line in wrap_text(text, WIDTH - 12):
            report.line(f"{name:<12}{line}")
            name = ""


def print_lora_targets(report: Report, found: Detection, rank: int) -> None:
    """Print the layers that model_type=lora adapts unless lora_target_modules names others."""
    report.line(f"{model_name(found)}: {found.denoiser}", style="bold")
    report.line(f"\n  {'layer':<18}{'count':>6}{'weights':>10}", style="dim")
    for name, counts in found.lora_targets.items():
        report.line(f"  {name:<18}{counts['layers']:>6}{format_count(rank * counts['parameters_per_rank']):>10}")
    total = rank * sum(counts["parameters_per_rank"] for counts in found.lora_targets.values())
    share = total / max(1, found.blocks.total_parameters)
    report.line("")
    report.line(f"{total:,} parameters at lora_rank = {rank}, {share:.2%} of the denoiser's")
    names = ",".join(found.lora_targets)
    report.line(f"lora_target_modules = {names or 'none: this model names its attention otherwise'}")


def model_name(found: Detection) -> str:
    return " ".join((found.model_family, found.model_flavour)).strip() or found.pretrained_model


def format_table(items: list[BlockClass], name_width: int) -> Iterator[tuple[str, str]]:
    """Yield (style, line) of the table: a row of numbers with a bar, and below it the reason."""
    numbers = f"{'count':>6}{'weights':>9}{'in bf16':>10}{'share':>8}"
    yield "dim", f"\n  {'class':<{name_width}}{numbers}"
    bar_width = WIDTH - len(numbers) - name_width - 4
    for item in items:
        size = f"{item.count:>6}{format_count(item.parameters):>9}{decimal(2 * item.parameters):>10}{item.share:>8.1%}"
        name = item.class_name if len(item.class_name) <= name_width else item.class_name[: name_width - 1] + "…"
        row = f"{'*' if item.recommended else ' '} {name:<{name_width}}{size}  {bar(item.share, bar_width)}"
        yield ("bold" if item.recommended else ""), row.rstrip()
        for line in wrap_text(why(item), WIDTH - 4):
            yield "dim", f"    {line}"
    yield "", ""


def why(item: BlockClass) -> str:
    """Describe why a class is taken or left, with diffusers' own hints."""
    hints = [hint for hint, given in (("no_split", item.no_split), ("repeated", item.repeated)) if given]
    hinted = f"; diffusers' hints: {', '.join(hints)}" if hints else ""
    if item.recommended:
        return f"taken: {item.reason}; one gathering brings in up to {decimal(2 * item.largest)}{hinted}"
    return f"left: {item.reason} ({item.sample_paths[0]}{', ...' * (item.count > 1)}){hinted}"


def summary(found: Detection, hidden: int) -> Iterator[tuple[str, str]]:
    """Yield (label, text): the recommendation, its size, what stays outside, and the source."""
    blocks, total = found.blocks, max(1, found.blocks.total_parameters)
    units = [item for item in blocks.classes if item.recommended]
    outside = sum(blocks.outside.values())
    if units:
        largest = max(item.largest for item in units)
        yield "recommended", ",".join(blocks.recommended)
        yield (
            "units",
            f"{sum(item.count for item in units)} hold {1 - outside / total:.1%} of the weights; "
            f"the largest is {largest / total:.1%}, {decimal(2 * largest)} in bf16",
        )
    else:
        yield "recommended", "nothing: no class repeats in a ModuleList"
    named = [f"{path} {format_count(size)}" for path, size in list(blocks.outside.items())[:MAX_OUTSIDE_SHOWN]]
    more = [f"{len(blocks.outside) - len(named)} more"] if len(blocks.outside) > len(named) else []
    yield "outside", f"{format_count(outside)} ({outside / total:.1%}): {', '.join(named + more)}"
    yield "from", f"{found.source}, {'cached' if found.cached else 'detected'} {found.detected_at}"
    if hidden:
        yield "not shown", f"{hidden} class{'es' * (hidden != 1)} without blocks: --json has them"


def bar(share: float, width: int) -> str:
    """Format a share of the model as a bar of at most `width` characters."""
    eighths = round(min(1, share) * width * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def wrap_text(text: str, width: int) -> list[str]:
    """Wrap text, but not between a number and its unit, nor within a path."""
    # textwrap breaks at ASCII blanks only, so a no-break space survives it.
    joined = re.sub(r"(?<=\d) (?=[KMGTB])", "\u00a0", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\u00a0", " ") for line in lines]
