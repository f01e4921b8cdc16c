"""What a plan is about: the denoiser, the sizes of its samples, the number of steps; counted, never computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from simpletuner.data.folders import default_folder
from simpletuner.data.geometry import Size
from simpletuner.models.architecture import architecture_of
from simpletuner.models.diffusers_io import build_on_meta
from simpletuner.models.family import ModelFamily
from simpletuner.models.loading import local_folder
from simpletuner.models.lora import freeze
from simpletuner.models.malformed import opening
from simpletuner.models.parameter_count import parameters_in
from simpletuner.models.published import open_without_weights
from simpletuner.models.registry import TINY, family_class
from simpletuner.models.step_trace import (
    StepTrace,
    new_mode,
    trace_step,
    trace_vae,
    use_cuda_kernels,
    with_fake_parameters,
)
from simpletuner.models.tiny.build import build_tiny
from simpletuner.models.vae import enable_parts
from simpletuner.models.weights import any_weights_files
from simpletuner.parallel.activations import memory_budget
from simpletuner.parallel.blocks import recommended_blocks
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.module_stats import count_parameters
from simpletuner.parallel.split_engine import hold_in_bf16
from simpletuner.parallel.world import joined_world
from simpletuner.preparation import plan_data
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.system.signals import StopRequest
from simpletuner.training.schedule import new_schedule


@dataclass(frozen=True)
class SampleSizes:
    """Samples of an epoch by their size in px, and the optimizer steps of the whole run."""

    counts: Mapping[Size, int]
    steps: int | None = None
    """None where nothing says it: neither max_train_steps nor images."""

    @property
    def largest(self) -> Size:
        return max(self.counts, key=lambda size: size[0] * size[1])

    @property
    def mean_area(self) -> float:
        """Mean area of a sample relative to the largest."""
        areas = {size: size[0] * size[1] for size in self.counts}
        return (
            sum(areas[size] * count for size, count in self.counts.items())
            / sum(self.counts.values())
            / max(areas.values())
        )


def count_sizes(loaded: Loaded, report: Report) -> SampleSizes:
    """Read the sizes of all images, or of what earlier starts kept; without images take squares of `resolution`.

    Raises what a run would raise, such as DataError for buckets that do not fill the effective batch.
    """
    settings = loaded.settings
    if settings.data.instance_data_dir is None and settings.data.data_backend_config is None:
        edge = round(
            settings.data.resolution
            if settings.data.resolution_type != "area"
            else 1000 * settings.data.resolution**0.5
        )
        aligned = max(1, edge // settings.data.aspect_bucket_alignment) * settings.data.aspect_bucket_alignment
        return SampleSizes({(aligned, aligned): 1}, settings.training.max_train_steps)
    kept = default_folder(settings, "scan")
    with joined_world({}, use_cpu=True) as world, TemporaryDirectory() as folder:
        session = Session(loaded, Mesh(world), report, StopRequest())
        plan = plan_data(session, scans_folder=kept if kept.is_dir() else Path(folder))
        counts: Counter[Size] = Counter()
        for name, bucket in plan.buckets.items():
            width, height = map(int, name.split("x"))
            counts[width, height] += len(bucket)
        return SampleSizes(counts, new_schedule(settings, plan.sampler).max_steps)


@contextmanager
def opened_family(settings: Settings, report: Report) -> Iterator[ModelFamily]:
    """Yield the family of the settings: of a folder, of an earlier download, or as published, without weights."""
    model = settings.model
    if (folder := local_folder(model)) is not None and (folder / "model_index.json").is_file():
        with opening(folder):
            family = family_class(model).open(folder, settings)
        yield family
        return
    with TemporaryDirectory(prefix="simpletuner-") as place:
        if model.model_flavour == TINY and not model.pretrained_model_name_or_path:
            build_tiny(cls := family_class(model), Path(place))
            yield cls.open(Path(place), settings)
        else:
            yield open_without_weights(architecture_of(model, report.warn), settings, Path(place))


@dataclass
class Workload:
    """A denoiser and its largest samples. Traces are made when they are asked for, once each."""

    family: ModelFamily
    largest: Size
    mode: FakeTensorMode = field(default_factory=new_mode)
    models: dict[tuple[object, ...], nn.Module] = field(default_factory=dict)
    traces: dict[tuple[object, ...], StepTrace] = field(default_factory=dict)
    vae_peaks: dict[tuple[object, ...], int] = field(default_factory=dict)

    def trace(self, settings: Settings, samples: int, on_gpu: bool) -> StepTrace:
        """Return the trace of a micro-batch as an engine of these settings would run it.

        Large micro-batches are on the line through those of 1 and 2 samples. Compiled blocks with a budget are taken to
        lie between those that recompute all and those that keep all.
        """
        if samples > 2:
            one, two = (self.trace(settings, count, on_gpu) for count in (1, 2))
            return one.scaled(samples, two)
        if (budget := memory_budget(settings)) is not None:
            recomputed, kept = (self.eager_trace(settings, samples, on_gpu, each) for each in (True, False))
            return recomputed.towards(kept, budget)
        return self.eager_trace(settings, samples, on_gpu, settings.training.gradient_checkpointing)

    def eager_trace(self, settings: Settings, samples: int, on_gpu: bool, recomputes: bool) -> StepTrace:
        in_bf16, dtype = has_bf16_weights(settings), compute_dtype(settings)
        kind = (in_bf16, dtype, on_gpu)
        if kind not in self.models:
            self.models[kind] = with_fake_parameters(self.trained_model(settings), self.mode)
            if on_gpu:
                use_cuda_kernels(self.models[kind])
        key = (*kind, recomputes, samples)
        if key not in self.traces:
            model: Any = self.models[kind]
            model.enable_gradient_checkpointing() if recomputes else model.disable_gradient_checkpointing()
            shapes, autocast = self.family.input_shapes(self.largest), dtype != torch.float32 and not in_bf16
            self.traces[key] = trace_step(self.family, model, self.mode, shapes, samples, dtype, autocast)
        return self.traces[key]

    def trained_model(self, settings: Settings) -> nn.Module:
        """Return the denoiser on the meta device, with the trainable parameters and dtypes of a training step."""
        model = self.family.denoiser()
        if self.family.adapter is not None:
            freeze(model, compute_dtype(settings))
            self.family.adapter.attach(model)
        elif has_bf16_weights(settings):
            hold_in_bf16(model)
        return model.train()

    @cached_property
    def trained_parameters(self) -> tuple[int, int]:
        """How many parameters are trained, and how many are frozen beside them."""
        whole = count_parameters(self.family.meta_denoiser)
        if self.family.adapter is None:
            return whole, 0
        return sum(map(math.prod, self.family.trained_shapes().values())), whole

    def units(self, settings: Settings) -> tuple[int, int]:
        """Return the parameters of FSDP2's largest unit, and those outside all units."""
        model = self.family.meta_denoiser
        units = units_of(model, recommended_blocks(model), settings.parallel)
        inside = {parameter: parameter.numel() for unit in units for parameter in unit.parameters()}
        return max(map(count_parameters, units), default=0), count_parameters(model) - sum(inside.values())

    def text_encoder_bytes(self, settings: Settings) -> int | None:
        """Return the weights of all text encoders, in the dtype that they compute in; None without their files."""
        folders = [path for path in self.family.folder.glob("text_encoder*") if path.is_dir()]
        width = 2 if settings.training.mixed_precision == "bf16" else 4
        return width * sum(parameters_in(file) for each in folders for file in any_weights_files(each)) or None

    def vae_bytes(self, settings: Settings, samples: int, decodes: bool) -> int | None:
        """Return the most that the VAE takes for so many of the largest images; None without its config."""
        if "_class_name" not in self.family.vae_config:
            return None
        dtype = torch.bfloat16 if settings.model.vae_dtype == "bf16" else torch.float32
        key = (dtype, samples, decodes)
        if key not in self.vae_peaks:
            model = build_on_meta(self.family.vae_config).eval()
            enable_parts(model, settings.model)
            self.vae_peaks[key] = trace_vae(model, dtype, self.largest, samples, decodes)
        return self.vae_peaks[key]


def has_bf16_weights(settings: Settings) -> bool:
    """Whether the weights that compute are bf16 themselves, not float32 under autocast."""
    parallel = settings.parallel
    is_cast = parallel.fsdp_enable or parallel.zero_stage is not None or settings.optimizer.state_layout != "fp32"
    return settings.training.mixed_precision == "bf16" and is_cast
