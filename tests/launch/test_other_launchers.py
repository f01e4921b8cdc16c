"""Started by torchrun, srun or mpirun: one run that goes on after a restart, or a sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks
from conftest import SMALL

from simpletuner.app import main
from simpletuner.errors import SettingsError
from simpletuner.launch.started_tasks import check_started_once
from simpletuner.settings.declared.sections import Launch

STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}
"""What srun sets for each of 8 tasks."""
SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
"""What a job has in its batch script, and in a shell of `salloc`."""


def test_a_rank_that_is_killed_is_started_again_by_torchrun_and_the_run_goes_on(sdxl_flags, tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "simpletuner", "train"]
    command += [*SMALL, *sdxl_flags, f"--output_dir={output}", "--use_cpu", "--checkpoint_step_interval=2"]
    with log.open("wb") as file:
        agent = subprocess.Popen([*command, "--max_train_steps=12"], stdout=file, stderr=file)
    try:
        end = time.monotonic() + 120
        while not (output / "checkpoints" / "checkpoint-000002").exists():
            assert agent.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        by_rank = {each.environ()["RANK"]: each for each in psutil.Process(agent.pid).children()}
        by_rank["1"].send_signal(signal.SIGKILL)
        code = agent.wait(240)
    finally:
        for process in psutil.Process(agent.pid).children(recursive=True) if agent.poll() is None else ():
            process.kill()
        agent.kill()
        agent.wait()
    said = log.read_text()
    assert code == 0 and "is used twice" not in said, said
    assert re.search(r"resuming from \S+/checkpoint-0000\d\d", said), said
    steps = [
        row["step"] for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in row
    ]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize(
    ("environment", "launch", "sentence", "hint"),
    [
        (STEP, Launch(), "srun starts this command 8 times (SLURM_STEP_NUM_TASKS = 8)", "`srun --ntasks=1 simpletuner"),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "2"},
            Launch(),
            "srun starts this command 8 times",
            "`simpletuner config export --to slurm --num_processes=8 --num_machines=2` writes the script",
        ),
        (STEP, Launch(num_processes=8, num_machines=2), "srun starts this command 8 times", "--num_processes=8"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, Launch(), "mpirun starts this command 4 times", "`simpletuner train"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, Launch(), "mpiexec starts this command 2 times", "--num_processes=2"),
    ],
)
def test_a_command_that_is_started_several_times_is_refused_with_the_line_that_works(
    environment, launch, sentence, hint
):
    with pytest.raises(SettingsError) as caught:
        check_started_once(launch, environment)
    assert sentence in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (SHELL, Launch()),
        (SHELL | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, Launch()),
        (SHELL | {"SLURM_STEP_ID": "4294967291"}, Launch()),
        (STEP | {"SLURM_PTY_PORT": "40001"}, Launch()),
        (STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, Launch(num_processes=8)),
        (STEP, Launch(num_processes=64, num_machines=8)),
        (STEP | {"RANK": "1", "WORLD_SIZE": "8"}, Launch()),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, Launch()),
        ({}, Launch(num_processes=2)),
    ],
)
def test_shells_of_a_job_one_task_per_machine_and_ranks_are_not_refused(environment, launch):
    check_started_once(launch, environment)


def test_train_refuses_before_anything_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--model_family=sdxl", "--instance_data_dir=."])
    assert "srun starts this command 8 times" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_ranks_of_one_machine_without_local_rank_are_refused(starter, sdxl_flags, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    train = ["train", *SMALL, *sdxl_flags, f"--output_dir={tmp_path / 'run'}"]
    started = [starter.start(ranks.command_line_with, 1, {**alone, "RANK": str(rank)}, train) for rank in range(2)]
    assert [each.wait() for each in started] == [[2], [2]]
    said = "".join(each.said for each in started)
    assert f"ranks 0, 1 run on {os.uname().nodename} without LOCAL_RANK: all would use GPU 0" in said
    assert not (tmp_path / "run").exists()
