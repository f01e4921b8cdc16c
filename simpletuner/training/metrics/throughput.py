"""Throughput of training: TFLOP/s of a device, model FLOPs utilization (MFU), and memory.

MFU is the FLOPs of a step over what the device could have computed in its time (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B). docs/performance.md says what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simpletuner.data.batches.prefetch import StepBatch
from simpletuner.models.analysis.flops import FlopCounter
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.devices.devices import device_by_driver_name
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.system.numbers import format_gib


@dataclass
class Throughput:
    """Measurements of rank 0 on its own device; the others have as much to do."""

    counter: FlopCounter
    peak_tflops: float | None
    context_parallel_size: int
    device: torch.device
    report: Report
    is_counted: bool = True
    """False for a family that cannot be counted, and on a CPU whose peak nobody has given: counting takes longer than
    the steps of a small model."""

    def count(self, batch: StepBatch) -> float | None:
        """Return this device's share of the FLOPs of a step; None where they cannot be counted.

        A look-up, but for the first batch of a shape, which takes some tenths of a second.
        """
        if not self.is_counted:
            return None
        try:
            flops = sum(self.counter.count(each.latents, each.conditioning) for each in batch.micro_batches)
        except RuntimeError as error:  # what torch raises where a denoiser reads numbers, which the meta device has not
            self.is_counted = False
            self.report.warn(f"no TFLOP/s are shown, since the model cannot run on the meta device: {error}")
            return None
        return flops / self.context_parallel_size

    def measure(self, flops: float | None, seconds: float) -> dict[str, float]:
        """Return what the metrics say of a step that took so long."""
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
    """Format what the status line shows of what was measured: memory and MFU, or TFLOP/s where there is no peak."""
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
        torch.cuda.reset_peak_memory_stats(device)  # encoders are gone, and their peak says nothing of training
    peak = session.settings.logging.device_peak_tflops or known
    if session.settings.training.float8:
        peak = None  # of a dense bf16 device, which float8 would seem to exceed
    is_counted = device.type == "cuda" or peak is not None
    return Throughput(FlopCounter(family), peak, session.mesh.cp, device, session.report, is_counted)
