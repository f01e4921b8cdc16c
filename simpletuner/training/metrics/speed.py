"""Speed of a run: time left with saves and validation, TFLOP/s, model FLOPs utilization (MFU), memory.

MFU is the FLOPs of a step over what the device could have computed in its time (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B). docs/performance.md says what is counted.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from simpletuner.counting.flops import FlopCounter
from simpletuner.data.prefetch import StepBatch
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.devices import device_by_driver_name
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.numbers import format_gib

RECENT_STEPS = 50
# Waits of training: for a checkpoint or its copy; at the end for a copy; then for the export.
SAVING, WRITING, EXPORTING = "saving", "writing a checkpoint", "writing the pipeline"
UPLOADING = "uploading a checkpoint"
DURATIONS = "durations.json"
MAX_SECONDS = 7 * 24 * 3600.0
"""The longest that anything between steps is believed to take."""


class Durations:
    """Mean durations of saves and evaluations, until they are measured those of earlier starts."""

    def __init__(self, path: Path | None = None) -> None:
        """`path` is a file that keeps them; ranks without one start with nothing."""
        self.path, self.earlier = path, read_durations(path) if path is not None else {}
        self.measured: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.measured[name].append(time.monotonic() - began)

    def estimate(self, name: str, seconds: float) -> None:
        """Take this for something that has never run."""
        self.earlier.setdefault(name, seconds)

    def mean(self, name: str) -> float:
        """Return the seconds that something takes; 0 where that is not known."""
        measured = self.measured.get(name)
        return sum(measured) / len(measured) if measured else self.earlier.get(name, 0.0)

    def write(self) -> None:
        """Keep what is known for later starts."""
        if self.path is not None:
            with suppress(OSError):  # an estimate is no reason to end a run
                write_json(self.path, {name: self.mean(name) for name in sorted({*self.earlier, *self.measured})})


def read_durations(path: Path) -> dict[str, float]:
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    known = content if isinstance(content, dict) else {}
    # JSON as Python reads it has Infinity and NaN, and one damaged digit makes a century.
    return {name: value for name, value in known.items() if isinstance(value, float) and 0 <= value <= MAX_SECONDS}


class Pace:
    """Measures steps; `intervals` are the steps between interruptions, 0: after the last."""

    def __init__(self, max_steps: int, intervals: Mapping[str, int], durations: Durations) -> None:
        self.max_steps, self.intervals, self.durations = max_steps, intervals, durations
        self.steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """Seconds of a step, and the part of them that was spent waiting for its batch."""
        self.measured = 0
        self.pending: list[str] = []
        """Titles of work that is due at the present step and has not run yet."""

    def add_step(self, seconds: float, data_seconds: float) -> None:
        self.measured += 1
        if self.measured == 2:
            self.steps.clear()  # the first step compiles kernels and fills caches
        self.steps.append((seconds, data_seconds))

    @property
    def step_seconds(self) -> float:
        """The mean of the last steps; at least one must have been added."""
        return sum(seconds for seconds, _ in self.steps) / len(self.steps)

    @property
    def data_share(self) -> float:
        """The part of the last steps that was spent waiting for batches, from 0 to 1."""
        waited, all_seconds = sum(data for _, data in self.steps), sum(seconds for seconds, _ in self.steps)
        return min(1.0, waited / all_seconds) if all_seconds else 0.0

    def expect(self, names: Sequence[str]) -> None:
        """Count what is due at the present step as still to come."""
        self.pending = list(names)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure what runs between two steps."""
        with self.durations.timed(name):
            yield
        self.pending = [each for each in self.pending if each != name]

    def seconds_left(self, step: int) -> float | None:
        """Estimate the seconds from `step` to the end, the export included; None before the first step."""
        if not self.steps:
            return None
        runs = {
            name: self._runs_after(step, every) + self.pending.count(name) for name, every in self.intervals.items()
        }
        between = sum(count * self.durations.mean(name) for name, count in runs.items())
        after = self.durations.mean(WRITING) + self.durations.mean(EXPORTING)
        return (self.max_steps - step) * self.step_seconds + between + after

    def _runs_after(self, step: int, every: int) -> int:
        """Count the future runs of work that is due at each multiple of `every` and after the last step."""
        if step >= self.max_steps:
            return 0
        return self.max_steps // every - step // every + bool(self.max_steps % every) if every else 1


@dataclass
class Throughput:
    """Measurements of rank 0 on its own device; the others have as much to do."""

    counter: FlopCounter
    peak_tflops: float | None
    context_parallel_size: int
    device: torch.device
    report: Report
    is_counted: bool = True
    """False for a family that cannot be counted, and on a CPU whose peak nobody has given: counting takes
    longer than the steps of a small model."""

    def count(self, batch: StepBatch) -> float | None:
        """Return this device's share of the FLOPs of a step; None where they cannot be counted.

        A look-up, but for the first batch of a shape, which takes some tenths of a second.
        """
        if not self.is_counted:
            return None
        try:
            flops = sum(
                self.counter.count(each.latents, each.conditioning | each.clean_streams) for each in batch.micro_batches
            )
        except RuntimeError as error:  # what torch raises where a denoiser reads numbers, which the meta device has not
            self.is_counted = False
            self.report.warn(f"no TFLOP/s are shown, since the model cannot run on the meta device: {error}")
            return None
        return flops / self.context_parallel_size

    def measure(self, flops: float | None, seconds: float) -> dict[str, float]:
        """Return the metrics of a step: TFLOP/s, MFU and, on a GPU, peak bytes of memory."""
        measured: dict[str, float] = {}
        if flops is not None:
            measured["tflops_per_second"] = flops / seconds / 1e12
            if self.peak_tflops is not None:
                measured["mfu"] = measured["tflops_per_second"] / self.peak_tflops
        if self.device.type == "cuda":  # the allocator's own counts: nothing waits for the GPU
            measured["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
            measured["reserved_memory_bytes"] = torch.cuda.memory_reserved(self.device)
        return measured


def format_throughput(measured: dict[str, float]) -> list[str]:
    """Format memory and MFU for the status line, or TFLOP/s where no peak is known."""
    memory = [format_gib(measured["peak_memory_bytes"])] if "peak_memory_bytes" in measured else []
    if "mfu" in measured:
        return [*memory, f"MFU {measured['mfu']:.1%}"]
    return [*memory, *(f"{measured[name]:.3g} TFLOP/s" for name in ("tflops_per_second",) if name in measured)]


def open_throughput(session: Session, family: ModelFamily) -> Throughput | None:
    """Build what measures throughput; None on ranks that write no metrics."""
    if not session.world.is_first:
        return None
    device, known = session.world.device, None
    if device.type == "cuda":
        found = device_by_driver_name(torch.cuda.get_device_name(device))
        known = found and found.peak_tflops
        torch.cuda.reset_peak_memory_stats(device)  # encoders are gone, with their peak
    peak = session.settings.logging.device_peak_tflops or known
    if session.settings.training.float8:
        peak = None  # of a dense bf16 device, which float8 would seem to exceed
    is_counted = device.type == "cuda" or peak is not None
    return Throughput(FlopCounter(family), peak, session.mesh.cp, device, session.report, is_counted)
