"""Trace some optimizer steps with torch's profiler, and show where their time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from simpletuner.report import Report
from simpletuner.settings.values.parsed import parse_step_range
from simpletuner.system.files.mounts import rename_over

FOLDER = "profile"
SHOWN = 10
"""Operators in the table."""


class StepProfiler:
    """Trace the steps from the first to the last of `steps`, both included, of this rank."""

    def __init__(self, steps: str, folder: Path, device: torch.device, report: Report) -> None:
        self.steps, self.folder, self.device, self.report = steps, folder, device, report
        self.bounds, self.first = parse_step_range(steps), 0
        self.profile: Any = None
        self.traced, self.data_seconds, self.began = 0, 0.0, 0.0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Write the trace when the run ends early, and say so when it ends before the first step."""
        try:
            yield
        finally:
            if self.profile is not None:
                self.finish()
        if not self.traced:
            self.report.warn(
                f"nothing is traced: this run took none of profile_steps = {self.steps}",
                "name steps after the checkpoint that it resumes from, and before its end",
            )

    def begin(self, step: int) -> None:
        """Start with the first of the steps that this run takes."""
        if self.profile is None and self.bounds[0] <= step <= self.bounds[1]:
            self.first = step
            self.synchronize()  # what is still queued belongs to the steps before
            on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.profile = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *on_gpu],
                schedule=lambda _: ProfilerAction.RECORD,  # without a schedule torch marks no steps
                # Otherwise only the events of the last step are in the table.
                acc_events=True,
            )
            self.profile.start()
            self.began = time.perf_counter()

    def end(self, step: int, data_seconds: float) -> bool:
        """Mark the end of a step in the trace; `data_seconds` is how long it waited for its batch.

        Returns whether the trace was written, which is no training time.
        """
        if self.profile is None:
            return False
        self.traced += 1
        self.data_seconds += data_seconds
        if step == self.bounds[1]:
            self.finish()
            return True
        self.profile.step()
        return False

    def finish(self) -> None:
        """Write the trace and print the table."""
        profile, self.profile = self.profile, None
        self.synchronize()
        seconds = time.perf_counter() - self.began
        profile.stop()
        if not self.traced:
            return
        path = self.folder / f"steps-{self.first}-{self.first + self.traced - 1}.json"
        self.folder.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=self.folder) as hidden:  # torch follows links
            profile.export_chrome_trace(f"{hidden}/{path.name}")
            rename_over(Path(hidden, path.name), path)
        title = f"{self.traced} traced steps, {seconds / self.traced:.3f} s each: {path} (chrome://tracing, Perfetto)"
        self.report.table(title, self.rows(profile, seconds), ("where time went", "calls", "s per step", "share"))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows(self, profile: Any, seconds: float) -> list[tuple[str, ...]]:
        """Return the wait for data, and the operators that took longest: on the GPU where there is one."""
        on_gpu = self.device.type == "cuda"
        times = [
            (each.key, each.count, (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e6)
            for each in profile.key_averages()
            if not each.key.startswith("ProfilerStep")
        ]
        longest = sorted(times, key=lambda each: -each[2])[:SHOWN]
        shown = [("wait for data", self.traced, self.data_seconds), *longest]
        return [
            (name[:60], f"{calls:,}", f"{spent / self.traced:.4f}", f"{spent / seconds:.1%}")
            for name, calls, spent in shown
        ]
