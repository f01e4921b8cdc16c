"""`srun` and `mpirun` start the same command several times and say in variables of their own how often.

They do not say `RANK`, so each task would be a run of its own: one gets output_dir, or all train alone in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simpletuner.errors import SettingsError
from simpletuner.launch.plan import is_rank
from simpletuner.settings.declared.sections import Launch

SPECIAL_STEPS = 0xFFFFFFF0
"""Ids from here on are SLURM's batch script (...FB), interactive shell (...FA) and the like, which run once."""
MPI_SIZES = {"OMPI_COMM_WORLD_SIZE": "mpirun", "MV2_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


@dataclass(frozen=True)
class StartedTasks:
    """The number of tasks that a program starts with this command, and the variable that says so."""

    program: str
    variable: str
    count: int
    nodes: int = 1


def check_started_once(launch: Launch, environment: Mapping[str, str]) -> None:
    """Raise SettingsError where srun or mpirun starts this command several times, and not once per machine."""
    tasks = started_tasks(environment)
    if is_rank(environment) or tasks is None or tasks.count in (1, launch.num_machines):
        return
    raise SettingsError(
        f"{tasks.program} starts this command {tasks.count} times ({tasks.variable} = {tasks.count}), but without RANK "
        f"each would be a run of its own",
        line_that_works(tasks, launch),
    )


def started_tasks(environment: Mapping[str, str]) -> StartedTasks | None:
    """Return what starts this command several times, if anything does; a shell in a SLURM job does not."""
    step = number_of(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    is_shell = "SLURM_PTY_PORT" in environment  # of `srun --pty bash`: only the first task has a terminal
    if step is not None and step < SPECIAL_STEPS and not is_shell:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        variable = next((name for name in names if name in environment), "")
        nodes = number_of(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
        return StartedTasks("srun", variable, number_of(environment, variable) or 1, nodes)
    for variable, program in MPI_SIZES.items():
        if count := number_of(environment, variable):
            return StartedTasks(program, variable, count)
    return None


def number_of(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the first of some variables that is a number."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)


def line_that_works(tasks: StartedTasks, launch: Launch) -> str:
    """Say how to start one run: the launcher of a machine starts its ranks."""
    ranks = max(launch.num_processes, tasks.count)
    if tasks.nodes > 1:
        export = f"simpletuner config export --to slurm --num_processes={ranks} --num_machines={tasks.nodes}"
        return f"start one task per node, which starts the ranks itself: `{export}` writes the script"
    alone = f"simpletuner train --num_processes={ranks}"
    if tasks.program == "srun":
        return f"start it once, it starts the ranks itself: `srun --ntasks=1 {alone}` with your other flags"
    several = "docs/many-machines.md has those of several machines"
    return f"start it without {tasks.program}, it starts the ranks itself: `{alone}`; {several}"
