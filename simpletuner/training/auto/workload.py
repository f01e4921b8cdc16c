"""The denoiser of a run and its largest samples, traced on fake tensors as its engine would run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from simpletuner.models.analysis.cuda_kernels import use_cuda_kernels
from simpletuner.models.analysis.equal_blocks import equal_blocks, trace_by_kinds
from simpletuner.models.analysis.step_trace import (
    Execution,
    StepTrace,
    new_mode,
    trace_step,
    trace_vae,
    with_fake_parameters,
)
from simpletuner.models.catalog.parameter_count import parameters_in
from simpletuner.models.family.adapter import freeze
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.vae import enable_parts
from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.models.folder.weights import any_weights_files
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.model.activations import memory_budget
from simpletuner.parallel.model.module_stats import count_parameters
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.parallel.precision.split_engine import hold_in_bf16
from simpletuner.private_api.of_torch import FakeTensorMode
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Parallel
from simpletuner.settings.values.shape import SampleShape
from simpletuner.training.auto.gathered import gathered_points
from simpletuner.training.optimizers import trained_weights


@dataclass
class Workload:
    """A denoiser and its largest samples. Traces are made when they are asked for, once each."""

    family: ModelFamily
    largest: SampleShape
    interpolates: bool = False
    """Take large micro-batches from traces of 1 and 2 samples: for a search that asks for many."""
    mode: FakeTensorMode = field(default_factory=new_mode)
    models: dict[tuple[object, ...], nn.Module] = field(default_factory=dict)
    traces: dict[tuple[object, ...], StepTrace] = field(default_factory=dict)
    vae_peaks: dict[tuple[object, ...], int] = field(default_factory=dict)

    def trace(self, settings: Settings, samples: int, on_gpu: bool) -> StepTrace:
        """Return the trace of a micro-batch as an engine of these settings would run it.

        Compiled blocks with a budget are taken to
        lie between those that recompute all and those that keep all.
        """
        if self.interpolates and samples > 2:
            one, two = (self.trace(settings, count, on_gpu) for count in (1, 2))
            return one.scaled(samples, two)
        if (budget := memory_budget(settings)) is not None:
            recomputed, kept = (self.eager_trace(settings, samples, on_gpu, each) for each in (True, False))
            return recomputed.towards(kept, budget)
        return self.eager_trace(settings, samples, on_gpu, bool(settings.training.gradient_checkpointing))

    def eager_trace(self, settings: Settings, samples: int, on_gpu: bool, recomputes: bool) -> StepTrace:
        in_bf16, dtype = has_bf16_weights(settings), compute_dtype(settings)
        kind = (in_bf16, dtype, on_gpu)
        if kind not in self.models:
            self.models[kind] = with_fake_parameters(self.trained_model(settings), self.mode)
            if on_gpu:
                use_cuda_kernels(self.models[kind])
        autocast = dtype != torch.float32 and not in_bf16
        copies = key_value_copies(settings.parallel)
        execution = Execution(dtype, autocast, on_gpu, settings.training.offload_activations, copies)
        key = (*kind, recomputes, execution, samples)
        if key not in self.traces:
            model: Any = self.models[kind]
            model.enable_gradient_checkpointing() if recomputes else model.disable_gradient_checkpointing()
            shapes = self.family.input_shapes(*self.largest)
            trace = partial(trace_step, self.family, model, self.mode, shapes, samples, execution)
            counts = equal_blocks(model) if self.family.has_equal_blocks else {}
            self.traces[key] = trace_by_kinds(model, counts, trace) if counts else trace()
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
    def weights(self) -> TrainedWeights:
        """The shapes of what is trained."""
        return trained_weights(self.family)

    @property
    def frozen_parameters(self) -> int:
        """The parameters below a LoRA."""
        return 0 if self.family.adapter is None else self.denoiser_parameters

    @cached_property
    def denoiser_parameters(self) -> int:
        """The parameters of the whole denoiser."""
        return count_parameters(self.family.meta_denoiser)

    def gathered(self, settings: Settings, trace: StepTrace) -> Iterator[float]:
        """Yield what FSDP2 gathers and reduces at each point of a trace, in bytes."""
        traced = next(iter(self.models.values()))  # whose names are those in the trace
        numel = {name: each.numel() for name, each in traced.named_parameters()}
        return gathered_points(settings, self.family.meta_denoiser, trace, numel)

    def text_encoder_bytes(self, settings: Settings) -> int | None:
        """Return the weights of all text encoders, in the dtype that they compute in; None without their files."""
        parts = ("text_encoder*", "connectors")  # the latter of LTX-2
        folders = [path for part in parts for path in self.family.folder.glob(part) if path.is_dir()]
        width = 2 if settings.training.mixed_precision == "bf16" else 4
        return width * sum(parameters_in(file) for each in folders for file in any_weights_files(each)) or None

    def vae_bytes(self, settings: Settings, samples: int, decodes: bool) -> int | None:
        """Return the most that the VAE takes for so many of the largest images; None without its config."""
        if "_class_name" not in self.family.vae_config:
            return None
        dtype = torch.bfloat16 if settings.model.vae_dtype == "bf16" else torch.float32
        largest = self.largest.target
        samples = 1 if largest.frames > 1 else samples  # clips are encoded one by one
        key = (dtype, samples, decodes)
        if key not in self.vae_peaks:
            model = build_on_meta(self.family.vae_config).eval()
            enable_parts(model, settings.model)
            self.vae_peaks[key] = trace_vae(model, dtype, largest, samples, decodes)
        return self.vae_peaks[key]


def has_bf16_weights(settings: Settings) -> bool:
    """Return whether the weights that compute are bf16 themselves, not float32 under autocast."""
    parallel = settings.parallel
    is_cast = parallel.fsdp_enable or parallel.zero_stage is not None or settings.optimizer.state_layout != "fp32"
    is_lora = settings.model.model_type == "lora"  # its matrices are float32, also over a base in bf16 under FSDP2
    return settings.training.mixed_precision == "bf16" and is_cast and not is_lora


def key_value_copies(parallel: Parallel) -> int:
    """Return as how many keys and values count in a trace of whole sequences, of which a rank is taken to have a share.

    An all-gather leaves each rank those of all.
    """
    return parallel.context_parallel_size if parallel.context_parallel_comm_strategy == "allgather" else 1
