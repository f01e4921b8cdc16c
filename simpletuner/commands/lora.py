"""`simpletuner lora`: merge adapters into a model, extract, resize and average them. No GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from simpletuner.commands.help import path_argument, path_option
from simpletuner.commands.listing import CommandGroup
from simpletuner.commands.runs import setting_option
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings.values.parsed import normalize_formats
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from simpletuner.settings.declared.sections import ExportPrecision
    from simpletuner.tools.lora.resizing import Resized

Result = Annotated[Path, path_option("--output", "Folder to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a folder that simpletuner has written.")]
Rank = Annotated[int | None, typer.Option("--rank", min=1, help="Rank of the result; with --energy the most.")]
Energy = Annotated[
    float | None,
    typer.Option(
        "--energy", min=1e-6, max=1, help="Share of the squared sum of each layer to keep: 0.95 is a usual one."
    ),
]
Revision = Annotated[str, setting_option("revision")]
Variant = Annotated[str, setting_option("variant")]
Flavour = Annotated[
    str,
    typer.Option("--model_flavour", metavar="NAME", help="Of a model with two denoisers: which one, as in a run."),
]


def merge(
    base: Annotated[str, typer.Argument(help="Pipeline: a folder in diffusers format, or a hub id.")],
    output: Result,
    loras: Annotated[list[Path] | None, path_argument("LoRAs of any program, merged in this order.")] = None,
    strength: Annotated[
        list[float] | None, typer.Option("--strength", help="Strength of all, or of each in order. Default: 1.")
    ] = None,
    export_precision: Annotated[
        str,
        typer.Option(
            "--export_precision",
            metavar="PRECISION",
            help="fp32, bf16, fp16 or float8, of the denoiser, as a run's export_precision. Default: as it is.",
        ),
    ] = "",
    revision: Revision = "",
    variant: Variant = "",
    flavour: Flavour = "",
    force: Force = False,
) -> None:
    """Write a pipeline with LoRAs merged into its weights.

    Takes LoRA, DoRA, LoHa, LoKr and OFT, of text encoders too (LoRA alone). Sums are made in float32 and rounded once;
    one weight is in memory at a time. A strength other than 1 scales what an adapter adds.
    """
    loras, report = loras or [], Report()
    strengths = strengths_for(loras, strength or [1.0])
    precision = parse_precision(export_precision)
    if not (loras or precision):
        raise SettingsError("which LoRA?", "name one or more, or an --export_precision")
    with report.phase("importing torch"), no_collection():
        from simpletuner.tools.lora.base_model import NamedModel
        from simpletuner.tools.lora.merging import merge_loras

    named = NamedModel(base, revision, variant, flavour)
    chosen = [*zip(loras, strengths, strict=True)]
    rounding = merge_loras(named, chosen, output, force, report, precision)
    if rounding.share > 0.001:
        kinds = ", ".join(sorted(str(each).removeprefix("torch.") for each in rounding.dtypes))
        report.say(f"{kinds} rounds {rounding.share:.1%} of what the LoRA adds")
    if rounding.lost_in_conversion:
        report.say(f"{precision} rounds off {rounding.share_of_converted:.2%} of the weights that it is for")
    report.text(f"{output}\n")


def parse_precision(text: str) -> ExportPrecision | None:
    """Return the value of --export_precision, None for an empty one. Raises SettingsError for what it cannot be."""
    from simpletuner.settings.declared.sections import ExportPrecision

    known: dict[str, ExportPrecision] = {each: each for each in get_args(ExportPrecision)}
    if text and text not in known:
        raise SettingsError(f"--export_precision={text} is not known", f"write {', '.join(known)}, or leave it out")
    return known.get(text)


def strengths_for(loras: Sequence[Path], given: Sequence[float]) -> list[float]:
    """Raise SettingsError unless there is one strength, or one for each LoRA."""
    if len(given) not in (1, len(loras)):
        raise SettingsError(
            f"--strength is given {len(given)} times for {len(loras)} LoRAs", "give it once for all, or once for each"
        )
    return [*given] if len(given) > 1 else [given[0]] * len(loras)


def extract(
    tuned: Annotated[str, typer.Argument(help="Fine-tuned pipeline: a folder in diffusers format, or a hub id.")],
    base: Annotated[str, typer.Argument(help="Pipeline that it began with: a folder or a hub id.")],
    output: Result,
    rank: Rank = None,
    energy: Energy = None,
    layers: Annotated[
        str, typer.Option("--layers", metavar="NAMES", help="As lora_target_modules of a run. Default: all layers.")
    ] = "",
    export_format: Annotated[str, setting_option("export_format")] = "diffusers",
    revision: Revision = "",
    variant: Variant = "",
    flavour: Flavour = "",
    force: Force = False,
) -> None:
    """Write the difference of two pipelines' denoisers as a LoRA: the nearest one of a rank.

    What is no matrix (norms, biases, tables) is written beside it as it differs: `lora merge` reads that, diffusers
    does not.
    """
    report = Report()
    try:
        formats = normalize_formats(export_format)
    except ValueError as error:
        raise SettingsError(f"--export_format: {error}") from None
    with report.phase("importing torch"), no_collection():
        from simpletuner.settings.declared.sections import Lora
        from simpletuner.tools.lora.base_model import NamedModel
        from simpletuner.tools.lora.extraction import extract_lora
        from simpletuner.tools.lora.low_rank import Wanted

    after, before = NamedModel(tuned, "", variant, flavour), NamedModel(base, revision, variant, flavour)
    lora, wanted = Lora(export_format=formats, lora_target_modules=layers), Wanted.of(rank, energy)
    found = extract_lora(after, before, output, wanted, lora, force, report)
    ranks = sorted(set(found.ranks.values()))
    report.say(
        f"{count_noun(len(found.ranks), 'layer')} of rank {describe_range(ranks[0], ranks[-1])} hold "
        f"{found.share_of_lora:.2%} of the squared difference"
    )
    if found.others:
        report.say(
            f"{count_noun(len(found.others), 'tensor')} of no matrix hold {found.share_of_others:.2%} of it, exactly, "
            "in a file beside the LoRA that `simpletuner lora merge` alone reads"
        )
    if found.left_out:
        report.say(f"{count_noun(found.left_out, 'layer')} differ and are not in --layers")
    report.text(f"{output}\n")


def describe_range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def resize(
    lora: Annotated[Path, path_argument("LoRA of any program: a .safetensors file, or a folder of diffusers or peft.")],
    output: Result,
    rank: Rank = None,
    energy: Energy = None,
    force: Force = False,
) -> None:
    """Write a LoRA of a smaller rank: the nearest one to what each layer adds, with the names that the file has.

    LoHa and LoKr become LoRAs.
    """
    report = Report()
    with report.phase("importing torch"), no_collection():
        from simpletuner.tools.lora.low_rank import Wanted
        from simpletuner.tools.lora.resizing import resize_lora

    found = resize_lora(lora, output, Wanted.of(rank, energy), force, report)
    say_ranks(report, found)
    report.text(f"{output}\n")


def say_ranks(report: Report, found: Resized) -> None:
    before, after = (describe_range(min(each), max(each)) if each else "" for each in (found.before, found.after))
    begun = f"rank {before} -> {after}" if before else f"a LoRA of rank {after}"
    report.say(f"{begun}, which holds {found.share:.2%} of the squared sum of what the LoRA adds")


def average(
    sources: Annotated[
        list[Path], path_argument("Output folder of a run, whose last checkpoints are averaged, or several LoRAs.")
    ],
    output: Result,
    last: Annotated[int, typer.Option("--last", min=2, help="Of a run: how many of its newest checkpoints.")] = 2,
    ema: Annotated[bool, typer.Option("--ema", help="Of a run: take the averaged weights of each.")] = False,
    weights: Annotated[
        str, typer.Option("--weights", metavar="NUMBERS", help="Comma-separated, the newest last. Default: all equal.")
    ] = "",
    rank: Rank = None,
    energy: Energy = None,
    base: Annotated[str, setting_option("pretrained_model_name_or_path")] = "",
    config: Annotated[str, setting_option("single_file_config")] = "",
    revision: Revision = "",
    families: Annotated[str, setting_option("model_families")] = "",
    force: Force = False,
) -> None:
    """Write the mean of a run's last checkpoints, or of several LoRAs.

    Checkpoints of a run: the mean of their weights, as an EMA is, in the form that the run exports. LoRAs: the mean of
    what they add, exactly, so that ranks add up; --rank or --energy makes the result smaller. With LoHa or LoKr among
    them it is the LoRA of that rank which is nearest to the mean.
    """
    from simpletuner.runs.folder import is_run

    report, numbers = Report(), parse_weights(weights)
    is_of_run = len(sources) == 1 and is_run(sources[0])
    if not is_of_run and len(sources) == 1:
        raise SettingsError(f"{sources[0]} is no run, and one LoRA has no mean", "name a run, or several LoRAs")
    with report.phase("importing torch"), no_collection():
        from simpletuner.runs.settings_record import NAMED
        from simpletuner.tools.lora.averaging import average_checkpoints, average_loras
        from simpletuner.tools.lora.low_rank import Wanted

    if is_of_run:
        if rank or energy:
            raise SettingsError("--rank and --energy are for LoRA files", "`simpletuner lora resize` takes the result")
        named = dict(zip(NAMED, (base, config, revision, families), strict=True))
        names = average_checkpoints(sources[0], last, numbers, ema, output, named, force, report)
        report.say(f"the mean of {', '.join(names)}")
    else:
        wanted = Wanted.of(rank, energy) if rank or energy else None
        say_ranks(report, average_loras(sources, numbers, output, wanted, force, report))
    report.text(f"{output}\n")


def parse_weights(text: str) -> list[float]:
    """Raise SettingsError for what are no finite numbers of 0 or more."""
    try:
        found = [float(each) for each in text.split(",") if each.strip()]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each < float("inf") for each in found):
        raise SettingsError(f"--weights={text}: these are no numbers of 0 or more", "write --weights=1,1,2")
    return found


def build_lora() -> typer.Typer:
    app = CommandGroup("Merge, extract, resize and average LoRAs. Needs no GPU.")
    for command in (merge, extract, resize, average):
        app.command(command.__name__)(command)
    return app
