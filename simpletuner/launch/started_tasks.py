"""Tasks of `srun` and `mpirun`: both start the same command several times, with their own variables for each
rank.

They do not set `RANK`. Without a translation every task would start its own run: one would get output_dir,
and all would train alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.launch.plan import LOOPBACK, is_rank
from simpletuner.settings.declared.sections import Launch

SPECIAL_STEPS = 0xFFFFFFF0
"""First of SLURM's ids for batch scripts (...FB), interactive shells (...FA) etc., which run once."""

SCONTROL_SECONDS = 10
# Below the ports that Linux gives to outgoing connections, 32768 and above.
FIRST_PORT, PORTS = 20_000, 10_000


@dataclass(frozen=True)
class Task:
    """Task that a program starts with this command, by the program's own variables."""

    program: str
    variable: str
    """Name of the variable with the number of tasks."""
    count: int
    rank: int | None
    local_rank: int | None = None
    local_count: int | None = None
    machine: int | None = None
    first_machine: str = ""
    job: str = ""
    """The same text for all tasks of one job, another one for each job; empty if nothing says it."""


@dataclass(frozen=True)
class MpiNames:
    program: str
    rank: str
    count: str
    local_rank: tuple[str, ...]
    local_count: tuple[str, ...]


# Open MPI and MVAPICH; PMI is used by MPICH's Hydra and Cray's PALS, with their own names per machine.
MPI = (
    MpiNames(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    MpiNames(
        "mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    MpiNames(
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
)


def rank_variables(launch: Launch, environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and what belongs to it, where srun or mpirun starts this command once per rank.

    Empty for a process that is a rank already, and for a command started once, or once per machine: then it
    is a launcher. Raises SettingsError if the address of the rendezvous is unknown.
    """
    task = started_task(environment)
    if is_rank(environment) or task is None or task.count in (1, launch.num_machines):
        return {}
    rank = number_among(task, "set RANK, LOCAL_RANK and WORLD_SIZE for each")
    known = {"LOCAL_RANK": task.local_rank, "LOCAL_WORLD_SIZE": task.local_count, "GROUP_RANK": task.machine}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(task.count),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or rendezvous_address(task, launch),
        "MASTER_PORT": environment.get("MASTER_PORT") or rendezvous_port(task, launch),
        **{name: str(value) for name, value in known.items() if value is not None},
    }


def started_number(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the number of this process, from 0, and the count of all that torchrun, srun or mpirun started
    alike.

    None where it is alone. Raises SettingsError where nothing says its number.
    """
    if is_rank(environment):
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    task = started_task(environment)
    if task is None or task.count == 1:
        return None
    return number_among(task, "set RANK and WORLD_SIZE for each"), task.count


def number_among(task: Task, hint: str) -> int:
    """Return the rank of a task. Raises SettingsError where nothing says it."""
    if task.rank is None:
        raise unknown_rank(task, "nothing says which of them this is", hint)
    return task.rank


def rendezvous_address(task: Task, launch: Launch) -> str:
    if launch.main_process_ip:
        return launch.main_process_ip
    if task.local_count == task.count:
        return LOOPBACK
    if task.first_machine:
        return reachable(task.first_machine)
    hint = (
        f"set --main_process_ip to the address of the machine of rank 0, or MASTER_ADDR in {task.program}'s environment"
    )
    raise unknown_rank(task, "nothing says where the machine of rank 0 is", hint)


def reachable(node: str) -> str:
    """Name of a SLURM node if it is a host name, else the address that SLURM uses."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        with suppress(OSError, subprocess.TimeoutExpired):
            asked = ["scontrol", "show", "node", node]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=SCONTROL_SECONDS).stdout
            if found := re.search(r"\bNodeAddr=(\S+)", said):
                return found[1]
    return node


def rendezvous_port(task: Task, launch: Launch) -> str:
    """Return main_process_port if it is set, else a port of the job's own: two jobs may share a machine."""
    is_set = launch.main_process_port != Launch.model_fields["main_process_port"].default
    if is_set or not task.job:
        return str(launch.main_process_port)
    # All tasks must compute the same port, without a word between them.
    number = int.from_bytes(hashlib.blake2b(task.job.encode(), digest_size=8).digest())
    return str(FIRST_PORT + number % PORTS)


def unknown_rank(task: Task, why: str, hint: str) -> SettingsError:
    started = f"{task.program} starts this command {task.count} times ({task.variable} = {task.count})"
    return SettingsError(f"{started}, and {why}", hint)


def started_task(environment: Mapping[str, str]) -> Task | None:
    """Task of a launcher that starts the command several times, if any; not a shell in a SLURM job."""
    step = number_of(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is not None and step < SPECIAL_STEPS and not is_typed(environment):
        return task_of_slurm(environment, step)
    for names in MPI:
        if count := number_of(environment, names.count):
            return Task(
                names.program,
                names.count,
                count,
                number_of(environment, names.rank),
                number_of(environment, *names.local_rank),
                number_of(environment, *names.local_count),
                job=environment.get("PMIX_NAMESPACE", "") or environment.get("PALS_APID", ""),
            )
    return None


def stop_advice(environment: Mapping[str, str], save_seconds: float) -> str:
    """Advice for a run whose launcher would kill it within `save_seconds` of being stopped; else empty.

    As seen on Slurm 22.05.8 and Open MPI 4.1.4; docs/many-machines.md has a table of launchers.
    """
    task = started_task(environment)
    if task is not None and task.program == "srun":
        asked = "srun kills its tasks at once when it is asked to stop itself (Ctrl-C, SIGTERM)"
        return f"{asked}: `scancel --signal=TERM {task.job}` saves and stops this run"
    if task is not None and task.variable.startswith("OMPI_"):
        grace = number_of(environment, "OMPI_MCA_odls_base_sigkill_timeout")
        if (seconds := 1 if grace is None else grace) < save_seconds:
            asked = f"mpirun kills its tasks {seconds} s after it has passed on SIGTERM"
            save = f"`kill -TERM {os.getpid()}` on {socket.gethostname()} saves and stops this run"
            return f"{asked}: {save}, and `--mca odls_base_sigkill_timeout 60` would give it 60 s"
    return ""


def is_typed(environment: Mapping[str, str]) -> bool:
    """True if this command was typed in the shell of `srun --pty bash`, not started by srun itself.

    SLURM_PTY_PORT does not tell: `srun` and `sbatch` inherit it where they are typed in such a shell. The
    shell is a task with a terminal, and gives each command a process group of its own; a task of a plain srun
    has no terminal, and a command or script that `srun --pty` starts itself stays in the group of its task.
    """
    if "SLURM_PTY_PORT" not in environment:
        return False
    own = group_and_terminal("self")
    task = group_and_terminal(environment.get("SLURM_TASK_PID", ""))
    group, terminal = task or own or (0, 0)
    return terminal != 0 and (task is None or own is None or own[0] != group)


def group_and_terminal(pid: str) -> tuple[int, int] | None:
    """Return the process group of a process and the device of its terminal, 0 for none; None if there is no
    such one.

    From /proc/PID/stat: proc(5).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[2]), int(fields[4])


def task_of_slurm(environment: Mapping[str, str], step: int) -> Task:
    """Task of srun, from the step's variables first: the job's may be of another size."""
    variable = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), "")
    machine = number_of(environment, "SLURM_NODEID")
    per_machine = tasks_per_machine(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Task(
        "srun",
        variable,
        number_of(environment, variable) or 1,
        number_of(environment, "SLURM_PROCID"),
        number_of(environment, "SLURM_LOCALID"),
        per_machine[machine] if machine is not None and machine < len(per_machine) else None,
        machine,
        first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")),
        f"{environment.get('SLURM_JOB_ID', '')}.{step}",
    )


def tasks_per_machine(text: str) -> list[int]:
    """Return the tasks of each machine: `2(x3),1` means 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(chain.from_iterable(repeat(int(tasks), int(times or 1)) for tasks, times in parts))


def first_host(text: str) -> str:
    """Return the first of a list of hosts as SLURM shortens it: `gpu[003-006,9],x1` begins with gpu003."""
    found = re.match(r"([^\[,]*)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", text)
    return "".join(part or "" for part in found.groups()) if found else ""


def number_of(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the first of some variables that is a number."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)
