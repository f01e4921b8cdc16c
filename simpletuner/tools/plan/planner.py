"""Make a plan from settings: open the model, count its samples, estimate or measure, propose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.filesize import decimal

from simpletuner.checkpoints.disk_usage import estimate_disk_usage
from simpletuner.counting.flops import FlopCounter
from simpletuner.counting.records import CountRecord
from simpletuner.counting.step_memory import Workload, estimate_without_step
from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.catalog.architecture import copied_bytes
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.devices import Device, MemoryBudget
from simpletuner.preparation.class_images import ClassImages
from simpletuner.report import Report
from simpletuner.settings import Loaded, load
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.numbers import format_gib
from simpletuner.tools.plan.estimate import RunPlan, SampleShapes, count_shapes, estimate_run, opened_family
from simpletuner.tools.plan.measure import measure_step
from simpletuner.tools.plan.search import Proposal, Search, propose
from simpletuner.training.auto import with_training
from simpletuner.training.recomputation import choose_recomputation


@dataclass(frozen=True)
class Planner:
    """Inputs of a plan; flags and config are read again for each combination of settings that is tried."""

    loaded: Loaded
    flags: Mapping[str, object]
    config: Path | None
    device: Device | None
    budget: MemoryBudget
    report: Report

    def run(self, auto: bool, measure: bool) -> Proposal:
        shapes = count_shapes(self.loaded, self.report)
        if shapes.problem:  # before what takes minutes
            self.report.warn(f"no run would start: {shapes.problem.message}", shapes.problem.hint)
        with opened_family(self.loaded.settings, self.report) as family:
            workload = Workload(family, shapes.largest, interpolates=auto)
            self.say_what_is_known(workload)
            proposal = (self.proposed if auto else self.planned)(workload, shapes)
            if measure:
                seconds = measure_step(proposal.plan.settings, workload) * shapes.mean_area
                proposal = replace(proposal, plan=replace(proposal.plan, step_seconds=seconds, parts=None))
        return replace(proposal, problem=shapes.problem, class_images=[*with_seconds(proposal.plan, shapes)])

    def planned(self, workload: Workload, shapes: SampleShapes) -> Proposal:
        with self.report.progress("counting what a step does", 3) as progress:  # minutes for large models
            flops = flops_per_sample(workload.family, shapes.largest)
            progress.update(1)
            settings = self.with_recomputation(workload).settings
            progress.update(2)
            plan = estimate_run(settings, workload, shapes, self.device, flops)
            progress.update(3)
        return Proposal(plan, shapes.largest.target)

    def proposed(self, workload: Workload, shapes: SampleShapes) -> Proposal:
        with self.report.phase("counting what a sample does"):
            flops = flops_per_sample(workload.family, shapes.largest)

        def estimate(loaded: Loaded) -> RunPlan:
            return estimate_run(loaded.settings, workload, shapes, self.device, flops)

        at_least = partial(estimate_without_step, workload=workload)
        search = Search(self.with_settings, estimate, at_least, self.budget)
        plan, changed, reasons = propose(self.loaded, search, self.report)
        return Proposal(plan, shapes.largest.target, changed, reasons)

    def say_what_is_known(self, workload: Workload) -> None:
        """Say what needs no traced step: memory of weights and optimizer, whether that fits, and the disk."""
        settings = self.loaded.settings
        least = estimate_without_step(settings, workload)
        disk = estimate_disk_usage(
            settings, workload.family.trained_weights, "counted", copied_bytes(workload.family.folder)
        )
        lack = self.budget.shortfall(least.gpu_bytes, least.host_bytes)
        limit = f" of {format_gib(self.budget.gpu_bytes)}" if self.budget.gpu_bytes is not None else ""
        self.report.say(
            f"before activations and gradients: {format_gib(least.gpu_bytes)}{limit} per GPU"
            f"{', which does not fit' if lack else ''}; on disk at most {decimal(disk.total_bytes)}"
        )

    def with_recomputation(self, workload: Workload) -> Loaded:
        """Return the settings with what a run would choose for `gradient_checkpointing=auto`."""
        settings = self.loaded.settings
        if settings.training.gradient_checkpointing is not None:
            return self.loaded
        launch, limit = settings.launch, self.budget.gpu_bytes
        if launch.use_cpu and (limit := self.budget.host_bytes) is not None:
            limit = limit * launch.num_machines // launch.num_processes
        if limit is None:  # nothing says what fits: the least
            values = {"gradient_checkpointing": True}
        else:
            values, _ = choose_recomputation(settings, workload, limit)
        return replace(self.loaded, settings=with_training(settings, values))

    def with_settings(self, values: Mapping[str, object]) -> Loaded:
        return load({**self.flags, **values}, self.config, complete=False)


def with_seconds(plan: RunPlan, shapes: SampleShapes) -> Iterator[tuple[ClassImages, float | None]]:
    """Yield the class images of each dataset, with the seconds in which all ranks together make them."""
    training, sample_px = plan.settings.training, shapes.mean_area * shapes.largest.pixels
    for each in shapes.class_images:
        seconds = plan.step_seconds
        if seconds is not None:
            seconds /= training.train_batch_size * training.gradient_accumulation_steps
            seconds = each.seconds(seconds, sample_px, plan.settings.launch.num_processes)
        yield each, seconds


def flops_per_sample(family: ModelFamily, shape: SampleShape) -> int:
    """Count forward and backward of one sample, recomputation excluded.

    Raises EnvironmentNotReady for a denoiser that does not run on the meta device.
    """
    shapes = family.input_shapes(*shape)

    def count() -> int:
        conditioning = {
            name: torch.empty(1, *axes, device="meta", dtype=torch.long if "mask" in name else torch.float32)
            for name, axes in shapes.items()
        }
        return FlopCounter(family).count(conditioning.pop("latents"), conditioning)

    try:
        return CountRecord.of(family, "FLOPs", shapes=shapes).number(count)
    except RuntimeError as error:  # what torch raises where a denoiser asks for what the meta device has not (Mochi)
        raise EnvironmentNotReady(
            f"the work of {family.pipeline_class.__name__} cannot be counted without running it: {error}",
            "train a few steps: metrics.jsonl has their time and memory",
        ) from error
