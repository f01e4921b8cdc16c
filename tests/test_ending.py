"""Ends badly, ends well: signals, a rank that dies, a full disk, a loss that is not a number."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import SMALL
from flags import last_wins

from simpletuner.checkpoints.layout import numbered, opened


def launched(program: str, output: Path, *flags: str) -> subprocess.Popen:
    """Start the real command, which starts its ranks through torchrun's agent."""
    command = [str(Path(sys.executable).with_name(program)), *(["train"] if program == "simpletuner" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*command, *last_wins((f"--output_dir={output}", *SMALL, *flags))]
    with (output.parent / f"{output.name}.log").open("ab") as log:
        return subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True)


def said(output: Path) -> str:
    return (output.parent / f"{output.name}.log").read_text(errors="replace")


def wait_for_step(output: Path, process: subprocess.Popen, step: int) -> None:
    metrics, end = output / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < end, said(output)
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    text = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in text.splitlines() if "simpletuner" in line]


def test_signals_save_and_leave_and_a_dead_rank_ends_the_others(sdxl_flags, tmp_path):
    output = tmp_path / "run"
    flags = (*sdxl_flags, "--num_processes=2", "--train_batch_size=2", "--fsdp_enable", "--max_train_steps=100000")
    for number, code, program in ((signal.SIGTERM, 143, "simpletuner"), (signal.SIGINT, 130, "simpletuner-train")):
        process = launched(program, output, *flags)
        before = len(numbered(output / "checkpoints"))
        newest = opened(numbered(output / "checkpoints")[0]).step if before else 0
        wait_for_step(output, process, newest + 3)
        # Ctrl-C reaches the whole group, as in a terminal; SIGTERM only the launcher, as from a scheduler
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.wait(60) == code, said(output)
        assert len(numbered(output / "checkpoints")) == before + 1
        assert opened(numbered(output / "checkpoints")[0]).step >= newest + 3
        assert f"stopped by {signal.Signals(number).name} at step" in said(output)
    process = launched("simpletuner", output, *flags)
    newest = opened(numbered(output / "checkpoints")[0]).step
    wait_for_step(output, process, newest + 2)
    assert "resuming from" in said(output)
    began = time.monotonic()
    victim = children_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    assert process.wait(60) == 5, said(output)
    assert time.monotonic() - began < 30
    assert "lost contact" not in said(output), "only the launcher knows what happened"
    assert re.search(rf"rank \d \(pid {victim}\) was killed by SIGKILL", said(output))
    assert "Traceback" not in said(output)
    (output / "metrics.jsonl").unlink()  # it tells of steps that the killed run had not saved
    process = launched("simpletuner", output, *flags)
    newest = opened(numbered(output / "checkpoints")[0]).step
    wait_for_step(output, process, newest + 2)
    ranks = [psutil.Process(pid) for pid in children_of(process.pid)]
    process.kill()  # no time to ask its ranks: the kernel does
    process.wait()
    assert psutil.wait_procs(ranks, timeout=60)[1] == [], said(output)
    assert opened(numbered(output / "checkpoints")[0]).step >= newest + 2


def test_one_rank_saves_and_leaves_too(sdxl_flags, starter, tmp_path):
    run = starter.train(1, f"--output_dir={tmp_path / 'run'}", *SMALL, *sdxl_flags, "--max_train_steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not (metrics.exists() and '"step": 2,' in metrics.read_text()):
        assert time.monotonic() < end, run.said
        time.sleep(0.02)
    run.kill(signal.SIGTERM)
    assert run.wait() == [143]
    opened(numbered(tmp_path / "run" / "checkpoints")[0])


def test_a_second_run_in_the_same_folder_is_refused(sdxl_flags, starter, train, tmp_path):
    output = tmp_path / "run"
    first = starter.train(1, f"--output_dir={output}", *SMALL, *sdxl_flags, "--max_train_steps=100000")
    end = time.monotonic() + 60
    while not (output / "metrics.jsonl").exists():
        assert time.monotonic() < end, first.said
        time.sleep(0.05)
    assert f"another run is using {output}" in train(output, *sdxl_flags, "--max_train_steps=1", code=3).said
    first.kill()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_full_disk_leaves_the_older_checkpoint_and_a_sentence(form, sdxl_flags, train, small_disk, tmp_path):
    output = small_disk / "run"
    flags = (*sdxl_flags, "--train_batch_size=2", "--fsdp_enable", f"--fsdp_state_dict_type={form}")
    flags = (*flags, "--checkpoint_step_interval=2", "--max_train_steps=6")
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 45_000_000))
    # one checkpoint of the tiny U-Net with its moments takes 25 MB: the first fits, the second does not
    run = train(output, *flags, world=2, code=3)
    assert "cannot save to" in run.said and "No space left" in run.said
    assert run.said.count("\nerror: ") == 1
    checkpoints = numbered(output / "checkpoints")
    assert [folder.name for folder in checkpoints] == ["checkpoint-000002"]
    opened(checkpoints[0])
    assert not list((output / "checkpoints").glob(".*"))
    (small_disk / "ballast").unlink()
    again = train(
        output, *flags, "--checkpoints_total_limit=1", "--checkpoint_step_interval=100", "--max_train_steps=3", world=2
    )
    assert "resuming from" in again.said and len(again.rows) == 3


def test_a_full_disk_while_caching_is_one_sentence_and_caching_goes_on(sdxl_flags, train, small_disk, tmp_path):
    cache = small_disk / "latents"
    cache.mkdir()
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
    flags = (*sdxl_flags, "--train_batch_size=4", f"--cache_dir_vae={cache}", "--max_train_steps=1")
    run = train(tmp_path / "run", *flags, code=3)
    assert "cannot write to the cache" in run.said and "No space left" in run.said
    ballast.unlink()
    assert re.search(r"latents: making \d+ of 36", train(tmp_path / "run", *flags).said)


def test_a_loss_that_is_not_a_number_stops_with_step_and_samples(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4", "--learning_rate=1e30", "--max_grad_norm=0", "--max_train_steps=9")
    run = train(tmp_path / "run", *flags, "--checkpoint_step_interval=1", code=5)
    assert re.search(r"step \d: loss is (nan|inf)", run.said)
    assert ".png" in run.said
    for folder in numbered(tmp_path / "run" / "checkpoints"):
        assert opened(folder).step < int(re.search(r"step (\d): loss is", run.said)[1])
