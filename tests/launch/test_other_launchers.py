"""Started by torchrun, srun or mpirun: one run that goes on after a restart, or a sentence."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ranks
from conftest import SMALL
from forked_launcher import launch_with_torchrun
from patience import PATIENCE

from simpletuner.app import main
from simpletuner.commands.nfs import node_of
from simpletuner.errors import SettingsError
from simpletuner.launch.started_tasks import first_host, rank_variables, stop_advice, tasks_per_machine
from simpletuner.settings.declared.sections import Launch, Settings

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "8",
    "SLURM_STEP_NODELIST": "gpu003",
}
"""What srun sets for each of 8 tasks."""
TWO_NODES = {
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "151453697",
}
"""What Open MPI 4.1 sets for each of 4 tasks."""
SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
"""What a job has in its batch script, and in a shell of `salloc`."""


def test_a_rank_that_is_killed_is_started_again_by_torchrun_and_the_run_goes_on(starter, sdxl_flags, tmp_path):
    output = tmp_path / "run"
    command = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "simpletuner", "train"]
    command += [*SMALL, *sdxl_flags, f"--output_dir={output}", "--use_cpu", "--checkpoint_step_interval=2"]
    agent = starter.start(launch_with_torchrun, 1, str(tmp_path), [*command, "--max_train_steps=12"])
    end = time.monotonic() + PATIENCE
    while not (output / "checkpoints" / "checkpoint-000002").exists():
        assert agent.processes[0].is_alive() and time.monotonic() < end, agent.said
        time.sleep(0.02)
    told = [tmp_path / f"{each.pid}.json" for each in psutil.Process(agent.processes[0].pid).children()]
    by_rank = {json.loads(each.read_text())["RANK"]: int(each.stem) for each in told if each.exists()}
    os.kill(by_rank["1"], signal.SIGKILL)
    (code,) = agent.wait()
    said = agent.said
    assert code == 0 and "is used twice" not in said, said
    assert re.search(r"resuming from \S+/checkpoint-0000\d\d", said), said
    steps = [
        row["step"] for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in row
    ]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize(
    ("environment", "launch", "expected"),
    [
        (STEP, Launch(), {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "0",
                          "MASTER_ADDR": "127.0.0.1"}),
        (STEP | TWO_NODES, Launch(num_processes=8), {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
                          "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "gpu003"}),
        (STEP | TWO_NODES, Launch(main_process_ip="10.0.0.1", main_process_port=4000), {"MASTER_ADDR": "10.0.0.1",
                          "MASTER_PORT": "4000"}),
        (STEP | {"MASTER_ADDR": "here", "MASTER_PORT": "1"}, Launch(), {"MASTER_ADDR": "here", "MASTER_PORT": "1"}),
        (OPEN_MPI, Launch(), {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4",
                              "MASTER_ADDR": "127.0.0.1"}),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, Launch(),
         {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}),
        ({"PMI_SIZE": "8", "PMI_RANK": "6", "PALS_LOCAL_RANKID": "2", "PALS_LOCAL_SIZE": "4", "MASTER_ADDR": "x1"},
         Launch(), {"RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "x1"}),
    ],
)  # fmt: skip
def test_what_srun_and_mpirun_say_becomes_what_torchrun_says(environment, launch, expected):
    found = rank_variables(launch, environment)
    assert found | expected == found


def test_tasks_of_one_job_meet_and_two_jobs_on_one_machine_do_not():
    def port(job: str, rank: int) -> int:
        return int(rank_variables(Launch(), STEP | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank)})["MASTER_PORT"])

    ports = [{port(job, rank) for rank in range(8)} for job in ("7", "8")]
    assert len(ports[0]) == len(ports[1]) == 1 and ports[0] != ports[1]
    assert all(20_000 <= each < 30_000 for each in ports[0] | ports[1])


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu[003-006,9],x1", "gpu003"),
        ("n1,n2", "n1"),
        ("n[12]", "n12"),
        ("a[1-2]-ib0,b", "a1-ib0"),
        ("solo", "solo"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(text, host):
    assert first_host(text) == host


def test_tasks_of_each_machine_as_slurm_shortens_them():
    assert (
        tasks_per_machine("2(x3),1") == [2, 2, 2, 1] and tasks_per_machine("8") == [8] and tasks_per_machine("") == []
    )


@pytest.mark.parametrize(
    ("environment", "sentence", "hint"),
    [
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun starts this command 4 times (OMPI_COMM_WORLD_SIZE = 4), and nothing says where the machine of rank",
            "--main_process_ip",
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, "srun starts this command 8 times", "set RANK, LOCAL_RANK"),
    ],
)
def test_a_command_that_is_started_several_times_is_refused_where_its_ranks_could_not_meet(environment, sentence, hint):
    with pytest.raises(SettingsError) as caught:
        rank_variables(Launch(), environment)
    assert sentence in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (SHELL, Launch()),
        (SHELL | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, Launch()),
        (SHELL | {"SLURM_STEP_ID": "4294967291"}, Launch()),
        (STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, Launch(num_processes=8)),
        (STEP, Launch(num_processes=64, num_machines=8)),
        (STEP | {"RANK": "1", "WORLD_SIZE": "8"}, Launch()),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, Launch()),
        ({}, Launch(num_processes=2)),
    ],
)
def test_shells_of_a_job_one_task_per_machine_and_ranks_are_left_as_they_are(environment, launch):
    assert rank_variables(launch, environment) == {}


SAY_RANK = f"""{sys.executable} -c '
import os
from simpletuner.launch.started_tasks import rank_variables
from simpletuner.settings.declared.sections import Launch
print("rank", rank_variables(Launch(), os.environ).get("RANK"))'"""


def said_in_a_terminal(script: str) -> list[str]:
    """Run a script as the task of `srun --pty` that bash is there, and return the ranks that it prints."""
    said, pid, terminal = b"", *pty.fork()
    if not pid:
        environment = {**os.environ, **STEP, "SLURM_PTY_PORT": "40001", "SLURM_TASK_PID": str(os.getpid())}
        os.execve("/bin/bash", ["bash", "-c", script], environment)
    with suppress(OSError):  # EIO once all have ended
        while part := os.read(terminal, 4096):
            said += part
    os.close(terminal)
    os.waitpid(pid, 0)
    return re.findall(r"rank (\w+)", said.decode())


def test_a_shell_of_srun_is_told_from_what_is_started_in_it():
    """As on Slurm 22.05: `srun`, and `sbatch`, typed in `srun --pty bash` inherit SLURM_PTY_PORT."""
    typed = f"set -m; {SAY_RANK}; setsid --wait {SAY_RANK}"
    assert said_in_a_terminal(typed) == ["None", "None"]
    assert said_in_a_terminal(f"exec {SAY_RANK}") == ["1"]
    assert said_in_a_terminal(f"{SAY_RANK}\n:") == ["1"], "a script that srun --pty starts"
    inner = f"export SLURM_TASK_PID=$$; . /dev/stdin' <<'EOF'\n{SAY_RANK}\nEOF"
    started = f"set -m; SLURM_STEP_ID=1 setsid --wait bash -c '{inner}"
    assert said_in_a_terminal(started) == ["1"], "srun starts tasks without a terminal"
    assert (
        rank_variables(Launch(), STEP | {"SLURM_PTY_PORT": "40001", "SLURM_TASK_PID": str(os.getpid())})["RANK"] == "1"
    )


def test_a_run_says_how_it_is_stopped_where_its_launcher_kills_it_sooner_than_it_saves():
    assert "`scancel --signal=TERM 7.0` saves and stops" in stop_advice(STEP, 30)
    assert "1 s after it has passed on SIGTERM" in (said := stop_advice(OPEN_MPI, 30))
    assert f"`kill -TERM {os.getpid()}` on {socket.gethostname()}" in said
    longer = {"OMPI_MCA_odls_base_sigkill_timeout": "60"}
    assert "60 s after" in stop_advice(OPEN_MPI | longer, 90) and stop_advice(OPEN_MPI | longer, 30) == ""
    hydra = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert [stop_advice(each, 30) for each in (hydra, SHELL, {})] == [""] * 3


def test_a_node_that_is_no_host_has_the_address_that_slurm_uses(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show node no-host-3" ] && echo "NodeName=no-host-3\n   NodeAddr=10.9.8.7 Port=6818"'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nodes = STEP | TWO_NODES
    assert rank_variables(Launch(), nodes | {"SLURM_STEP_NODELIST": "no-host-[3-4]"})["MASTER_ADDR"] == "10.9.8.7"
    assert rank_variables(Launch(), nodes | {"SLURM_STEP_NODELIST": "localhost,b"})["MASTER_ADDR"] == "localhost"
    assert rank_variables(Launch(), nodes | {"SLURM_STEP_NODELIST": "no-host-[7-8]"})["MASTER_ADDR"] == "no-host-7"


def test_a_task_is_a_node_of_the_check_of_a_folder(monkeypatch, tmp_path):
    settings = Settings(launch=Launch(num_machines=2, num_processes=2))

    def node(nodes: int | None = None, rank: int | None = None, **variables: str) -> tuple[int, int]:
        monkeypatch.setattr(os, "environ", variables)
        found = node_of(settings, tmp_path, nodes, rank, 1)
        return found.rank, found.nodes

    assert node() == (0, 2) and node(rank=1) == (1, 2)
    assert node(**STEP | TWO_NODES) == (5, 8) and node(**OPEN_MPI) == (3, 4)
    assert node(RANK="2", WORLD_SIZE="3") == (2, 3)
    assert node(nodes=2, rank=1, **STEP) == (1, 2), "as docs/nfs.md said"
    assert node(**SHELL) == (0, 2)


def test_train_refuses_before_anything_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--model_family=sdxl", "--instance_data_dir=."])
    assert "mpirun starts this command 4 times" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_tasks_of_mpirun_are_the_ranks_of_one_run(sdxl_flags, tmp_path):
    program = str(Path(sys.executable).with_name("simpletuner"))
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    flags = [*SMALL, *sdxl_flags, "--use_cpu", "--max_train_steps=2", f"--output_dir={tmp_path / 'run'}"]
    done = subprocess.run([*mpirun, program, "train", *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2], "one run, not two"
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["num_processes"] == 2
    said = re.findall(r"mpirun kills its tasks 1 s after it has passed on SIGTERM: `kill -TERM \d+` on", done.stderr)
    assert len(said) == 1, done.stderr


def test_tasks_of_srun_are_the_ranks_of_one_run(starter, sdxl_flags, tmp_path):
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1"}
    train = ["train", *SMALL, *sdxl_flags, "--max_train_steps=2", f"--output_dir={tmp_path / 'run'}"]
    started = [
        starter.start(
            ranks.command_line_with, 1, {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, train
        )
        for rank in range(2)
    ]
    said = f"(Ctrl-C, SIGTERM): `scancel --signal=TERM {os.getpid()}.0` saves and stops this run"
    assert [each.wait() for each in started] == [[0], [0]], "".join(each.said for each in started)
    assert "".join(each.said for each in started).count(said) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


def test_ranks_of_one_machine_without_local_rank_are_refused(starter, sdxl_flags, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    train = ["train", *SMALL, *sdxl_flags, f"--output_dir={tmp_path / 'run'}"]
    started = [starter.start(ranks.command_line_with, 1, {**alone, "RANK": str(rank)}, train) for rank in range(2)]
    assert [each.wait() for each in started] == [[2], [2]]
    said = "".join(each.said for each in started)
    assert f"ranks 0, 1 run on {os.uname().nodename} without LOCAL_RANK, which says which of them" in said
    assert not (tmp_path / "run").exists()
