"""`simpletuner net check` in one rank: join the others as a run does, measure, and leave together.

With the settings of a run, it also computes communication's share of a step on the measured network.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from simpletuner.errors import SimpleTunerError
from simpletuner.launch.launcher_connection import connect_to_launcher
from simpletuner.launch.node_info import NodeInfo, check_local_ranks, node_info
from simpletuner.launch.rendezvous import Group, verify_same_config
from simpletuner.launch.store import MessageStore, TorchStore, message_signer
from simpletuner.parallel.devices import Device, MemoryBudget
from simpletuner.parallel.world import STALL_SECONDS, World, joined_world, report_first_failure
from simpletuner.report import Report
from simpletuner.settings import Loaded
from simpletuner.system.network import interface_towards
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import handle_stop_signals
from simpletuner.tools.net.measure import PAIRS_SHARE, measure_all_reduce, measure_pairs, rounds_of, thinned
from simpletuner.tools.net.results import NetworkMachine, NetworkResult
from simpletuner.tools.plan.measure import StepSeconds, communication_bytes
from simpletuner.tools.plan.planner import Planner


def run_rank(loaded: Loaded, seconds: float, report: Report, show: Callable[[NetworkResult], None]) -> None:
    """Measure the network as one of its ranks, then show the result if this is the first one. Collective."""
    launch, activity = loaded.settings.launch, Activity()
    with (
        handle_stop_signals() as stop,
        connect_to_launcher(os.environ, activity, stop, launch.stall_timeout) as launcher,
    ):
        stop.when_asked = lambda: stop.exit_now(stop.signal_number)  # nothing is lost
        with (
            joined_world(os.environ, launch.use_cpu, stop, activity) as world,
            report_first_failure(world, stop, launcher),
        ):
            result = join_and_measure(loaded, world, seconds, report)
        # Only now, since the plan counts the images in a world of its own.
        if world.is_first:
            activity.begin("planning", watched=False)
            try:
                show(result)
            except SimpleTunerError as error:
                launcher.send_reason(error)
                raise


def join_and_measure(loaded: Loaded, world: World, seconds: float, report: Report) -> NetworkResult:
    """Verify that all ranks mean the same, as a run does, and measure. Collective."""
    messages = MessageStore(TorchStore(world.store), message_signer(loaded.settings.launch.run_secret_file))
    group = Group("rank", world.rank, world.size)
    infos = verify_same_config(messages, group, node_info(loaded), lambda: None, STALL_SECONDS)
    check_local_ranks(infos, world.rank, os.environ)
    world.activity.begin("measuring the network", watched=False)
    with report.phase(f"measuring the network for {seconds:g} s"):
        return measure(world, infos, seconds)


def measure(world: World, infos: Sequence[NodeInfo], seconds: float) -> NetworkResult:
    """Measure pairs, then all ranks together, in so many seconds. Collective."""
    began = time.monotonic()
    machines = machines_of(infos, world.gather_texts(interface(world.device, os.environ)))
    # First: NCCL's communicator of all ranks is made by a collective of all ranks, and pairs use it, too.
    world.all_mean(torch.zeros(1, device=world.device))
    rounds = rounds_of([machine.ranks for machine in machines])
    pairs_seconds = PAIRS_SHARE * seconds
    pairs = measure_pairs(world, thinned(rounds, pairs_seconds), pairs_seconds)
    all_reduce = measure_all_reduce(world, seconds - pairs_seconds)
    machine_of = {rank: machine.number for machine in machines for rank in machine.ranks}
    between = [pair for pair in pairs if machine_of[pair.first] != machine_of[pair.second]]
    within = [pair for pair in pairs if machine_of[pair.first] == machine_of[pair.second]]
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    taken = time.monotonic() - began
    return NetworkResult(backend, taken, machines, between, within, all_reduce, sum(map(len, rounds)))


def machines_of(infos: Sequence[NodeInfo], interfaces: Sequence[str]) -> list[NetworkMachine]:
    """Machines in the order of their first ranks, given what each rank registered, and its interface."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, info in enumerate(infos):  # not by GROUP_RANK, which mpirun does not give
        ranks.setdefault((info.host, info.boot), []).append(rank)
    return [
        NetworkMachine(number, host, tuple(mine), interfaces[mine[0]])
        for number, ((host, _), mine) in enumerate(ranks.items())
    ]


def interface(device: torch.device, environment: Mapping[str, str]) -> str:
    """Network interface of this rank, as far as its environment and routes tell: the library does not."""
    library = "NCCL" if device.type == "cuda" else "GLOO"
    name = f"{library}_SOCKET_IFNAME"
    if value := environment.get(name):
        return value
    towards = interface_towards(environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", "0")))
    return f"chosen by {library.lower()}" + (f"; {name}={towards} leads to rank 0" if towards else "")


@dataclass(frozen=True)
class PlannedCommunication:
    """Prediction of what a rank sends in a step, and of its time at the measured bus bandwidth."""

    bytes_per_step: float
    seconds: float
    step: StepSeconds | None
    """Prediction of the step with that communication; None where the device is not known."""

    @property
    def share(self) -> float | None:
        # Most of it overlaps with computation.
        return self.step and self.seconds / self.step.total

    @property
    def waited_seconds(self) -> float | None:
        """Part of a step in which nothing computes."""
        return self.step and self.step.total - replace(self.step, communication=0.0).total

    def as_json(self) -> dict[str, object]:
        return {
            "bytes_per_step": self.bytes_per_step,
            "communication_seconds": self.seconds,
            "step_seconds": self.step and self.step.total,
            "share": self.share,
            "waited_seconds": self.waited_seconds,
        }


def plan_communication(
    loaded: Loaded, flags: Mapping[str, object], config: Path | None, device: Device | None, rate: float, report: Report
) -> PlannedCommunication:
    """Predict a step at a bus bandwidth. Raises SimpleTunerError for a model that cannot be planned."""
    budget = MemoryBudget(device and device.memory_bytes, None)
    plan = Planner(loaded, flags, config, device, budget, report).run(auto=False, measure=False).plan
    num_bytes = communication_bytes(plan.settings, plan.memory.inputs.num_parameters)
    step = plan.parts and replace(plan.parts, communication=num_bytes / rate)
    return PlannedCommunication(num_bytes, num_bytes / rate, step)
