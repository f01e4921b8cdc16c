"""Memory, time and disk of one configuration, from its family without weights and its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from simpletuner.checkpoints.disk_usage import DiskRoom, DiskUsage, estimate_disk_usage, room_of
from simpletuner.checkpoints.layout import list_checkpoints, parse_step
from simpletuner.counting.step_memory import Workload, estimate_training
from simpletuner.data.config.places import default_folder
from simpletuner.data.scan.scan import copy_scans
from simpletuner.errors import ExitCode, SimpleTunerError
from simpletuner.models.catalog.architecture import architecture_of, copied_bytes
from simpletuner.models.catalog.registry import TINY
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.folder.malformed import translate_load_errors
from simpletuner.models.folder.weights import index_file
from simpletuner.models.opening.loading import local_folder
from simpletuner.models.opening.published import open_without_weights
from simpletuner.models.tiny.build import build_tiny
from simpletuner.parallel.devices import Device, MemoryBudget, MemoryEstimate
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import joined_world
from simpletuner.preparation.class_images import ClassImages, class_images_of
from simpletuner.preparation.plan import samples_by_shape
from simpletuner.preparation.prepare import plan_data
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.importing import no_collection
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.plan.measure import StepSeconds, estimate_step
from simpletuner.tools.plan.rates import rates_of
from simpletuner.training.optimizers import new_schedule


@dataclass(frozen=True)
class SampleShapes:
    """Samples of an epoch by their shape in px, and the optimizer steps of the whole run."""

    counts: Mapping[SampleShape, int]
    steps: int | None = None
    """None where nothing says it: neither max_train_steps nor images."""
    problem: SimpleTunerError | None = None
    """Why the images cannot be trained on."""
    class_images: Sequence[ClassImages] = ()

    @property
    def largest(self) -> SampleShape:
        return max(self.counts, key=attrgetter("pixels"))

    def epoch_steps(self, batch_size: int) -> int | None:
        """Mean steps of an epoch, rounded up; None without images, of which a square stands for one."""
        samples = sum(self.counts.values())
        return math.ceil(samples / batch_size) if samples > 1 else None

    @property
    def mean_area(self) -> float:
        """Mean area of a sample relative to the largest."""
        pixels = sum(shape.pixels * count for shape, count in self.counts.items())
        return pixels / sum(self.counts.values()) / self.largest.pixels


def count_shapes(loaded: Loaded, report: Report) -> SampleShapes:
    """Shapes of images from the kept scan or the files; squares of `resolution` if there are none.

    What would end the run, such as buckets that do not fill the effective batch, becomes the `problem`.
    """
    data, steps = loaded.settings.data, loaded.settings.training.max_train_steps
    square = SampleShapes({SampleShape(data.square): 1}, steps)
    if data.instance_data_dir is None and data.data_backend_config is None:
        return square
    with TemporaryDirectory() as folder:
        scans = copy_scans(default_folder(loaded.settings, "scan"), Path(folder))
        found = shapes_of_images(loaded, scans, report)
        if isinstance(found, SampleShapes):
            return found
        # of buckets that are too small the sizes are known
        with_repeats = data.model_copy(update={"allow_dataset_oversubscription": True})
        repeated = replace(loaded, settings=loaded.settings.model_copy(update={"data": with_repeats}))
        shapes = shapes_of_images(repeated, scans, Report(quiet=True))
    return SampleShapes(shapes.counts if isinstance(shapes, SampleShapes) else square.counts, steps, found)


def shapes_of_images(loaded: Loaded, scans_folder: Path, report: Report) -> SampleShapes | SimpleTunerError:
    with joined_world({}, use_cpu=True) as world:
        try:
            plan = plan_data(Session(loaded, Mesh(world), report, StopRequest()), scans_folder=scans_folder)
        except SimpleTunerError as error:  # as such or as a RemoteFailure, by what it is about
            if error.exit_code != ExitCode.DATA:
                raise
            return error
        class_images = class_images_of(loaded.settings, plan.samples.parts)
        steps = new_schedule(loaded.settings, plan.sampler).max_steps
        return SampleShapes(samples_by_shape(plan), steps, class_images=class_images)


def opened_disk_usage(settings: Settings) -> DiskUsage:
    """Estimate what a run writes, by its weights' shapes. Raises SimpleTunerError for an unknown model."""
    with opened_family(settings, Report(quiet=True)) as family:
        return estimate_disk_usage(settings, family.trained_weights, "counted", copied_bytes(family.folder))


@contextmanager
def opened_family(settings: Settings, report: Report) -> Iterator[ModelFamily]:
    """Yield the settings' family: of a folder, an earlier download, or as published, without weights.

    Libraries print nothing meanwhile.
    """
    with libraries_silenced(), ExitStack() as stack:
        with no_collection():  # it imports classes of models
            family = stack.enter_context(family_without_weights(settings, report))
        yield family


@contextmanager
def family_without_weights(settings: Settings, report: Report) -> Iterator[ModelFamily]:
    model = settings.model
    if (folder := local_folder(model)) is not None and index_file(folder).is_file():
        with translate_load_errors(folder):
            family = family_class(model).open(folder, settings)
        yield family
        return
    with TemporaryDirectory(prefix="simpletuner-") as place:
        if model.model_flavour == TINY and not model.pretrained_model_name_or_path:
            build_tiny(model, Path(place))
            yield family_class(model).open(Path(place), settings)
        else:
            yield open_without_weights(architecture_of(model, report.warn), settings, Path(place))


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
    epoch_steps: int | None = None
    """Mean steps of an epoch; None without images."""

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
    parts = None
    if device is not None:
        parts = estimate_step(settings, trace, device, memory.inputs, shapes.mean_area, rates_of(device))
    disk = estimate_disk_usage(
        settings, workload.family.trained_weights, "counted", copied_bytes(workload.family.folder), shapes.steps
    )
    room = room_of(settings, disk, newest_step(settings), shapes.steps)
    seconds, epoch = parts and parts.total, shapes.epoch_steps(settings.effective_batch_size)
    return RunPlan(settings, memory, phases, seconds, parts, shapes.steps, flops_per_sample, disk, room, epoch)


def newest_step(settings: Settings) -> int:
    """Return the step that a start would go on from."""
    is_new = settings.checkpoints.resume_from_checkpoint == "none"
    found = [] if is_new else list_checkpoints(settings.training.output_dir / "checkpoints")
    return parse_step(found[0]) if found else 0
