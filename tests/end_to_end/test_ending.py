"""Ends badly, ends well: signals, a rank that dies, a full disk, a loss that is not a number."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import psutil
import pytest
import ranks
from conftest import SMALL
from flags import last_wins
from forked_launcher import ForkedProcess, launch, run_elsewhere
from patience import PATIENCE

from simpletuner.checkpoints.layout import list_checkpoints, load_checkpoint, parse_step
from simpletuner.launch.launcher_connection import ORPHAN_SECONDS
from simpletuner.system.processes.run_status import STATUS, read_status
from simpletuner.system.processes.signals import REPEAT_SECONDS

LAUNCHED: list[subprocess.Popen | ForkedProcess] = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """Kill what a failed test has left running: it would slow all that follow."""
    yield
    while LAUNCHED:
        launcher = LAUNCHED.pop()
        if launcher.poll() is None:
            for process in psutil.Process(launcher.pid).children(recursive=True):
                process.kill()
            launcher.send_signal(signal.SIGKILL)
            launcher.wait(PATIENCE)


def launched(program: str, output: Path, *flags: str, log: int | None = None) -> subprocess.Popen:
    """Start the real command, which starts its ranks."""
    command = [str(Path(sys.executable).with_name(program)), *(["train"] if program == "simpletuner" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*command, *last_wins((f"--output_dir={output}", *SMALL, *flags))]
    with (output.parent / f"{output.name}.log").open("ab") as file:
        shown = file if log is None else log
        process = subprocess.Popen(arguments, stdout=shown, stderr=shown, env=environment, start_new_session=True)
    LAUNCHED.append(process)
    return process


def said(output: Path) -> str:
    return (output.parent / f"{output.name}.log").read_text(errors="replace")


def wait_for_step(output: Path, process: subprocess.Popen | ForkedProcess, step: int) -> None:
    metrics, end = output / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < end, said(output)
        time.sleep(0.02)


def last_step(output: Path) -> int:
    return json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def ranks_of(process: subprocess.Popen | ForkedProcess) -> list[psutil.Process]:
    is_forked = isinstance(process, ForkedProcess)  # then the environment is that of the fork server
    return [rank for rank in psutil.Process(process.pid).children() if is_forked or "RANK" in rank.environ()]


def ended(output: Path) -> tuple[str, str]:
    """Return how a run says that it ended: its state and the reason."""
    status = read_status(output / STATUS)
    assert status is not None
    return status.state.value, status.reason


def is_free(output: Path) -> bool:
    """Return whether nobody holds a run's folder."""
    with (output / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def expect_nothing_left(output: Path, ranks: list[psutil.Process], within_seconds: float = ORPHAN_SECONDS / 2) -> None:
    """Expect ranks to have ended with their launcher: without it they would do so after ORPHAN_SECONDS."""
    assert psutil.wait_procs(ranks, timeout=within_seconds)[1] == [], said(output)
    assert is_free(output)


Started = TypeVar("Started", subprocess.Popen, ForkedProcess)


@dataclass
class Endless:
    """A sharded run on two ranks that trains until something ends it."""

    output: Path
    flags: tuple[str, ...]
    context: Any
    """Of the fork server."""

    def trained(self, steps: int, *more: str, program: str = "simpletuner", log: int | None = None) -> subprocess.Popen:
        """Start or resume the run, and return once it has trained some steps."""
        (self.output.parent / f"{self.output.name}.log").unlink(missing_ok=True)
        return self.has_trained(steps, lambda: launched(program, self.output, *self.flags, *more, log=log))

    def trained_forked(self, steps: int, *more: str) -> ForkedProcess:
        """As `trained`, without the imports of four programs."""
        return self.has_trained(steps, lambda: self.forked(f"--output_dir={self.output}", *self.flags, *more))

    def forked(self, *flags: str, **variables: str) -> ForkedProcess:
        folder = str(self.output.parent)
        launching = (launch, folder, variables, ["train", *last_wins((*SMALL, *flags))])
        arguments = (partial(os.chdir, folder), f"{self.output}.log", *launching)
        process = self.context.Process(target=run_elsewhere, args=arguments)
        process.start()
        LAUNCHED.append(launcher := ForkedProcess(process))
        return launcher

    def has_trained(self, steps: int, start: Callable[[], Started]) -> Started:
        checkpoints = list_checkpoints(self.output / "checkpoints")
        (self.output / "metrics.jsonl").unlink(missing_ok=True)  # it may tell of steps that were not saved
        process = start()
        wait_for_step(self.output, process, (load_checkpoint(checkpoints[0]).step if checkpoints else 0) + steps)
        return process


@pytest.fixture
def endless(fork_server, sdxl_flags, tmp_path) -> Endless:
    flags = (*sdxl_flags, "--num_processes=2", "--train_batch_size=2", "--fsdp_enable", "--max_train_steps=100000")
    return Endless(tmp_path / "größe", flags, fork_server)


@pytest.mark.long
def test_a_closed_terminal_and_ctrl_c_save_and_leave(endless, monkeypatch):
    output, trained = endless.output, endless.trained
    # a terminal is closed: nothing can be shown any more, which ends no rank, and then SIGHUP says why
    with monkeypatch.context() as ascii_only:
        ascii_only.setenv("PYTHONIOENCODING", "ascii")  # and the folder's name is not
        ours, theirs = pty.openpty()
        process = trained(3, program="simpletuner-train", log=theirs)
    os.close(theirs)
    os.close(ours)
    while "stderr cannot be written" not in (text := (output / "log.txt").read_text()):
        assert process.poll() is None, text
        time.sleep(0.05)
    assert re.search(r"stderr cannot be written \(.*\): the run goes on, and log.txt has all", text)
    wait_for_step(output, process, last_step(output) + 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 129
    assert re.fullmatch(r"stopped by SIGHUP at step \d+; its checkpoint is saved", ended(output)[1])
    assert len(list_checkpoints(output / "checkpoints")) == 1

    # Ctrl-C reaches the whole group, as in a terminal
    process = endless.trained_forked(3)
    assert "resuming from" in said(output)
    os.killpg(process.pid, signal.SIGINT)
    confirmed = "stopping: finishing this step, then saving a checkpoint; press Ctrl-C again to leave without saving"
    while confirmed not in said(output):
        assert process.poll() is None, said(output)
        time.sleep(0.01)
    assert process.wait(PATIENCE) == 130, said(output)
    assert said(output).count(confirmed) == 1
    assert len(list_checkpoints(output / "checkpoints")) == 2
    assert said(output).count("stopped by SIGINT at step") == 1
    assert ended(output)[0] == "stopped" and ended(output)[1].startswith("stopped by SIGINT at step")
    assert "error:" not in said(output), "it is what was asked for"
    log = (output / "log.txt").read_text()
    assert re.search(r"\d \[launcher 0\] stopping: finishing this step", log) and "\n     engine " in log


@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_others_and_is_named(endless):
    output, trained = endless.output, endless.trained_forked
    # a rank that is killed, while checkpoints are written in the background
    process = trained(2, "--checkpoint_step_interval=1")
    victim, ranks = ranks_of(process)[1], ranks_of(process)
    status = read_status(output / STATUS)
    assert status is not None and status.pid == process.pid and status.rank_pid == ranks[0].pid
    victim.kill()
    assert process.wait(PATIENCE) == 5, said(output)
    assert "lost contact" not in said(output), "only the launcher knows what happened"
    assert re.search(rf"rank \d \(pid {victim.pid}\) was killed by SIGKILL", said(output))
    assert "Traceback" not in said(output)
    assert re.fullmatch(rf"rank \d \(pid {victim.pid}\) was killed by SIGKILL", ended(output)[1])
    assert ended(output)[0] == "failed", "the launcher has written it"
    expect_nothing_left(output, ranks)


@pytest.mark.long
def test_a_rank_that_is_stopped_ends_the_others_by_a_second_ctrl_c_or_when_it_stalls(endless):
    output, trained = endless.output, endless.trained_forked
    # a rank that is stopped: Ctrl-C has no effect, as nothing can be saved, and a second one ends all
    process = trained(2)
    victim, ranks = ranks_of(process)[1], ranks_of(process)
    victim.suspend()
    process.send_signal(signal.SIGINT)
    end = time.monotonic() + PATIENCE
    while "press Ctrl-C again" not in said(output):
        assert time.monotonic() < end, said(output)
        time.sleep(0.05)
    time.sleep(REPEAT_SECONDS + 0.1)  # a signal before would be taken for the same one
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    expect_nothing_left(output, ranks)
    assert said(output).rstrip().endswith("stopped without saving")
    assert ended(output) == ("stopped", "stopped without saving, by a second SIGINT")

    # a rank that is stopped, and no one there
    process = trained(2, "--stall_timeout=3")
    victim, ranks = ranks_of(process)[1], ranks_of(process)
    victim.suspend()
    assert process.wait(PATIENCE) == 5
    expect_nothing_left(output, ranks)
    sentence = (
        rf"error: rank \d \(pid {victim.pid}\) has made no progress for ([3-9]|\d\d) s "
        r"\(since [\d:]+\), at .*step \d+: "
    )
    assert re.search(sentence + r"the process is stopped \(SIGSTOP\)", said(output)), said(output)
    assert said(output).count("error:") == 1
    for text in (said(output), (output / "log.txt").read_text()):
        assert text.count(f"`kill -CONT {victim.pid}` lets it go on; the run ends when that lasts 3 s") == 1, text
    assert ended(output)[0] == "failed" and "the process is stopped (SIGSTOP)" in ended(output)[1]
    # the other one has written what it waits for
    (dump,) = output.glob("flight_recorder_rank_*")
    last = pickle.loads(dump.read_bytes())["entries"][-1]
    assert last["profiling_name"].startswith("gloo:all_") and last["state"] == "scheduled"
    where = f"the last collectives of rank {dump.name[-1]} are in {dump.parent.absolute()}/flight_recorder_rank_*: "
    assert where in said(output)


@pytest.mark.long
def test_ranks_of_a_launcher_that_is_killed_save_and_end(endless):
    output, trained = endless.output, endless.trained_forked
    # a launcher that is killed: no time to ask its ranks, which save; while they start they have nothing to save
    process = trained(2)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    expect_nothing_left(output, ranks, 30)  # saving takes its time on a loaded machine
    assert load_checkpoint(list_checkpoints(output / "checkpoints")[0]).step >= 2
    assert ended(output)[0] == "stopped" and "its checkpoint is saved" in ended(output)[1]
    process = launched("simpletuner", output, *endless.flags)
    while len(psutil.Process(process.pid).children()) < 2:
        time.sleep(0.01)
    ranks = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []


OWN_FAMILY = """
import os, time
from simpletuner.models.families.sdxl import SDXL

class Own(SDXL):
    def encode_prompts(self, pipeline, captions):
        if os.environ.get("RANK") == "1" and os.environ.get("HANG"):
            time.sleep(1000)
        return super().encode_prompts(pipeline, captions)
"""


@pytest.mark.long
def test_a_rank_that_hangs_while_caching_is_named_and_nothing_is_imported_by_accident(
    sdxl, shapes, fork_server, tmp_path
):
    """The module that a setting names is found in the current folder, by one rank and by many; others are not."""
    (tmp_path / "own.py").write_text(OWN_FAMILY)
    for library in ("queue", "xxhash"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('imported by accident')")
    family = ("--model_families=own=own:Own", "--model_family=own", f"--pretrained_model_name_or_path={sdxl}")
    flags = (*family, f"--instance_data_dir={shapes}", "--text_encoder_batch_size=2", "--max_train_steps=1")
    flags = (*flags, "--stall_timeout=3")
    two = Endless(tmp_path / "2", (), fork_server)
    assert two.forked(*flags, "--num_processes=2", "--output_dir=2", HANG="1").wait(PATIENCE) == 5, said(two.output)
    stalled = r"error: rank 1 \(pid \d+\) has made no progress for ([3-9]|\d\d) s \(.*\), at encoding captions"
    assert re.search(stalled, said(two.output)), said(two.output)
    assert said(two.output).count("error:") == 1 and is_free(two.output)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(Path(sys.executable).with_name("simpletuner")), "train", *SMALL, *flags, "--output_dir=1"]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment | {"OMP_NUM_THREADS": "1"}}
    done = subprocess.run(command, timeout=PATIENCE, **options)
    assert done.returncode == 0 and "imported by accident" not in done.stderr + said(two.output), done.stderr


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    [caught] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_rank_can_be_ended_while_it_joins(starter, sdxl_flags, tmp_path):
    log = tmp_path / "log"
    flags = ["train", f"--output_dir={tmp_path / 'run'}", *SMALL, *sdxl_flags]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        arguments = (ranks.command_line, 1, 2, closed.getsockname()[1], str(log), flags)
        rank = starter.context.Process(target=ranks.as_rank, args=arguments)
        rank.start()
        end = time.monotonic() + PATIENCE
        while not catches(rank.pid, signal.SIGTERM):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(rank.pid, signal.SIGTERM)
        rank.join(PATIENCE)  # the connection has 600 s
    assert rank.exitcode == 143
    assert "error:" not in log.read_text()


def test_one_rank_saves_and_leaves_too(sdxl_flags, starter, tmp_path):
    flags = (*sdxl_flags, "--max_train_steps=100000", "--checkpoint_step_interval=1")  # one is being written, too
    run = starter.train(1, f"--output_dir={tmp_path / 'run'}", *SMALL, *flags)
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + PATIENCE
    while not (metrics.exists() and '"step": 2,' in metrics.read_text()):
        assert time.monotonic() < end, run.said
        time.sleep(0.02)
    run.kill(signal.SIGTERM)
    assert run.wait() == [143]
    newest = load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    assert f"stopped by SIGTERM at step {newest.step}; its checkpoint is saved" in run.said.replace("\n", " ")
    assert ended(tmp_path / "run") == ("stopped", f"stopped by SIGTERM at step {newest.step}; its checkpoint is saved")
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_second_run_in_the_same_folder_is_refused(sdxl_flags, starter, train, tmp_path):
    output = tmp_path / "run"
    first = starter.train(1, f"--output_dir={output}", *SMALL, *sdxl_flags, "--max_train_steps=100000")
    end = time.monotonic() + PATIENCE
    while not (output / "metrics.jsonl").exists():
        assert time.monotonic() < end, first.said
        time.sleep(0.05)
    assert f"another run is using {output}" in train(output, *sdxl_flags, "--max_train_steps=1", code=3).said
    first.kill()


@pytest.fixture
def small_disk(tmpfs):
    return tmpfs("size=80m")


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_full_disk_leaves_the_older_checkpoint_and_a_sentence(form, sdxl_flags, train, small_disk, tmp_path):
    output = small_disk / "run"
    flags = (*sdxl_flags, "--train_batch_size=2", "--fsdp_enable", f"--fsdp_state_dict_type={form}")
    flags = (*flags, "--checkpoint_step_interval=2", "--max_train_steps=500")
    # At the start all fits: a checkpoint of the small U-Net with its moments takes 13 MB. Then somebody else fills it.
    filler = Thread(target=fill_after_first_checkpoint, args=(output, small_disk / "ballast"))
    filler.start()
    run = train(output, *flags, world=2, code=3)
    filler.join()
    assert "cannot save to" in run.said and "No space left" in run.said
    assert run.said.count("\nerror: ") == 1
    assert ended(output)[0] == "failed" and "No space left" in ended(output)[1], "it is written on a full disk, too"
    checkpoints = list_checkpoints(output / "checkpoints")
    assert checkpoints
    for folder in checkpoints:
        load_checkpoint(folder)
    assert not list((output / "checkpoints").glob(".*"))
    (small_disk / "ballast").unlink()
    steps = parse_step(checkpoints[0]) + 1
    again = train(
        output,
        *flags,
        "--checkpoints_total_limit=1",
        "--checkpoint_step_interval=1000",
        f"--max_train_steps={steps}",
        world=2,
    )
    assert "resuming from" in again.said and len(again.rows) == steps


def fill_after_first_checkpoint(output: Path, ballast: Path) -> None:
    while not (output / "checkpoints" / "checkpoint-000002" / "state.json").exists():
        time.sleep(0.01)
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1_000_000))


def test_a_full_disk_while_caching_is_one_sentence_and_caching_goes_on(sdxl_flags, train, small_disk, tmp_path):
    cache = small_disk / "latents"
    cache.mkdir()
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
    flags = (*sdxl_flags, "--train_batch_size=4", f"--cache_dir_vae={cache}", "--max_train_steps=1")
    run = train(tmp_path / "run", *flags, code=3)
    assert "cannot write to the cache" in run.said and "No space left" in run.said
    ballast.unlink()
    assert re.search(r"encoding (\d+ of )?36 images", train(tmp_path / "run", *flags).said)


def test_a_loss_that_is_not_a_number_stops_with_step_and_samples(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4", "--learning_rate=1e30", "--max_grad_norm=0", "--max_train_steps=9")
    run = train(tmp_path / "run", *flags, "--checkpoint_step_interval=1", code=5)
    assert re.search(r"step \d: loss is (nan|inf)", run.said)
    assert ".png" in run.said
    assert ended(tmp_path / "run")[0] == "failed" and ".png" in ended(tmp_path / "run")[1]
    for folder in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert load_checkpoint(folder).step < int(re.search(r"step (\d): loss is", run.said)[1])
