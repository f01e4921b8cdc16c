"""Which rank this is, on which device, and how it meets the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from simpletuner.errors import EnvironmentFault, ExitCode, SimpleTunerError, TrainingError
from simpletuner.ops.signals import StopRequest

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
LAUNCHER_SECONDS = 10
"""How long a rank that lost another waits to be ended by the launcher, which knows what happened."""
STALL_SECONDS = 1800
"""How long a waiting rank sees no progress of the others before it gives up."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them; `store` holds small keys that need no collective."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    machine: int = 0

    @property
    def is_first(self) -> bool:
        """Return whether this rank speaks for all."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank is here; only where all arrive at about the same time."""
        dist.all_reduce(torch.zeros(1))  # on the CPU: over NCCL the call would return before the others are here

    def all_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of a small tensor over the ranks."""
        dist.all_reduce(values)
        return values / self.size

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, in order of rank."""
        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, text)
        return texts

    def claim(self, job: str) -> int:
        """Return the next ticket of a job, 0 first; each ticket goes to one rank."""
        return self.store.add(f"{job}/tickets", 1) - 1

    def meet(self, place: str, stop: Callable[[], None], patience_seconds: float = STALL_SECONDS) -> None:
        """Wait until every rank has come to this place, however long apart."""
        self.done(place, 1)
        self.wait_for(place, self.size, stop, patience_seconds=patience_seconds)

    def wait_for(
        self,
        job: str,
        units: int,
        stop: Callable[[], None],
        show: Callable[[int], object] = lambda count: None,
        patience_seconds: float = STALL_SECONDS,
    ) -> None:
        """Wait until all ranks together have done `units` of a job, counted by `done`. No collective is held open.

        Raises EnvironmentFault when nothing moves for longer than `patience_seconds`.
        """
        last, moved = -1, time.monotonic()
        while (count := self.done(job, 0)) < units:
            stop()
            if count != last:
                last, moved = count, time.monotonic()
                show(count)
            elif time.monotonic() - moved > patience_seconds:
                raise EnvironmentFault(
                    f"waited {patience_seconds:.0f} s for the other ranks at `{job}`: {count} of {units} done",
                    "look for a rank without output or with an error, then run the same command again: it continues",
                )
            time.sleep(0.05)
        show(units)

    def done(self, job: str, units: int) -> int:
        """Add to what all ranks have done of a job, and return the sum."""
        return self.store.add(f"{job}/done", units)


@contextmanager
def joined_world(environment: Mapping[str, str] = os.environ, use_cpu: bool = False) -> Iterator[World]:
    """Join the ranks that the launcher started, or be a world of one; leave it at the end."""
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank = int(environment.get("LOCAL_RANK", 0))
    device = device_of(local_rank, use_cpu)
    store = open_store(environment, rank, size) if size > 1 else dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    try:
        machine = int(environment.get("GROUP_RANK", 0))
        yield World(rank, size, local_rank, device, dist.PrefixStore("simpletuner", store), machine)
    finally:
        dist.destroy_process_group()


def device_of(local_rank: int, use_cpu: bool = False) -> torch.device:
    """Return this rank's GPU, or the CPU where there is none. Raises EnvironmentFault when there are too few GPUs."""
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise EnvironmentFault(
            f"rank {local_rank} of this machine has no GPU: there are {count}", f"lower num_processes to {count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def open_store(environment: Mapping[str, str], rank: int, size: int) -> dist.Store:
    """Return the key-value store at MASTER_ADDR; torchrun's agent serves one, other launchers leave it to us."""
    served_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not served_by_agent,
        timeout=timedelta(minutes=5),
        multi_tenant=True,
    )


@contextmanager
def first_to_fail_speaks(world: World, stop: StopRequest) -> Iterator[None]:
    """Let only the first rank of a machine that fails say why; the others leave with the same exit code."""
    try:
        yield
    except SimpleTunerError as error:
        if is_first_failure(world, error):
            raise
        raise SystemExit(int(error.exit_code)) from None
    except Exception as error:
        if world.size > 1 and lost_a_peer(error):
            if was_told_to_end(world, stop):
                raise SystemExit(int(ExitCode.TRAINING)) from None
            raise TrainingError(f"rank {world.rank} lost contact to another rank: {error}") from None
        if is_first_failure(world, SimpleTunerError(f"{type(error).__name__}: {error}")):
            raise
        raise SystemExit(int(ExitCode.BUG)) from None


def was_told_to_end(world: World, stop: StopRequest) -> bool:
    """Wait for the launcher to end this rank, as it does once another died: then it is the launcher who says why."""
    with suppress(dist.DistError):
        world.store.set("lost", str(world.rank))
    end = time.monotonic() + LAUNCHER_SECONDS
    while not stop.signal_number and time.monotonic() < end:
        time.sleep(0.05)
    return bool(stop.signal_number)


def is_first_failure(world: World, error: SimpleTunerError) -> bool:
    """Return whether no other rank of this machine has failed before; the first leaves its reason to the launchers.

    A store that is gone was the first rank's, which has failed.
    """
    place = f"failures/{world.machine}"
    reason = {"rank": world.rank, "exit_code": int(error.exit_code), "message": error.message, "hint": error.hint}
    try:
        if world.store.add(f"{place}/count", 1) > 1:
            return False
        world.store.set(f"{place}/reason", json.dumps(reason))
    except dist.DistError:
        return False
    return True


def lost_a_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank went away."""
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return isinstance(error, dist.DistError) or gloo
