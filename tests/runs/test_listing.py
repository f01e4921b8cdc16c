"""The list of runs reads what has changed, and nothing else: work is counted, not time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from simpletuner.page.runs.processes import Processes
from simpletuner.runs.folder import Folders
from simpletuner.runs.listing import RunList
from simpletuner.system.processes.run_status import RunState

RUNS = 190
counted: Counter[str] = Counter()
counting: list[str] = []
"""The folder in which files and folders that are opened are counted; an audit hook cannot be taken off again."""


def count(event: str, arguments: tuple[object, ...]) -> None:
    if counting and event in ("open", "os.scandir") and str(arguments[0]).startswith(counting[0]):
        counted[event] += 1


@contextmanager
def work_in(folder: Path) -> Iterator[Counter[str]]:
    if count not in HOOKED:
        sys.addaudithook(count)
        HOOKED.append(count)
    counted.clear()
    counting.append(str(folder))
    yield counted
    counting.clear()


HOOKED: list[object] = []


def write_status(run: Path, **values: object) -> None:
    status = {"host": os.uname().nodename, "pid": 0, "started": "2026-01-01T10:00:00.000+00:00", **values}
    new = run / ".status.json.new"
    new.write_text(json.dumps(status))
    new.replace(run / "status.json")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunList:
    monkeypatch.chdir(tmp_path)
    for number in range(RUNS):
        run = tmp_path / f"group-{number % 10}" / f"run-{number}"
        (run / "checkpoints").mkdir(parents=True)
        (run / ".lock").write_text("elsewhere 1\n")
        (run / "log.txt").touch()
        write_status(run, state="finished", step=number)
    long_ago = time.time() - 60
    for folder in (tmp_path, *tmp_path.iterdir()):
        os.utime(folder, (long_ago, long_ago))
    return RunList(Folders.of([tmp_path]), Processes())


def test_a_poll_in_which_nothing_has_changed_opens_nothing(runs: RunList, tmp_path: Path):
    with work_in(tmp_path) as work:
        first = runs.summaries()
        assert len(first) == RUNS and work["open"] >= RUNS, "what is counted is counted"
    with work_in(tmp_path) as work:
        again = runs.summaries()
        assert work == {}
    assert all(one is other for one, other in zip(first, again, strict=True))

    write_status(tmp_path / "group-3" / "run-13", state="failed", reason="no room", step=99)
    with work_in(tmp_path) as work:
        changed = runs.summaries()
        assert work.total() <= 6, "status, settings, console and lock of that run"
    assert changed[0].condition.state is RunState.FAILED and changed[0].status.step == 99, "it was written last"
    assert len([each for each in changed if each not in first]) == 1


def test_runs_that_come_go_and_are_hidden_in_others_are_noticed(runs: RunList, tmp_path: Path):
    assert len(runs.runs()) == RUNS
    new = tmp_path / "group-0" / "new"
    new.mkdir()
    assert len(runs.runs()) == RUNS
    write_status(new, state="starting")
    assert runs.runs()[0].path == new
    (new / "checkpoints").mkdir()
    write_status(new / "checkpoints", state="failed")
    assert len(runs.runs()) == RUNS + 1, "nothing is looked for in the folders that a run makes"
    (new / "cat").mkdir()
    write_status(new / "cat", state="starting")
    assert len(runs.runs()) == RUNS + 2 and runs.runs()[0].path == new / "cat", "output/cat, beside a run in output"
    shutil.rmtree(new / "cat")
    for path in (
        new / "status.json",
        tmp_path / "group-1" / "run-1" / "status.json",
        tmp_path / "group-1" / "run-1" / ".lock",
    ):
        path.unlink()
    assert {each.path.name for each in runs.runs()}.isdisjoint({"new", "run-1"})
    (tmp_path / "group-2").rename(tmp_path / "moved")
    assert len([each for each in runs.runs() if each.path.parent.name == "moved"]) == RUNS // 10


def test_a_run_that_no_process_holds_and_that_told_no_end_was_killed(runs: RunList, tmp_path: Path):
    run = tmp_path / "group-5" / "run-5"
    write_status(run, state="running", step=3)
    assert runs.summaries()[0].condition.state is RunState.KILLED
    write_status(run, state="running", host=os.uname().nodename, pid=os.getpid(), started="2999-01-01T00:00:00+00:00")
    assert runs.summaries()[0].condition.state is RunState.STOPPING, "its launcher has something to do yet"
