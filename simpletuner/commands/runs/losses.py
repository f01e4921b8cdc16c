"""`simpletuner runs losses`: samples whose loss stays above that of others at the same timesteps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.commands.paths import path_argument, path_option
from simpletuner.report import Report
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from simpletuner.training.metrics.sample_loss_scores import SampleScore

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
    from simpletuner.page.runs.folder import check_run
    from simpletuner.training.metrics.sample_loss_scores import SAMPLE_LOSSES, read_losses, score_samples

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
    """Write the samples of local datasets as images over their captions."""
    from simpletuner.tools.dataset.loss_sheet import draw_loss_sheet

    draw_loss_sheet(folder, scores, path)
