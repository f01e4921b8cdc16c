"""What a run says of itself while it runs, ends and begins again, whoever started its ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import SMALL, Ranks
from patience import PATIENCE

from simpletuner.errors import DataError, Stopped
from simpletuner.system.files.locks import is_locked
from simpletuner.system.processes.run_status import STATUS, RunState, RunStatus, StatusWriter, read_status


def status_of(output: Path) -> RunStatus:
    status = read_status(output / STATUS)
    assert status is not None
    return status


def wait_for_state(output: Path, state: RunState, run: Ranks) -> RunStatus:
    """Wait until a run says a state, and that it has taken a step."""
    end = time.monotonic() + PATIENCE
    while True:
        status = read_status(output / STATUS)
        if status is not None and status.state is state and status.loss is not None:
            return status
        assert time.monotonic() < end, run.said
        time.sleep(0.02)


def test_a_run_without_a_launcher_of_ours_says_what_it_does_and_how_it_ends(sdxl_flags, starter, train, tmp_path):
    """Ranks as torchrun and SLURM start them: each has its number in the environment, and no launcher to tell."""
    output = tmp_path / "run"
    flags = (f"--output_dir={output}", *SMALL, *sdxl_flags, "--train_batch_size=2")
    run = starter.train(2, *flags, "--max_train_steps=100000")
    status = wait_for_state(output, RunState.RUNNING, run)
    assert (status.max_steps, status.doing, status.rank_pid) == (100000, "training", run.processes[0].pid)
    assert status.step > 0 and status.seconds_left
    os.kill(run.processes[1].pid, signal.SIGTERM)
    assert run.wait() == [143, 143], run.said
    stopped = status_of(output)
    assert stopped.state is RunState.STOPPED and stopped.seconds_left is None
    assert stopped.reason == f"stopped by SIGTERM at step {stopped.step}; its checkpoint is saved"

    run = starter.train(2, *flags, "--max_train_steps=100000")
    resumed = wait_for_state(output, RunState.RUNNING, run)
    assert resumed.step >= stopped.step and resumed.reason == "" and not resumed.is_of_same_start(stopped)
    run.kill()
    run.wait()
    killed = status_of(output)
    assert killed.state is RunState.RUNNING and not is_locked(output / ".lock"), (
        "who reads both knows that it was killed"
    )

    finished = train(output, *flags, f"--max_train_steps={killed.step + 1}")
    assert status_of(output).state is RunState.FINISHED, finished.said
    assert status_of(output).step == status_of(output).max_steps == killed.step + 1
    train(output, *flags, f"--max_train_steps={killed.step + 1}")
    again = status_of(output)
    assert (again.state, again.step, again.max_steps) == (RunState.FINISHED, killed.step + 1, killed.step + 1)


def test_only_a_start_of_its_own_is_ended_and_only_once(tmp_path):
    first, other, launcher = StatusWriter(), StatusWriter(), StatusWriter()
    first.fail(DataError("before it has a folder"))
    assert not list(tmp_path.iterdir())
    first.begin(tmp_path, "")
    other.follow(tmp_path)
    launcher.supervise(tmp_path)
    other.fail(DataError("no images", "add some"))
    assert (status_of(tmp_path).state, status_of(tmp_path).reason) == (RunState.FAILED, "no images")
    first.show("still at work", 0, 0)
    first.fail(Stopped(15, "stopped by SIGTERM"))
    launcher.end(RunState.STOPPED, "late")
    assert status_of(tmp_path).reason == "no images"
    again = StatusWriter()
    again.begin(tmp_path, "")
    other.end(RunState.STOPPED, "of an earlier start")
    assert status_of(tmp_path).state is RunState.STARTING
    again.stopping("finishing this step")
    launcher.end(RunState.STOPPED, "without saving")
    assert status_of(tmp_path).reason == "without saving"
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"state": "x"}',
        '{"state": "running", "loss": NaN}',
        '{"state": "failed", "pid": []}',
    ],
)
def test_what_is_no_status_is_none(tmp_path, content):
    (tmp_path / STATUS).write_text(content)
    assert read_status(tmp_path / STATUS) is None
    (tmp_path / STATUS).unlink()
    os.mkfifo(tmp_path / STATUS)
    assert read_status(tmp_path / STATUS) is None


def test_a_status_of_a_later_version_is_read(tmp_path):
    (tmp_path / STATUS).write_text(json.dumps({"state": "running", "step": 3, "colour": "red"}))
    assert status_of(tmp_path).step == 3
