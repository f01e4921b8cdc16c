"""`simpletuner status`: what a run is doing, or how it ended, from any machine that sees its folder."""

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
    from simpletuner.system.processes.run_status import RunStatus


def status(
    folder: Annotated[Path, path_argument("Output folder of the run.")] = Path("output"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show what a run is doing, or how it ended. Starts nothing, and needs no GPU.

    Ends with 0 unless the run has failed, was killed or is stuck: then with 5.
    """
    from simpletuner.page.folders import Folders
    from simpletuner.page.runs.condition import Known, State, find_condition
    from simpletuner.page.runs.folder import FILES, RunFolder, check_run
    from simpletuner.page.runs.summary import read_status_of
    from simpletuner.system.processes.run_status import RunState, RunStatus

    check_run(folder)
    run = RunFolder(folder.resolve(), Folders.of([folder]))
    found = read_status_of(run)
    condition = find_condition(run, found, Known())
    known, age = found or RunStatus(RunState.STARTING), time.time() - run.written(*FILES)
    report = Report()
    if as_json:
        said = {"state": condition.state, "reason": condition.sentence, "hint": condition.hint}
        report.json({**asdict(known), **said, "output_dir": str(run.path), "age_seconds": round(age, 1)})
    else:
        rows = [row for row in rows_of(known, condition, age) if row[1]]
        report.data_table(f"{folder}: {condition.state}", rows, ())
    if condition.state in (State.FAILED, State.KILLED, State.STUCK):
        raise typer.Exit(int(ExitCode.TRAINING))


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
