"""Memory of every phase, time and disk of one configuration."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.checkpoints.disk_usage import DiskRoom, DiskUsage, estimate_disk_usage, room_of
from simpletuner.checkpoints.layout import list_checkpoints, parse_step
from simpletuner.models.catalog.parameter_count import copied_bytes
from simpletuner.parallel.devices.devices import Device
from simpletuner.parallel.devices.memory import MemoryBudget, MemoryEstimate
from simpletuner.settings import Settings
from simpletuner.tools.plan.inputs import SampleShapes
from simpletuner.tools.plan.timing import StepSeconds, estimate_step
from simpletuner.training.auto.memory_estimate import estimate_training
from simpletuner.training.auto.workload import Workload


@dataclass(frozen=True)
class RunPlan:
    """Costs of one configuration."""

    settings: Settings
    memory: MemoryEstimate
    """While the backward pass runs, where a step takes most."""
    phases: dict[str, int | None]
    """The most bytes of a GPU in each phase; None where the files that say it are missing."""
    step_seconds: float | None
    """None without a device."""
    parts: StepSeconds | None
    """Parts of `step_seconds`, where it was estimated."""
    steps: int | None
    flops_per_sample: int
    disk: DiskUsage
    room: DiskRoom | None = None
    """Space of output_dir; None where it was not looked at."""

    @property
    def peak_bytes(self) -> int:
        return max(filter(None, self.phases.values()))

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase] or 0)

    @property
    def samples_per_second(self) -> float | None:
        return self.step_seconds and self.settings.effective_batch_size / self.step_seconds

    def mfu(self, device: Device) -> float | None:
        """Return the FLOPs of the model over what all devices could have computed."""
        if self.samples_per_second is None:
            return None
        ranks = self.settings.launch.num_processes
        return self.samples_per_second * self.flops_per_sample / (ranks * device.peak_tflops * 1e12)

    def shortfall(self, budget: MemoryBudget) -> str:
        """Describe which resource is insufficient; empty if everything fits or capacity is unknown."""
        return budget.shortfall(self.peak_bytes, self.memory.host_bytes, self.peak_phase)


def estimate_run(
    settings: Settings, workload: Workload, shapes: SampleShapes, device: Device | None, flops_per_sample: int
) -> RunPlan:
    """Estimate a configuration; without a device memory alone."""
    memory = estimate_training(settings, workload)
    # Between steps there are neither activations nor gradients.
    at_rest = memory.gpu_bytes - sum(row.gpu for row in memory.rows if row.name in ("activations", "gradients"))
    phases = {
        "encoding captions": workload.text_encoder_bytes(settings),
        "encoding images": workload.vae_bytes(settings, settings.data.vae_batch_size, decodes=False),
        "training": memory.gpu_bytes,
    }
    if settings.validation.samples_images:
        decoding = workload.vae_bytes(settings, 1, decodes=True)
        phases["validating"] = decoding and round(at_rest) + decoding
    trace = workload.trace(settings, settings.training.train_batch_size, not settings.launch.use_cpu)
    parts = estimate_step(settings, trace, device, memory.inputs, shapes.mean_area) if device else None
    disk = estimate_disk_usage(
        settings, workload.weights, "counted", copied_bytes(workload.family.folder), shapes.steps
    )
    room = room_of(settings, disk, newest_step(settings), shapes.steps)
    return RunPlan(settings, memory, phases, parts and parts.total, parts, shapes.steps, flops_per_sample, disk, room)


def newest_step(settings: Settings) -> int:
    """Return the step that a start would go on from."""
    is_new = settings.checkpoints.resume_from_checkpoint == "none"
    found = [] if is_new else list_checkpoints(settings.training.output_dir / "checkpoints")
    return parse_step(found[0]) if found else 0
