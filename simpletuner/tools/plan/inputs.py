"""Inputs of a plan: the family without weights, the sizes of the samples, the number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from simpletuner.checkpoints.disk_usage import DiskUsage, estimate_disk_usage
from simpletuner.data.config.folders import default_folder
from simpletuner.errors import ExitCode, SimpleTunerError
from simpletuner.models.catalog.architecture import architecture_of
from simpletuner.models.catalog.parameter_count import copied_bytes
from simpletuner.models.catalog.registry import TINY
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.lookup import family_class
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.folder.index import index_file
from simpletuner.models.folder.malformed import opening
from simpletuner.models.opening.loading import local_folder
from simpletuner.models.opening.published import open_without_weights
from simpletuner.models.tiny.build import build_tiny
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import joined_world
from simpletuner.preparation.plan import samples_by_shape
from simpletuner.preparation.prepare import plan_data
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.optimizers import trained_weights
from simpletuner.training.schedule import new_schedule


@dataclass(frozen=True)
class SampleShapes:
    """Samples of an epoch by their shape in px, and the optimizer steps of the whole run."""

    counts: Mapping[SampleShape, int]
    steps: int | None = None
    """None where nothing says it: neither max_train_steps nor images."""
    problem: SimpleTunerError | None = None
    """Why the images cannot be trained on."""

    @property
    def largest(self) -> SampleShape:
        return max(self.counts, key=attrgetter("pixels"))

    @property
    def mean_area(self) -> float:
        """Mean area of a sample relative to the largest."""
        pixels = sum(shape.pixels * count for shape, count in self.counts.items())
        return pixels / sum(self.counts.values()) / self.largest.pixels


def count_shapes(loaded: Loaded, report: Report) -> SampleShapes:
    """Return shapes of images from the kept scan or the files; assume squares of `resolution` if there are none.

    What would end the run, such as buckets that do not fill the effective batch, becomes the `problem`.
    """
    data, steps = loaded.settings.data, loaded.settings.training.max_train_steps
    square = SampleShapes({SampleShape(data.square): 1}, steps)
    if data.instance_data_dir is None and data.data_backend_config is None:
        return square
    kept = default_folder(loaded.settings, "scan")
    with TemporaryDirectory() as folder:
        scans = kept if kept.is_dir() else Path(folder)
        found = shapes_of_images(loaded, scans, report)
        if isinstance(found, SampleShapes):
            return found
        # of buckets that are too small the sizes are known
        with_repeats = data.model_copy(update={"allow_dataset_oversubscription": True})
        repeated = replace(loaded, settings=loaded.settings.model_copy(update={"data": with_repeats}))
        shapes = shapes_of_images(repeated, scans, Report(quiet=True))
    return SampleShapes(shapes.counts if isinstance(shapes, SampleShapes) else square.counts, steps, found)


def shapes_of_images(loaded: Loaded, scans_folder: Path, report: Report) -> SampleShapes | SimpleTunerError:
    """Return the shapes of all images, or what is wrong with the data."""
    with joined_world({}, use_cpu=True) as world:
        try:
            plan = plan_data(Session(loaded, Mesh(world), report, StopRequest()), scans_folder=scans_folder)
        except SimpleTunerError as error:  # as such or as a RemoteFailure, by what it is about
            if error.exit_code != ExitCode.DATA:
                raise
            return error
        return SampleShapes(samples_by_shape(plan), new_schedule(loaded.settings, plan.sampler).max_steps)


def opened_disk_usage(settings: Settings) -> DiskUsage:
    """Estimate what a run writes, by the shapes of its weights. Raises SimpleTunerError for an unknown model."""
    with opened_family(settings, Report(quiet=True)) as family:
        return estimate_disk_usage(settings, trained_weights(family), "counted", copied_bytes(family.folder))


@contextmanager
def opened_family(settings: Settings, report: Report) -> Iterator[ModelFamily]:
    """Yield the family of the settings: of a folder, of an earlier download, or as published, without weights.

    Libraries print nothing meanwhile.
    """
    with libraries_silenced(), family_without_weights(settings, report) as family:
        yield family


@contextmanager
def family_without_weights(settings: Settings, report: Report) -> Iterator[ModelFamily]:
    model = settings.model
    if (folder := local_folder(model)) is not None and index_file(folder).is_file():
        with opening(folder):
            family = family_class(model).open(folder, settings)
        yield family
        return
    with TemporaryDirectory(prefix="simpletuner-") as place:
        if model.model_flavour == TINY and not model.pretrained_model_name_or_path:
            build_tiny(model, Path(place))
            yield family_class(model).open(Path(place), settings)
        else:
            yield open_without_weights(architecture_of(model, report.warn), settings, Path(place))
