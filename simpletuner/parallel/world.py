"""Ranks of a run: joining, small collectives, work queues in the store, and failing together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from simpletuner.errors import EnvironmentNotReady, ExitCode, SimpleTunerError, Stopped, TrainingError
from simpletuner.launch.launcher_connection import LauncherConnection
from simpletuner.parallel.gpu import agree_on_devices, view_of_rank
from simpletuner.parallel.lost_ranks import find_ended, find_lost, join_problem, record_process
from simpletuner.private_api import of_torch
from simpletuner.system.files.lease import Lease
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import StopRequest

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Timeout of NCCL's collectives, and of joining."""
# Timeout of gloo's collectives: ranks may wait for one that writes to a slow disk (24 GB at 40 MB/s take 10
# minutes). A rank that ends breaks them at once; the launcher finds one that hangs.
DISK_TIMEOUT = timedelta(days=1)
JOIN_SECONDS = 300
"""Longest wait of a rank for the others to join."""
# Longest time in which a failed rank aborts its communicators. Peers that wait in a kernel of NCCL over
# NVLink or shared memory do not notice: the launcher, or torchrun's agent, ends them.
ABORT_SECONDS = 5
LAUNCHER_SECONDS = 10
"""Longest wait of a rank that lost another one for the launcher, which knows the reason, to end it."""
LOOK_SECONDS = 5.0
"""Between two looks of a waiting rank at whether others have ended."""
MOST_ASKED = 64
# Longest time without progress of the others that a waiting rank tolerates.
STALL_SECONDS = 1800


@dataclass(frozen=True)
class World:
    """The ranks of a run, seen from one of them; `store` holds counters and small values, no collective."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    machine: int = 0
    activity: Activity = field(default_factory=Activity)
    local_size: int = 1
    """Number of ranks on this machine."""
    group: dist.ProcessGroup | None = None
    """Process group of `barrier` and `gather_texts`; None for the default group."""
    lease: Lease = field(default_factory=Lease)
    """Lease of output_dir, held by rank 0."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def for_thread(self) -> World:
        """Return the same ranks for another thread, with a separate gloo group and activity. Collective."""
        group = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
        return replace(self, group=group, activity=Activity())

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self.activity.advance()
        dist.all_reduce(
            torch.zeros(1), group=self.group
        )  # on the CPU: over NCCL the call would return before the others are here

    def all_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of a small tensor over the ranks; `values` is overwritten. Collective."""
        return self.begin_mean(values)()

    def begin_mean(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the mean of a small tensor over the ranks, and return a function that waits for the result.
        Collective.

        `values` is overwritten. Of a GPU's tensor the mean is queued, and nothing waits.
        """
        work = dist.all_reduce(values, async_op=True) if self.size > 1 else None

        def mean() -> torch.Tensor:
            self.activity.advance()
            if work is not None:
                work.wait()
            return values / self.size

        return mean

    def begin_gather(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to gather a small tensor of equal shape from all ranks, and return a function that waits for
        (ranks, *shape). Collective.

        Of a GPU's tensor the gathering is queued, and nothing waits.
        """
        if self.size == 1:
            return lambda: values.unsqueeze(0)
        gathered = values.new_empty(self.size * values.numel())  # flat: gloo takes no other shape
        work = dist.all_gather_into_tensor(gathered, values.flatten(), async_op=True)

        def wait() -> torch.Tensor:
            self.activity.advance()
            if work is not None:
                work.wait()
            return gathered.view(self.size, *values.shape)

        return wait

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, in order of rank. Collective."""
        self.activity.advance()
        if self.size == 1:  # gloo would copy a long text in OpenMP threads that slow down training on a CPU
            return [text]
        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def share_bytes(self, content: bytes) -> bytes:
        """Return the bytes that rank 0 gives; those of other ranks are ignored. Collective."""
        self.activity.advance()
        if self.size == 1:
            return content
        size = torch.tensor([len(content)])
        dist.broadcast(size, 0, group=self.group)
        shared = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.is_first and content else None
        if shared is None:
            shared = torch.empty(int(size.item()), dtype=torch.uint8)
        if len(shared):
            dist.broadcast(shared, 0, group=self.group)
        return shared.numpy().tobytes()

    def from_first(self, place: str, make: Callable[[], str], stop: Callable[[], None]) -> str:
        """Text that rank 0 makes, however long that takes. Collective; no torch collective is held open."""
        if self.is_first:
            self.store.set(f"{place}/made", make())
            self.add_progress(place, 1)
        self.wait_for_count(place, 1, stop)
        return self.store.get(f"{place}/made").decode()

    def next_chunk(self, job: str) -> int:
        """Take the next number of a job's chunks, from 0; each number goes to one rank only."""
        return self.store.add(f"{job}/tickets", 1) - 1

    def store_barrier(self, place: str, stop: Callable[[], None], patience_seconds: float = STALL_SECONDS) -> None:
        """Wait until every rank has called this with the same `place`, however far apart in time.

        Unlike a collective it has no timeout of torch's while ranks read or encode for minutes.
        """
        self.add_progress(place, 1)
        self.wait_for_count(place, self.size, stop, patience_seconds=patience_seconds)

    def wait_for_count(
        self,
        job: str,
        units: int,
        stop: Callable[[], None],
        show: Callable[[int], object] = lambda count: None,
        patience_seconds: float = STALL_SECONDS,
    ) -> None:
        """Wait until all ranks together have done `units` of a job. Polls the store: no collective is held
        open.

        Raises EnvironmentNotReady when nothing moves for longer than `patience_seconds`, and
        DistNetworkError, as a collective does, when the process of another rank has ended: srun ends nobody
        because of that.
        """
        self.activity.advance()
        last, moved, looked = -1, time.monotonic(), time.monotonic()
        while (count := self.add_progress(job, 0)) < units:
            stop()
            if count != last:
                last, moved = count, time.monotonic()
                show(count)
            elif time.monotonic() - moved > patience_seconds:
                raise EnvironmentNotReady(
                    f"waited {patience_seconds:.0f} s for the other ranks at `{job}`: {count} of {units} done",
                    "look for a rank without output or with an error, then run the same command again: it continues",
                )
            elif time.monotonic() - looked > LOOK_SECONDS:
                if ended := find_ended(self.store, self.neighbours):
                    raise dist.DistNetworkError(f"rank {ended[0]} has ended")
                looked = time.monotonic()
            time.sleep(0.05)
        show(units)

    @property
    def neighbours(self) -> range:
        """Ranks that may be on this machine: of a small world all, since what starts ranks need not say."""
        if self.size <= MOST_ASKED:
            return range(self.size)
        return range(self.rank - self.local_rank, min(self.size, self.rank - self.local_rank + self.local_size))

    def add_progress(self, job: str, units: int) -> int:
        """Add to the units that all ranks together have done of a job, and return the sum."""
        return self.store.add(f"{job}/done", units)


@contextmanager
def joined_world(
    environment: Mapping[str, str] = os.environ,
    use_cpu: bool = False,
    stop: StopRequest | None = None,
    activity: Activity | None = None,
) -> Iterator[World]:
    """Join the ranks that the launcher started, or be a world of one; leave at the end. Collective.

    Raises EnvironmentNotReady when the others cannot be joined, or where ranks would share a GPU; a signal
    meanwhile ends the process.
    """
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank = int(environment.get("LOCAL_RANK", 0))
    view = view_of_rank(local_rank, use_cpu)
    # Both: texts and counts travel by gloo, so that waiting for them is not waiting for the GPU.
    backend = "cpu:gloo,cuda:nccl" if view.cards else "gloo"

    def join() -> tuple[dist.Store, torch.device]:
        store = open_store(environment, rank, size) if size > 1 else dist.HashStore()
        device = agree_on_devices(store, rank, size, view)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch_store = dist.PrefixStore("torch", store)
        dist.init_process_group(backend, store=torch_store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
        of_torch.set_cpu_timeout(DISK_TIMEOUT)
        return store, device

    store, device = join() if size == 1 else joined(join, rank, stop or StopRequest())
    try:
        machine = int(environment.get("GROUP_RANK", 0))
        shared = dist.PrefixStore("simpletuner", store)
        record_process(shared, rank)
        local_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
        yield World(rank, size, local_rank, device, shared, machine, activity or Activity(), local_size)
    except Stopped:  # raised on all ranks, after the last collective
        dist.destroy_process_group()
        raise
    except BaseException:
        abort(device)
        raise
    dist.destroy_process_group()


def joined(
    join: Callable[[], tuple[dist.Store, torch.device]], rank: int, stop: StopRequest
) -> tuple[dist.Store, torch.device]:
    """Result of `join`, called in a thread: torch blocks where no signal reaches Python."""
    results: list[tuple[dist.Store, torch.device] | Exception] = []

    def attempt() -> None:
        try:
            results.append(join())
        # gloo, NCCL and the store raise these; what another writes into the store need not be what ranks do
        except (SimpleTunerError, RuntimeError, ValueError, OSError, KeyError, TypeError, IndexError) as error:
            results.append(error)

    thread = threading.Thread(target=attempt, name="joining", daemon=True)
    thread.start()
    while thread.is_alive():
        if stop.signal_number:
            stop.exit_now(stop.signal_number)  # nothing is lost, and the thread cannot be ended
        thread.join(0.05)
    if results and isinstance(results[0], tuple):
        # Of the calling thread, too: CUDA's current device is each thread's own.
        if results[0][1].type == "cuda":
            torch.cuda.set_device(results[0][1])
        return results[0]
    if results and isinstance(results[0], SimpleTunerError):  # all ranks have the same
        raise results[0] if rank == 0 else SystemExit(int(results[0].exit_code))
    reason, hint = join_problem(str(results[0]) if results else "", rank, os.environ, JOIN_SECONDS)
    raise EnvironmentNotReady(f"rank {rank} cannot join the other ranks: {reason}", hint)


def abort(device: torch.device) -> None:
    """Abort all communicators without waiting for other ranks, which may hang in a collective."""
    if device.type != "cuda":
        return  # gloo ends with the process, and the others notice that
    # NCCL's destroy waits for pending work, its abort does not; should that hang too, the process ends
    thread = threading.Thread(target=of_torch.abort_communicators, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


def open_store(environment: Mapping[str, str], rank: int, size: int) -> dist.Store:
    """Key-value store at MASTER_ADDR; torchrun's agent serves one, other launchers leave it to us."""
    served_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not served_by_agent,
        timeout=timedelta(seconds=JOIN_SECONDS),
        multi_tenant=True,
    )
    # The agent's store outlives ranks that it starts again (`--max-restarts`): they must not find old
    # registrations. A store of ours is new each time, and agents count restarts by themselves: a machine that
    # joins later begins at 0.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(f"attempt_{attempt}", store) if attempt and served_by_agent else store


@contextmanager
def report_first_failure(world: World, stop: StopRequest, launcher: LauncherConnection) -> Iterator[None]:
    """Print the error of a machine's first failing rank; the others exit silently with its code."""
    try:
        yield
    except SimpleTunerError as error:
        if is_first_failure(world, launcher, error):
            raise
        raise SystemExit(int(error.exit_code)) from None
    except Exception as error:
        # A collective fails on all survivors when one rank dies. Only the launcher knows which, so they wait
        # for it rather than print a dozen stack traces of gloo or NCCL.
        if world.size > 1 and lost_a_peer(error):
            # Our launcher, or torchrun's agent, ends this rank once another one died: then it prints why.
            launcher.send(lost_contact=True)
            tells = launcher.connection is not None or "TORCHELASTIC_RUN_ID" in os.environ
            is_told = (lambda: stop.signal_number > 0) if tells else None
            if not (lost := find_lost(world.store, world.rank, world.size, LAUNCHER_SECONDS, is_told)):
                raise SystemExit(int(ExitCode.TRAINING)) from None
            if stop.signal_number and not tells:  # asked to stop like the others, which were quicker
                raise stop.stopped("like other ranks, which ended first; what was saved is kept") from None
            raise TrainingError(
                f"rank {world.rank} lost contact to {lost}",
                "what started it (srun, mpirun, torchrun) says how its process ended; the same command goes on",
            ) from None
        if is_first_failure(world, launcher, SimpleTunerError(f"{type(error).__name__}: {error}")):
            raise
        raise SystemExit(int(ExitCode.BUG)) from None


def is_first_failure(world: World, launcher: LauncherConnection, error: SimpleTunerError) -> bool:
    """True for the first failing rank of this machine, which sends the launcher the reason.

    Once the launcher is gone, each rank prints its own error, and the first one that it has stopped. A store
    that cannot be reached was served by the first rank, which has failed, or by the launcher.
    """
    try:
        # Not asked of a launcher that is gone: torch would wait seconds for its store.
        if not launcher.is_gone and world.store.add(f"failures/{world.machine}/count", 1) > 1:
            return False
    except dist.DistError:
        if not launcher.is_gone:
            return False
    if launcher.is_gone:
        return world.is_first or not isinstance(error, Stopped)
    launcher.send_reason(error)
    return True


def lost_a_peer(error: BaseException) -> bool:
    """True if a collective failed because another rank is gone."""
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return isinstance(error, dist.DistError) or gloo
