"""`simpletuner status` and `simpletuner runs`: what runs do and did, from the files in their output folders."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import OptionInfo

from simpletuner.commands.help import path_argument, path_option
from simpletuner.commands.listing import CommandGroup
from simpletuner.errors import ExitCode, SettingsError
from simpletuner.report import Report
from simpletuner.settings.declared.table import setting_table
from simpletuner.status_line import format_seconds
from simpletuner.system.files.atomic import save
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from simpletuner.runs.condition import Condition
    from simpletuner.runs.health.best_step import BestStep
    from simpletuner.runs.listing import Summary
    from simpletuner.runs.sample_loss_scores import SampleScore
    from simpletuner.system.processes.run_status import RunStatus


def compare(
    folders: Annotated[list[Path], path_argument("Output folders of two to six runs.")],
    output: Annotated[Path, path_option("--output", "File to write.")] = Path("comparison.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print settings and losses as JSON for scripts; write no file.")
    ] = False,
) -> None:
    """Compare runs: settings that differ, curves, and images of the same prompts side by side."""
    from simpletuner.runs.charts import STYLES
    from simpletuner.runs.folder import check_run
    from simpletuner.runs.report import comparison_facts, render_comparison

    runs = {str(folder): folder.resolve() for folder in folders}
    if not 2 <= len(runs) <= len(STYLES):
        raise SettingsError(f"{len(runs)} of 2 to {len(STYLES)} runs are named", "name the output folder of each")
    for folder in folders:
        check_run(folder)
    if as_json:
        Report().json(comparison_facts(runs))
        return
    save(output, render_comparison(runs, output.resolve().parent))
    Report().say(f"{output} compares {' and '.join(runs)}")


def setting_option(name: str, sentence: str = "") -> OptionInfo:
    """The option of a setting, as text: a boolean of Typer would not take the `=true` of `normalize_argv`."""
    row = setting_table()[name]
    return typer.Option(f"--{name}", help=sentence or row.sentence, metavar=row.metavar, show_default=False)


def export(
    folder: Annotated[Path, path_argument("Output folder of a run.")],
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", help="Step, name or best (by held-out loss). Default: the newest.", metavar="N"),
    ] = "",
    output: Annotated[
        Path | None, path_option("--output", "Folder to write; empty: pipeline-STEP or lora-STEP in that of the run.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
    precision: Annotated[str, setting_option("export_precision")] = "",
    base: Annotated[str, setting_option("pretrained_model_name_or_path")] = "",
    config: Annotated[str, setting_option("single_file_config")] = "",
    revision: Annotated[str, setting_option("revision")] = "",
    families: Annotated[str, setting_option("model_families")] = "",
) -> None:
    """Write the pipeline or the LoRA of one checkpoint, as its run would at the end; print its folder.

    A base model of its own, its revision and a family of your own are not taken from the folder, which may be somebody
    else's: give them again.
    """
    from simpletuner.runs.folder import check_run
    from simpletuner.runs.settings_record import NAMED

    check_run(folder)
    report = Report()
    with report.phase("importing torch"), no_collection():
        from simpletuner.tools.checkpoint_export import export_checkpoint

    named = dict(zip(NAMED, (base, config, revision, families), strict=True)) | {"export_precision": precision}
    report.text(f"{export_checkpoint(folder, checkpoint, output, ema, named, report)}\n")


COLUMNS = ("sample", "seen", "loss / others'", "in the last third", "z", "")


def losses(
    folder: Annotated[Path, path_argument("Output folder of a run with log_sample_losses.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="Samples to show.")] = 24,
    contact_sheet: Annotated[
        Path | None, path_option("--contact_sheet", "Write these samples as one PNG, too.", "FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts, with all samples.")] = False,
) -> None:
    """Show which samples are learned last, and which look mislabelled: their loss stays above that of others.

    A loss is compared with the mean of the logarithms of all losses in the same part of the run and the same tenth of
    the timesteps; z is a sample's mean distance from it in standard errors.
    """
    from simpletuner.runs.folder import check_run
    from simpletuner.runs.sample_loss_scores import SAMPLE_LOSSES, read_losses, score_samples

    check_run(folder)
    scores, report = score_samples(read_losses(folder / SAMPLE_LOSSES)), Report()
    if contact_sheet is not None:
        write_sheet(folder, scores[:limit], contact_sheet)
    if as_json:
        report.json([as_plain(each) for each in scores])
        return
    suspects = sum(each.looks_wrong for each in scores)
    report.data_table("", [row_of(each) for each in scores[:limit]], COLUMNS)
    report.line(f"{suspects} of {count_noun(len(scores), 'sample')} to look at: mislabelled, damaged, or just hard")
    if contact_sheet is not None:
        report.line(f"{contact_sheet} shows the first {min(limit, len(scores))}")


def row_of(score: SampleScore) -> tuple[str, ...]:
    at_end = "" if math.isnan(score.ratio_at_end) else f"{score.ratio_at_end:.2f}"
    return score.id, f"{score.seen:,}", f"{score.ratio:.2f}", at_end, f"{score.z:+.1f}", "look" * score.looks_wrong


def as_plain(score: SampleScore) -> dict[str, object]:
    """Return a score as JSON has it, which knows no nan."""
    known = {
        name: None if isinstance(value, float) and math.isnan(value) else value for name, value in asdict(score).items()
    }
    return {**known, "looks_wrong": score.looks_wrong}


def write_sheet(folder: Path, scores: Sequence[SampleScore], path: Path) -> None:
    from simpletuner.tools.dataset.contact_sheets import draw_loss_sheet

    draw_loss_sheet(folder, scores, path)


def status(
    folder: Annotated[
        Path | None, path_argument("Output folder of a run, or one above several; without it the current one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show what a run is doing, or how it ended. Starts nothing, and needs no GPU.

    Ends with 0 unless the run has failed, was killed or is stuck: then with 5; with 0 after a list of runs.
    """
    from simpletuner.runs.health.best_step import find_best_of
    from simpletuner.runs.metrics import METRICS
    from simpletuner.system.processes.run_status import RunState

    summaries, report = summaries_in(folder), Report()
    if len(summaries) > 1:
        if as_json:
            report.json([as_row(each) for each in summaries])
        else:
            report.data_table("", [*map(in_line, summaries)], ("run", "state", "step", "loss", "left", "written"))
        return
    [summary] = summaries
    best = find_best_of(summary.run.path) if summary.run.file(METRICS) is not None else None
    if as_json:
        of_best = best and {
            "step": best.best.step,
            "loss": best.best.loss,
            "weights": best.best.weights,
            "above": best.above,
        }
        report.json({**as_row(summary), "best": of_best})
    else:
        rows = [row for row in rows_of(summary.status, summary.condition, age_of(summary), best) if row[1]]
        report.data_table(f"{summary.run.name}: {summary.condition.state}", rows, ())
    if summary.condition.state in (RunState.FAILED, RunState.KILLED, RunState.STUCK):
        raise typer.Exit(int(ExitCode.TRAINING))


def summaries_in(folder: Path | None) -> list[Summary]:
    """Return the run in a folder that is named, or else the runs below it or the current one, the last written first.

    Raises SettingsError where there is none.
    """
    from simpletuner.runs.condition import KnownStart
    from simpletuner.runs.folder import Folders, RunFolder, check_run, is_run
    from simpletuner.runs.listing import NoStartedRuns, RunList, summarize

    place = folder or Path()
    if folder is not None and is_run(folder):
        return [summarize(RunFolder(folder.resolve(), Folders.of([folder])), KnownStart())]
    summaries = RunList(Folders.of([place]), NoStartedRuns()).summaries() if place.is_dir() else []
    if not summaries:
        check_run(place)
    return summaries


def as_row(summary: Summary) -> dict[str, object]:
    condition, age = summary.condition, round(age_of(summary), 1)
    said = {"state": condition.state, "reason": condition.sentence, "hint": condition.hint}
    return {**asdict(summary.status), **said, "output_dir": str(summary.run.path), "age_seconds": age}


def in_line(summary: Summary) -> tuple[str, ...]:
    status = summary.status
    steps = f"{status.step:,} of {status.max_steps:,}" if status.max_steps else ""
    loss, written = "" if status.loss is None else f"{status.loss:.4f}", f"{format_seconds(age_of(summary))} ago"
    return summary.run.name, summary.condition.state, steps, loss, summary.time_left, written


def age_of(summary: Summary) -> float:
    return time.time() - summary.written


def rows_of(
    status: RunStatus, condition: Condition, age_seconds: float, best: BestStep | None = None
) -> Iterator[tuple[str, str]]:
    """Yield names and values, empty for those that are not known."""
    yield "reason" if condition.has_ended else "doing", condition.sentence
    yield "hint", condition.hint
    if status.max_steps:
        yield "step", f"{status.step:,} of {status.max_steps:,} ({status.step / status.max_steps:.0%})"
    yield "loss", "" if status.loss is None else f"{status.loss:.4f}"
    yield from (("alarm", each) for each in status.alarms)
    yield "best step", best.describe() if best is not None else ""
    if status.seconds_left is not None and not condition.has_ended:
        yield "left", format_seconds(status.seconds_left)
    yield "process", f"{status.pid} on {status.host}" if status.pid else ""
    yield "bucket", status.mirror
    yield "written", f"{format_seconds(age_seconds)} ago"


def build_runs() -> typer.Typer:
    app = CommandGroup("Learn from runs, and export from them.")
    app.command("compare")(compare)
    app.command("export")(export)
    app.command("losses")(losses)
    return app
