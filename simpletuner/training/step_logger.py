"""Log each optimizer step: mean loss of the ranks, gradient norm, speed; and count the votes to stop.

A step's scalars are read one step late, when all ranks have long computed them: nothing waits for them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simpletuner.checkpoints.layout import MOST_LISTED, REQUEST_NAME, REQUESTS, TAKEN_REQUEST
from simpletuner.data.prefetch import StepBatch
from simpletuner.errors import TrainingError
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.status_line import Progress
from simpletuner.system.processes.run_status import StatusWriter
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.metrics.metrics import Metrics
from simpletuner.training.metrics.speed import Durations, Pace, Throughput, format_throughput

if TYPE_CHECKING:
    from simpletuner.training.alarms import RunAlarms
    from simpletuner.training.metrics.sample_losses import SampleLossLog

TRAINING = "training"
"""Title of the steps in the status line."""


# Vote of the first rank where an image is asked for: far below the 1 of any rank that has to stop.
ASKED = 2.0**-10


class RequestWatcher:
    """Looks for requests for images in a run's folder: twice a second, since a network file system is asked,
    and before each step while there are some."""

    EVERY_SECONDS = 0.5

    def __init__(self, output: Path) -> None:
        self.folder, self.looked, self.found = output / REQUESTS, -math.inf, False

    def is_asked(self) -> bool:
        """True if a request waits; at first also if an earlier start has taken one and not answered."""
        is_first, now = self.looked < 0, time.monotonic()
        if not self.found and now - self.looked < self.EVERY_SECONDS:
            return False
        self.looked = now
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in islice(entries, MOST_LISTED)]
        except OSError:
            names = []
        self.found = any(REQUEST_NAME.fullmatch(name) or (is_first and name.endswith(TAKEN_REQUEST)) for name in names)
        return self.found


class StopVote:
    """Let all ranks stop, or sample what is asked for, at the same step.

    Each rank's vote travels with the loss, in the same all-reduce.
    """

    def __init__(
        self,
        request: StopRequest,
        has_failed: Callable[[], bool] = lambda: False,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_failed`: a failure in this rank's background, which the others may not know; `is_asked`, on
        the first rank: a request for an image."""
        self.request, self.has_failed, self.is_asked = request, has_failed, is_asked
        self.passed = self.asked = False

    def local_vote(self, device: torch.device) -> Tensor:
        """Return 1 where this rank has to stop, ASKED where an image is asked for, else 0; shape ()."""
        stops = bool(self.request.signal_number) or self.has_failed()
        # not torch.tensor, which copies from pageable memory, so that each step would wait for the one before
        return torch.full((), 1.0 if stops else ASKED * self.is_asked(), device=device)

    def count(self, mean: float, ranks: int) -> None:
        self.passed = self.passed or mean * ranks > 0.5
        self.asked = self.asked or 0 < mean * ranks <= 0.5

    def poll(self, world: World) -> bool:
        """Vote now, where no step is under way, and return whether to stop. Collective."""
        self.count(world.all_mean(self.local_vote(torch.device("cpu"))).item(), world.size)
        return self.passed


@dataclass(frozen=True)
class StepOutput:
    """The result of an optimizer step: this rank's mean loss and the norm before clipping, scalars still on
    the device."""

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    sample_losses: Sequence[tuple[Tensor, Tensor]] = ()
    """Timesteps and losses of the samples of each micro batch, (B) each."""


class Timestamp:
    """A point in the device's stream: a CUDA event, or the current time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.time, self.event = time.perf_counter(), None
        if device.type == "cuda":
            # `blocking` sleeps until the event is there. Other waits take a core, with which a rank that hangs in the
            # GPU looks busy to launch/stall_detection.py. Any, since torch's stubs disagree about its type.
            self.event: Any = torch.cuda.Event(enable_timing=True, blocking=True)
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Timestamp) -> float:
        """Return the time between two timestamps that have passed."""
        return self.time - earlier.time if self.event is None else earlier.event.elapsed_time(self.event) / 1000


class DelayedScalars:
    """Loss and votes to stop, averaged over the ranks, and the gradient norm, on their way to the host.

    On a CPU the mean is taken while the next step begins. On a GPU mean and copy are queued behind the step,
    with an event of their own: to read a tensor of the device is to wait for all that is queued by then, the
    next step too.
    """

    def __init__(
        self,
        mean: Callable[[], Tensor],
        grad_norm: Tensor,
        device: torch.device,
        gathered: Callable[[], Tensor] | None = None,
    ) -> None:
        """`gathered` are more numbers of all ranks, to be read behind these."""
        self.means = [mean] if gathered is None else [mean, gathered]
        self.grad_norm = grad_norm.reshape(1).clone()  # which an engine may write to in its next step
        self.copy: Tensor | None = None
        if device.type == "cuda":
            norm = self.grad_norm
            if not norm.is_cuda:  # where parameters are offloaded; a copy from pageable memory would wait for the step
                norm = norm.pin_memory().to(device, non_blocking=True)
            scalars = torch.cat([mean(), norm, *(gathered() for gathered in self.means[1:])])
            # `.item()` on the device's tensor would wait for all that is queued when it is called, the next
            # step included. Pinned memory makes this copy asynchronous, and `computed` is recorded right
            # after it.
            self.copy = torch.empty(len(scalars), pin_memory=True).copy_(scalars, non_blocking=True)
        self.computed = Timestamp(device)

    def read(self) -> list[float]:
        """Loss, share of votes to stop, norm and `gathered`. Collective on a CPU, which waits for it here."""
        self.computed.wait()
        if self.copy is not None:
            return self.copy.tolist()
        mean, *gathered = (wait() for wait in self.means)
        return torch.cat([mean, self.grad_norm, *gathered]).tolist()


@dataclass(frozen=True)
class PendingStep:
    """A step whose scalars have not been read yet."""

    row: dict[str, Any]
    began: Timestamp
    scalars: DelayedScalars
    sample_ids: list[str]
    flops: float | None
    samples: Sequence[int]
    """Numbers of the samples of the global batch."""
    shape: torch.Size
    """Of the latents of a micro batch: steps of equal shapes have as much to compute."""


class StepLogger:
    """Write metrics and progress; `metrics` and `throughput` are None on ranks that do not write."""

    def __init__(
        self,
        mesh: Mesh,
        stop_vote: StopVote,
        metrics: Metrics | None,
        throughput: Throughput | None,
        batch_size: int,
        status: StatusWriter | None = None,
        sample_losses: SampleLossLog | None = None,
        alarms: Callable[[], RunAlarms] | None = None,
    ) -> None:
        """`alarms` opens what looks at each row, once there is one: a start need not wait for it."""
        self.sample_losses, self.alarms = sample_losses, alarms
        self.status = status or StatusWriter()
        self.mesh, self.stop_vote, self.metrics, self.batch_size = mesh, stop_vote, metrics, batch_size
        self.throughput = throughput
        self.pending: PendingStep | None = None
        self.shown: Progress | None = None
        self.pace = Pace(0, {}, Durations())
        self.clock = Timestamp(mesh.world.device)

    @contextmanager
    def progress(self, report: Report, pace: Pace, step: int) -> Iterator[None]:
        """Show progress within, from a step on; `pace` says how much time is left."""
        self.pace = pace
        self.status.train(step, pace.max_steps)
        with report.progress(TRAINING, pace.max_steps, step, pace.seconds_left) as self.shown:
            self.restart_clock()
            yield

    def restart_clock(self) -> None:
        # A save, for one, is no training time.
        self.clock = Timestamp(self.mesh.world.device)

    def log(self, step: int, output: StepOutput, batch: StepBatch, data_seconds: float) -> None:
        """Reduce a step's scalars over the ranks, and write the previous step's. Collective."""
        device = output.loss.device
        # One all-reduce of two numbers: a separate vote would add another latency to each step.
        mean = self.mesh.begin_data_mean(torch.stack([output.loss, self.stop_vote.local_vote(device)]))
        gathered = self.sample_losses.begin(output.sample_losses) if self.sample_losses is not None else None
        scalars = DelayedScalars(mean, output.grad_norm, device, gathered)
        flops = self.throughput.count(batch) if self.throughput is not None else None  # the device works meanwhile
        # After this step is queued: reading the numbers of the step before finds them computed.
        self.flush()
        row = {"step": step, "epoch": batch.next_state.epoch, "learning_rate": output.learning_rate}
        sample_ids = [sample for each in batch.micro_batches for sample in each.ids]
        row["data_seconds"] = data_seconds
        shape = batch.micro_batches[0].latents.shape
        self.pending = PendingStep(row, self.clock, scalars, sample_ids, flops, batch.samples, shape)
        # From event to event: the host runs ahead of a GPU, so its own clock would measure the time to queue
        # a step.
        self.clock = scalars.computed

    def sync(self) -> None:
        """Flush the rows of all steps to the disk, before the checkpoint that follows them."""
        for log in (self.metrics, self.sample_losses):
            if log is not None:
                log.sync()

    def flush(self) -> None:
        """Read and write the pending step. Raises TrainingError on all ranks when its loss is not finite,
        and LeaseLost on rank 0 where another run has taken over."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        loss, stop_share, grad_norm, *sample_losses = pending.scalars.read()
        step, seconds = pending.row["step"], pending.scalars.computed.seconds_since(pending.began)
        self.stop_vote.count(stop_share, self.mesh.world.size)
        # Both are of all ranks together, so all of them raise, or none.
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise TrainingError(
                f"step {step}: loss is {loss}, gradient norm {grad_norm}; "
                f"samples of rank {self.mesh.world.rank}: {', '.join(pending.sample_ids)}",
                "lower learning_rate or look at these samples; the same command resumes from the last checkpoint",
            )
        speed = {"samples_per_second": self.batch_size / seconds, "seconds": seconds}
        measured = self.throughput.measure(pending.flops, seconds) if self.throughput is not None else {}
        self.pace.add_step(seconds, pending.row["data_seconds"])
        if self.shown is not None:
            self.shown.update(step, *self.notes(loss, measured))
            self.status.count(step, loss, self.shown.ends)
        self.mesh.world.lease.check_recent()
        if self.metrics is not None:
            row = {**pending.row, "loss": loss, "grad_norm": grad_norm, **speed, **measured}
            self.metrics.write(row)
            if self.alarms is not None:
                self.alarms().add(row, pending.shape)
        if self.sample_losses is not None:
            self.sample_losses.write(step, pending.samples, sample_losses)

    def notes(self, loss: float, measured: dict[str, float]) -> list[str]:
        """Parts of the status line: loss, speed, share of time spent waiting for data, throughput."""
        seconds, waited = self.pace.step_seconds, self.pace.data_share
        speed = [f"{seconds:.3g} s/step", f"{self.batch_size / seconds:.3g} samples/s"]
        return [f"loss {loss:.4f}", *speed, f"data wait {waited:.0%}", *format_throughput(measured)]
