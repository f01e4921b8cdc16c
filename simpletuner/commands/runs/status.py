"""`simpletuner status`: what runs are doing, or how they ended, from any machine that sees their folders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.commands.paths import path_argument
from simpletuner.errors import ExitCode
from simpletuner.report import Report
from simpletuner.status_line import format_seconds

if TYPE_CHECKING:
    from simpletuner.page.runs.condition import Condition
    from simpletuner.page.runs.summary import Summary
    from simpletuner.system.processes.run_status import RunStatus


def status(
    folder: Annotated[
        Path | None, path_argument("Output folder of a run, or one above several; without it the current one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show what a run is doing, or how it ended. Starts nothing, and needs no GPU.

    Ends with 0 unless the run has failed, was killed or is stuck: then with 5; with 0 after a list of runs.
    """
    from simpletuner.page.runs.condition import State

    summaries, report = summaries_in(folder), Report()
    if len(summaries) > 1:
        if as_json:
            report.json([as_row(each) for each in summaries])
        else:
            report.data_table("", [*map(in_line, summaries)], ("run", "state", "step", "loss", "left", "written"))
        return
    [summary] = summaries
    if as_json:
        report.json(as_row(summary))
    else:
        rows = [row for row in rows_of(summary.status, summary.condition, age_of(summary)) if row[1]]
        report.data_table(f"{summary.run.name}: {summary.condition.state}", rows, ())
    if summary.condition.state in (State.FAILED, State.KILLED, State.STUCK):
        raise typer.Exit(int(ExitCode.TRAINING))


def summaries_in(folder: Path | None) -> list[Summary]:
    """Return the run in a folder that is named, or else the runs below it or the current one, the last written first.

    Raises SettingsError where there is none.
    """
    from simpletuner.page.folders import Folders
    from simpletuner.page.runs.condition import Known
    from simpletuner.page.runs.folder import RunFolder, check_run, is_run
    from simpletuner.page.runs.listing import RunList
    from simpletuner.page.runs.processes import Processes
    from simpletuner.page.runs.summary import summarize

    place = folder or Path()
    if folder is not None and is_run(folder):
        return [summarize(RunFolder(folder.resolve(), Folders.of([folder])), Known())]
    summaries = RunList(Folders.of([place]), Processes()).summaries() if place.is_dir() else []
    if not summaries:
        check_run(place)
    return summaries


def as_row(summary: Summary) -> dict[str, object]:
    """Return a summary as JSON has it."""
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


def rows_of(status: RunStatus, condition: Condition, age_seconds: float) -> Iterator[tuple[str, str]]:
    """Yield names and values, without those that are not known."""
    yield "reason" if condition.has_ended else "doing", condition.sentence
    yield "hint", condition.hint
    if status.max_steps:
        yield "step", f"{status.step:,} of {status.max_steps:,} ({status.step / status.max_steps:.0%})"
    yield "loss", "" if status.loss is None else f"{status.loss:.4f}"
    if status.seconds_left is not None and not condition.has_ended:
        yield "left", format_seconds(status.seconds_left)
    yield "process", f"{status.pid} on {status.host}" if status.pid else ""
    yield "bucket", status.mirror
    yield "written", f"{format_seconds(age_seconds)} ago"
