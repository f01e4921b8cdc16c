"""What one machine starts: its ranks, their command line, and what each finds in its environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner.launch.environment import ranks_per_machine, visible_gpus
from simpletuner.settings.sections import Launch
from simpletuner.system.network import interface_towards

LOOPBACK = "127.0.0.1"
FREE_PORT = "a free port"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without them gloo takes the address of the host name: it need not be the one that the other machines reach, and on a
single machine it would listen where others can reach it. NCCL opens its first connections there, too."""


@dataclass(frozen=True)
class Plan:
    """The ranks of one machine; `chosen` holds the variables that we add for all of them."""

    machine: int
    launch: Launch
    arguments: tuple[str, ...]
    address: str
    port: str
    chosen: Mapping[str, str]

    @property
    def ranks(self) -> range:
        """Return the global ranks of this machine."""
        count = ranks_per_machine(self.launch)
        return range(self.machine * count, (self.machine + 1) * count)

    @property
    def command(self) -> list[str]:
        """Return the command line of every rank; -P keeps files of the current folder from being imported."""
        return [sys.executable, "-P", "-u", "-m", "simpletuner", *self.arguments]

    @property
    def common(self) -> dict[str, str]:
        """Return the variables that are equal for all ranks of this machine, named as torchrun names them."""
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "WORLD_SIZE": str(self.launch.num_processes),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.machine),
            "GROUP_WORLD_SIZE": str(self.launch.num_machines),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **self.chosen,
        }

    def environments(self) -> Iterator[dict[str, str]]:
        """Yield what each rank finds in its environment besides what this process has there."""
        for local_rank, rank in enumerate(self.ranks):
            yield {**self.common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}


def plan_of(machine: int, launch: Launch, arguments: Sequence[str], port: int | None = None) -> Plan:
    """Return what a machine starts; `port` is the one that was found where a single machine takes a free one."""
    several = launch.num_machines > 1
    address = launch.main_process_ip if several else LOOPBACK
    known = str(port or (launch.main_process_port if several else FREE_PORT))
    return Plan(machine, launch, tuple(arguments), address, known, chosen_variables(machine, launch))


def chosen_variables(machine: int, launch: Launch) -> dict[str, str]:
    """Return threads, interface and GPUs of a machine's ranks; the user's own variables come first, except for GPUs."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks_per_machine(launch)))
    chosen = {"OMP_NUM_THREADS": threads}
    ip = launch.main_process_ip if launch.num_machines > 1 else LOOPBACK
    here = machine == launch.machine_rank or launch.num_machines == 1
    name = interface_towards(ip, launch.main_process_port) if here else f"(the interface that reaches {ip})"
    chosen |= dict.fromkeys(INTERFACE_VARIABLES, name) if name else {}
    return {name: os.environ.get(name, value) for name, value in chosen.items()} | visible_gpus(launch)


def describe_plans(launch: Launch, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return, machine by machine, what to type there and what that starts; arguments may not name machine_rank."""
    return [describe(machine, launch, list(arguments)) for machine in range(launch.num_machines)]


def describe(machine: int, launch: Launch, arguments: list[str]) -> dict[str, Any]:
    """Return what to type on a machine and what that starts."""
    typed = [*arguments, f"--machine_rank={machine}"] if launch.num_machines > 1 else arguments
    plan = plan_of(machine, launch, typed)
    in_place = launch.num_processes == 1
    environments = [visible_gpus(launch)] if in_place else list(plan.environments())
    return {
        "machine_rank": machine,
        "type": ["simpletuner", *typed],
        "command": [] if in_place else plan.command,
        "ranks": environments,
    }


def as_text(description: Mapping[str, Any]) -> str:
    """Return a description as lines to copy: the command, and below it what starts, as comments."""
    typed, ranks = shlex.join(description["type"]), description["ranks"]
    lines = [f"# machine {description['machine_rank']}", typed]
    if not description["command"]:
        lines.append(f"#   trains in this process{', with ' + assignments(ranks[0]) if ranks[0] else ''}")
        return "\n".join(lines)
    common = {name: value for name, value in ranks[0].items() if name not in ("RANK", "LOCAL_RANK")}
    lines += [f"#   {shlex.quote(name)}={shlex.quote(value)}" for name, value in common.items()]
    lines += [f"#   RANK={rank['RANK']} LOCAL_RANK={rank['LOCAL_RANK']}" for rank in ranks]
    lines.append(f"#   {shlex.join(description['command'])}")
    return "\n".join(lines)


def assignments(variables: Mapping[str, str]) -> str:
    """Return variables as a shell sets them."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
