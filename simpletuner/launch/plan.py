"""The plan of one machine: its ranks, their command line, environment and GPUs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.network import interface_towards
from simpletuner.system.processes.python_process import module_command

SOCKET_VARIABLE = "_SIMPLETUNER_LAUNCHER_SOCKET"
"""Environment variable with the descriptor of the rank's end of the socket pair."""
LOOPBACK = "127.0.0.1"
FREE_PORT = "a free port"
GPUS = "CUDA_VISIBLE_DEVICES"
# Read by torch's allocators; the older name is read first where both are set.
ALLOCATOR, OLDER_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
# An older torch ends at its first CUDA call by `Unrecognized key`.
PINNED_OPTION, PINNED_OPTION_SINCE = "pinned_max_round_threshold_mb", (2, 13)
# Without them gloo takes the address of the host name: it need not be the one that the other machines reach,
# and on a single machine it would listen where others can reach it. NCCL opens its first connections there,
# too.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def is_rank(environment: Mapping[str, str]) -> bool:
    """True if this process was started as a rank, by us, torchrun or `accelerate launch`."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def check_world_size(loaded: Loaded, environment: Mapping[str, str]) -> None:
    """Raise SettingsError if another launcher's number of ranks differs from `num_processes`."""
    world_size = int(environment["WORLD_SIZE"]) if is_rank(environment) else 1
    wanted = loaded.settings.launch.num_processes
    if world_size != wanted:
        raise SettingsError(
            f"num_processes = {wanted} ({loaded.origins['num_processes']}), but {world_size} ranks run",
            "leave num_processes out, or start as many ranks as it says",
        )


def ranks_per_machine(launch: Launch) -> int:
    return launch.num_processes // launch.num_machines  # settings refuse what does not divide


def visible_gpus(launch: Launch, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for gpu_ids; nothing where all GPUs may be used, or our launcher has
    chosen.

    Raises SettingsError when gpu_ids lists a GPU twice, one that is not there, or fewer GPUs than there are
    ranks on a machine.
    """
    if launch.use_cpu or launch.gpu_ids.strip().lower() == "all" or SOCKET_VARIABLE in environment:
        return {}
    ids = [part.strip() for part in launch.gpu_ids.split(",") if part.strip()]
    ranks = ranks_per_machine(launch)
    if len(set(ids)) < len(ids):
        raise SettingsError(f"gpu_ids = {launch.gpu_ids!r} names a GPU twice", "list every GPU once, such as 0,1,3")
    if len(ids) < ranks:
        raise SettingsError(
            f"gpu_ids = {launch.gpu_ids!r} names {len(ids)} GPUs, but every machine runs {ranks} ranks",
            f"name {ranks} GPUs, or lower num_processes to {len(ids) * launch.num_machines}",
        )
    return {GPUS: ",".join(inherited_device_ids(ids, environment.get(GPUS, "")))}


def inherited_device_ids(ids: list[str], inherited: str) -> list[str]:
    """CUDA device ids for gpu_ids. SLURM and Kubernetes give a job some GPUs, numbered from 0 inside it.

    Raises SettingsError for a GPU that the job was not given.
    """
    given = [part.strip() for part in inherited.split(",") if part.strip()]
    if not given or not all(each.isdigit() for each in ids):
        return ids
    if missing := [each for each in ids if int(each) >= len(given)]:
        raise SettingsError(
            f"gpu_ids names GPU {missing[0]}, but CUDA_VISIBLE_DEVICES = {inherited} leaves {len(given)}",
            f"they are counted from 0 among those: name some of 0 to {len(given) - 1}, or unset CUDA_VISIBLE_DEVICES",
        )
    return [given[int(each)] for each in ids]


def choose_gpus(launch: Launch, environment: MutableMapping[str, str]) -> None:
    """Hide GPUs that are not in gpu_ids. Call it before importing torch: CUDA reads this once."""
    environment.update(visible_gpus(launch, environment))


def round_no_pinned_memory(environment: MutableMapping[str, str], version: str) -> None:
    """Let torch of this version lock as much host memory as a tensor has. Call it before torch is imported.

    By default it rounds each one up to a power of two: FLUX.1 offloaded by FSDP2 would take 69 GiB instead of
    44, and its gradients as much again. Before 2.13 torch knows no other way.
    """
    if tuple(int(each) for each in re.findall(r"\d+", version)[:2]) < PINNED_OPTION_SINCE:
        return
    name = OLDER_ALLOCATOR if environment.get(OLDER_ALLOCATOR) else ALLOCATOR
    own = environment.get(name, "")
    if PINNED_OPTION not in own:
        environment[name] = ",".join(filter(None, (own, f"{PINNED_OPTION}:1")))


def silence_torch(environment: MutableMapping[str, str]) -> None:
    """Let torch print no stack traces of C++ about lost connections, which a sentence of ours tells. Call it before
    torch is imported.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def prepare_rank(loaded: Loaded, environment: MutableMapping[str, str]) -> None:
    """Prepare this process to be a rank, or the only process of a run. Call it before torch is imported."""
    from importlib.metadata import version

    check_world_size(loaded, environment)
    # Both set variables that CUDA and torch's allocator read once.
    choose_gpus(loaded.settings.launch, environment)
    round_no_pinned_memory(environment, version("torch"))
    if is_rank(environment):
        from simpletuner.launch.launcher_connection import exit_if_launcher_died
        from simpletuner.system.processes.signals import terminate_with_parent

        silence_torch(environment)  # also where another launcher started it: the first rank to end serves the store
        # In this order: the kernel reports only deaths after it was asked, so an earlier one is looked for.
        terminate_with_parent()
        exit_if_launcher_died(environment)


@dataclass(frozen=True)
class LaunchPlan:
    """The ranks of one machine; `chosen` holds the variables that we set for all of them."""

    machine: int
    launch: Launch
    arguments: tuple[str, ...]
    address: str
    port: str
    chosen: Mapping[str, str]

    @property
    def ranks(self) -> range:
        """The global ranks of this machine."""
        count = ranks_per_machine(self.launch)
        return range(self.machine * count, (self.machine + 1) * count)

    @property
    def command(self) -> list[str]:
        return module_command("simpletuner", *self.arguments)

    @property
    def common(self) -> dict[str, str]:
        """Variables that are equal for all ranks of this machine, named as torchrun names them."""
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "WORLD_SIZE": str(self.launch.num_processes),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.machine),
            "GROUP_WORLD_SIZE": str(self.launch.num_machines),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to the launcher's store, it does not serve one
            **self.chosen,
        }

    def environments(self) -> Iterator[dict[str, str]]:
        """Yield, for each rank, the variables that are added to this process's environment."""
        for local_rank, rank in enumerate(self.ranks):
            yield {**self.common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}


def plan_of(machine: int, launch: Launch, arguments: Sequence[str], port: int | None = None) -> LaunchPlan:
    """Plan what a machine starts; `port` is the free port that was found for a single machine, once known."""
    several = launch.num_machines > 1
    address = launch.main_process_ip if several else LOOPBACK
    known = str(port or (launch.main_process_port if several else FREE_PORT))
    return LaunchPlan(machine, launch, tuple(arguments), address, known, chosen_variables(machine, launch))


def chosen_variables(machine: int, launch: Launch) -> dict[str, str]:
    """Choose threads, network interface and GPUs; user variables take precedence, except for GPUs."""
    # torchrun would give each rank one thread; a rank's share of the cores is what its CPU work can use.
    threads = str(max(1, (os.cpu_count() or 1) // ranks_per_machine(launch)))
    chosen = {"OMP_NUM_THREADS": threads}
    ip = launch.main_process_ip if launch.num_machines > 1 else LOOPBACK
    here = machine == launch.machine_rank or launch.num_machines == 1
    name = interface_towards(ip, launch.main_process_port) if here else f"(the interface that reaches {ip})"
    chosen |= dict.fromkeys(INTERFACE_VARIABLES, name) if name else {}
    return {name: os.environ.get(name, value) for name, value in chosen.items()} | visible_gpus(launch)


def describe_plans(launch: Launch, arguments: Sequence[str]) -> list[dict[str, object]]:
    """Commands to type on each machine and the processes that they start, for `--dry_run`; `arguments` must
    not set machine_rank."""
    return [describe(machine, launch, list(arguments)) for machine in range(launch.num_machines)]


def describe(machine: int, launch: Launch, arguments: list[str]) -> dict[str, object]:
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
    """Format a description as shell lines: the command to type, and below it what it starts, as comments."""
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
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
