"""`srun` and `mpirun` start the same command several times and say in variables of their own which one each is.

They do not say `RANK`: without a translation, each task would be a run of its own. One gets output_dir, or all train
alone in silence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat

from simpletuner.errors import SettingsError
from simpletuner.launch.plan import LOOPBACK, is_rank
from simpletuner.settings.declared.sections import Launch

SPECIAL_STEPS = 0xFFFFFFF0
"""Ids from here on are SLURM's batch script (...FB), interactive shell (...FA) and the like, which run once."""

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
    """The variables of one MPI implementation."""

    program: str
    rank: str
    count: str
    local_rank: tuple[str, ...]
    local_count: tuple[str, ...]


# Open MPI and MVAPICH; PMI is that of MPICH's Hydra and of Cray's PALS, which add names of their own for a machine.
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

    Nothing for a process that is a rank already, and where the command is started once, or once per machine: then it is
    a launcher. Raises SettingsError where nothing says at which address the ranks meet.
    """
    task = started_task(environment)
    if is_rank(environment) or task is None or task.count in (1, launch.num_machines):
        return {}
    if task.rank is None:
        raise unknown_rank(task, "nothing says which of them this is", "set RANK, LOCAL_RANK and WORLD_SIZE for each")
    known = {"LOCAL_RANK": task.local_rank, "LOCAL_WORLD_SIZE": task.local_count, "GROUP_RANK": task.machine}
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.count),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or meeting_address(task, launch),
        "MASTER_PORT": environment.get("MASTER_PORT") or meeting_port(task, launch),
        **{name: str(value) for name, value in known.items() if value is not None},
    }


def meeting_address(task: Task, launch: Launch) -> str:
    if launch.main_process_ip:
        return launch.main_process_ip
    if task.local_count == task.count:
        return LOOPBACK
    if task.first_machine:
        return task.first_machine
    hint = (
        f"set --main_process_ip to the address of the machine of rank 0, or MASTER_ADDR in {task.program}'s environment"
    )
    raise unknown_rank(task, "nothing says where the machine of rank 0 is", hint)


def meeting_port(task: Task, launch: Launch) -> str:
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
    """Return this task of what starts the command several times, if anything does; a shell in a SLURM job does not."""
    step = number_of(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    is_shell = "SLURM_PTY_PORT" in environment  # of `srun --pty bash`: only the first task has a terminal
    if step is not None and step < SPECIAL_STEPS and not is_shell:
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


def task_of_slurm(environment: Mapping[str, str], step: int) -> Task:
    """Return a task of srun; the step's own variables come first, since those of the job may be of another size."""
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
