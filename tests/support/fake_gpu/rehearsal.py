"""The real engine, trainer, EMA and checkpointer of any settings, stepping on fake GPUs as one rank of any number.

A process group that communicates nothing takes the place of NCCL and gloo. torch cannot use fake tensors from two
threads, so what `in_daemon` would do is done where it is asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

from fake_gpu.device import DEVICE, RUNTIME, install
from fake_gpu.recorder import Recorder, follow_resizing
from simpletuner.checkpoints import saving
from simpletuner.counting.flops import use_cuda_kernels
from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_memory import CONTEXT_BYTES, Workload, estimate_training
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import FIRST_FRAME, LATENTS, SOUND, RankSlice, SampleReader, StepBatch, collate
from simpletuner.data.sampler.batch_sampler import GlobalBatch, SamplerState
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.samples import Sample
from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import Diffusion, FlowMatching, Objective
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.gpu import set_float32_precision
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.parallel.world import World
from simpletuner.preparation.sampled_prompts import sampled_prompts
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings, load
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.processes import threads
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.plan.estimate import count_shapes, opened_family
from simpletuner.training import build, ema
from simpletuner.training.build import build_trainer
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.ema import EMA
from simpletuner.training.optimizers import Schedule
from simpletuner.training.trainer import Trainer

install()
follow_resizing()

RANKS_PER_MACHINE = 8
RESUMED_AT = 5
HELD_OUT = 2


class GpuMode(RememberingMode):
    """Also what is made of Python's numbers on the device is fake, though torch says that there is a GPU."""

    avoid_device_init = True


@dataclass
class Known:
    """What rehearsals need not make again: results of operators, and of the same model, by its settings, more."""

    mode: GpuMode = field(default_factory=GpuMode)
    workloads: dict[tuple[Any, ...], Workload] = field(default_factory=dict)
    flops: dict[Any, int] = field(default_factory=dict)
    """Of whichever model has counted a shape first: how many there are changes nothing of a step."""


@dataclass
class Rehearsal:
    """A rank that is ready to step; `recorder` has what its steps do."""

    session: Session
    trainer: Trainer
    state: TrainingState
    recorder: Recorder
    batch: StepBatch
    planned_bytes: dict[str, int]
    """What `plan` says of a GPU's memory, by row, without CUDA's own."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """What is in memory before the first step."""

    @property
    def engine(self) -> Any:
        return self.state.engine

    def step(self) -> None:
        """Take one optimizer step, as `Trainer.train` does; the recorder begins anew."""
        self.recorder.restart()
        trainer = self.trainer
        output = trainer.train_step(self.batch)
        trainer.step += 1
        if trainer.ema is not None:
            trainer.ema.update(trainer.step)
        trainer.logger.log(trainer.step, output, self.batch, 0.0)

    def report(self) -> dict[str, Any]:
        """Return what was recorded since the recorder began anew, as JSON."""
        recorder, planned = self.recorder, self.planned_bytes
        kinds = {kind: " ".join(kind) for kind in recorder.collectives}
        return {
            "waits": dict(recorder.waits),
            "mixed_devices": dict(recorder.mixed_devices),
            "races": dict(recorder.order.races) if recorder.order is not None else None,
            "spins": RUNTIME.spins,
            "launches": recorder.work.launches,
            "moved_bytes": recorder.work.moved,
            "flops": recorder.work.flops.total(),
            "collectives": {name: recorder.collectives[kind] for kind, name in kinds.items()},
            "collective_bytes": {name: recorder.collective_bytes[kind] for kind, name in kinds.items()},
            "held_bytes": self.held_bytes,
            "peak_bytes": recorder.peak,
            "planned_bytes": sum(planned.values()),
            "planned": planned,
        }

    def save(self) -> None:
        """Copy what a checkpoint holds, and read the copies as the thread that writes them does."""
        saver = self.trainer.checkpointer.background
        assert saver is not None

        def write(snapshot: Any, _: World) -> None:
            for make in snapshot.groups.values():
                for tensor in make().local.values():
                    tensor.sum()

        saver.wait()
        saver.start(self.state.snapshot(self.trainer.step, self.batch.next_state, {}), write)

    def evaluate(self) -> None:
        """Measure the held-out loss, and run the denoising loop of validation without the VAE."""
        self.recorder.restart()
        held_out, *validators, _ = self.trainer.evaluations
        held_out.run(self.trainer.step, lambda done: None)
        for validator in validators:
            for _ in validator._samples(lambda done: None):
                pass


@contextmanager
def rehearsed(
    flags: Mapping[str, Any],
    world_size: int = 1,
    *,
    resumes: bool = True,
    checks_order: bool = True,
    plans: bool = True,
    known: Known | None = None,
    sample: SampleShape | None = None,
) -> Iterator[Rehearsal]:
    """Yield the first rank of a run of these settings; `resumes` starts it as from a checkpoint.

    `known` has the models, traces and FLOPs of rehearsals before. `sample` is a shape in place of the data's.
    """
    machines = {"num_machines": world_size // RANKS_PER_MACHINE} if world_size > RANKS_PER_MACHINE else {}
    recomputes = {"gradient_checkpointing": True}  # unless said otherwise: `auto` asks what a card has left
    loaded = load({**recomputes, **flags, "num_processes": world_size, **machines}, complete=False, environment={})
    with ExitStack() as stack:
        family, largest = stack.enter_context(opened(loaded, sample))
        known = known or Known()
        planned = planned_bytes(loaded, family, largest, known) if plans else {}
        world = stack.enter_context(fake_world(world_size))
        session = Session(loaded, build_mesh(loaded.settings, world), Report(quiet=True), StopRequest())
        with started(stack, session, family, largest, planned, resumes, Recorder(checks_order), known.mode) as run:
            run.trainer.logger.throughput.counter.counted = known.flops
            yield run
    gc.collect()


@contextmanager
def opened(loaded: Loaded, sample: SampleShape | None) -> Iterator[tuple[ModelFamily, SampleShape]]:
    report = Report(quiet=True)
    with opened_family(loaded.settings, report) as family:
        yield family, sample or count_shapes(loaded, report).largest


def planned_bytes(loaded: Loaded, family: ModelFamily, largest: SampleShape, known: Known) -> dict[str, int]:
    """Return the bytes that `plan` says a GPU holds, by row."""
    settings = loaded.settings
    workload = known.workloads.setdefault(key_of(settings, largest), Workload(family, largest))
    rows = estimate_training(settings, workload).rows
    return {row.name: round(row.gpu) for row in rows if row.gpu and row.gpu != CONTEXT_BYTES}


def key_of(settings: Settings, largest: SampleShape) -> tuple[Any, ...]:
    return settings.model.model_dump_json(), settings.lora.model_dump_json(), largest


@contextmanager
def fake_world(size: int) -> Iterator[World]:
    """Yield rank 0 of a number of ranks that do not exist."""
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    own_group = dist.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        return own_group(*arguments, **{**options, "backend": "fake"})

    try:
        with mock.patch.object(dist, "new_group", new_group):
            yield World(0, size, 0, DEVICE, store, local_size=min(size, RANKS_PER_MACHINE))
    finally:
        dist.destroy_process_group()


@contextmanager
def started(
    stack: ExitStack,
    session: Session,
    family: ModelFamily,
    largest: SampleShape,
    planned: dict[str, int],
    resumes: bool,
    recorder: Recorder,
    mode: GpuMode,
) -> Iterator[Rehearsal]:
    """Build what trains in memory that does not exist, and yield it."""
    settings, mesh = session.settings, session.mesh
    if settings.parallel.fsdp_enable:
        for kind in ("cuda", "cpu"):
            mesh.shard_mesh(kind)  # reads the numbers of its ranks
    prepared = prepared_samples(session, family, largest)
    batch = first_batch(session, prepared)
    objective, own_denoiser, own_vae = objective_of(family), family.denoiser, family.vae

    def denoiser(**options: Any) -> Any:
        with unset_fake_temporarily():
            model = own_denoiser(**options)
        use_cuda_kernels(model)
        return model

    def vae(device: torch.device) -> Any:
        with unset_fake_temporarily():
            return own_vae(device)

    stack.enter_context(mock.patch.object(family, "denoiser", denoiser))
    stack.enter_context(mock.patch.object(family, "vae", vae))
    stack.enter_context(mock.patch.object(family, "objective", lambda: objective))
    stack.enter_context(mock.patch.object(build, "read_tensors", lambda *_, **__: None))  # nothing is in these tensors
    stack.enter_context(mock.patch.object(build, "weights_files", lambda *_: []))
    stack.enter_context(mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda *_: None))
    stack.enter_context(without_threads())
    stack.enter_context(mock.patch.object(_fsdp_init, "_move_states_to_device", partial(move, recorder)))
    stack.enter_context(mode)
    stack.enter_context(recorder)
    set_float32_precision(settings.training.allow_tf32)
    backend = settings.training.attention_backend
    stack.enter_context(attention_by(backend, session.world.device, compute_dtype(settings)))
    engine = stack.enter_context(closing(build.open_engine(session.settings, session.mesh, family, None)))
    held = {"weights": recorder.live}
    if isinstance(model := engine.model, DistributedDataParallel):
        model.logger = mock.Mock()  # of C++, and asks for a timer of CUDA
        if not model._comm_hooks:
            model.register_comm_hook(None, lambda _, bucket: reduced(bucket.buffer()))
    if resumes:
        engine.load_optimizer_state(RESUMED_AT, engine.moments(), lambda name, tensors: None)
        gc.collect()
        held["optimizer"] = recorder.live - held["weights"]
    state = state_of(session, family, engine)
    trainer = build_trainer(session, family, prepared, state, None)
    pinned = StepBatch([each.pinned() for each in batch.micro_batches], batch.next_state)
    yield Rehearsal(session, trainer, state, recorder, pinned, planned, held)
    for running in (trainer.ema, trainer.checkpointer):
        if running is not None:
            running.finish() if isinstance(running, EMA) else running.close()


def move(recorder: Recorder, parameters: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    """Do what FSDP2 does with tensors in host memory, such as a LoRA's: assigning `data` moves no fake tensor."""
    for each in (*parameters, *buffers):
        if isinstance(each, FakeTensor) and each.device.type == "cpu":
            each.fake_device = torch.device(device.type, device.index or 0)
            recorder.add(each)


def reduced(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Do what DDP does with a bucket: its own hook asks a process group that does nothing for a result."""
    dist.all_reduce(gradients.div_(dist.get_world_size()))
    future = torch.futures.Future[Tensor]()
    future.set_result(gradients)
    return future


def objective_of(family: ModelFamily) -> Objective:
    """Return the family's own; of a published model, which has no scheduler's file here, one of equal arithmetic."""
    with suppress(EnvironmentNotReady):
        return family.objective()
    if family.denoiser_name == "unet":
        return Diffusion(torch.linspace(0.999, 0.005, 1000), "epsilon")
    return FlowMatching()


@contextmanager
def without_threads() -> Iterator[None]:
    """Do at once what `in_daemon` would, in each module that has the name."""
    with ExitStack() as stack:
        for module in (threads, ema, saving):
            stack.enter_context(mock.patch.object(module, "in_daemon", run_at_once))
        yield


def run_at_once(call: Callable[[], Any], name: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(call())
    return future


def state_of(session: Session, family: ModelFamily, engine: Engine) -> TrainingState:
    ema = EMA(engine, session.settings.ema) if session.settings.ema.use_ema else None
    return TrainingState(
        engine, ema, family.exported_config(), family.trained_facts(), "", Schedule(100), 0, SamplerState(0, 0, 1, {})
    )


def prepared_samples(session: Session, family: ModelFamily, largest: SampleShape) -> Any:
    """Return what batches are made of, with as many samples as a global batch has, of zeros."""
    shapes, target = dict(family.input_shapes(*largest)), largest.target
    latents = torch.zeros(shapes.pop(LATENTS))
    streams, image = ({name: torch.zeros(shapes.pop(name))} if name in shapes else {} for name in (SOUND, FIRST_FRAME))
    text = {
        name: (torch.ones if "mask" in name else torch.zeros)(shape, dtype=dtype_of(name))
        for name, shape in shapes.items()
    }
    dataset: Any = ImageDataset.model_construct(id="", caption_dropout_probability=0.0, is_regularisation_data=False)
    storage: Any = None
    geometry = Geometry(target, target, (0, 0), target)
    samples = [
        Sample(str(i), "", storage, "", "", geometry, ("",)) for i in range(session.settings.effective_batch_size)
    ]
    reader = SampleReader(
        samples,
        lambda index: dataset,
        lambda sample: latents,
        lambda sample: image,
        lambda sample, caption: text,
        lambda sample: text,
        streams=lambda sample: streams,
    )
    held_out = np.arange(min(HELD_OUT, len(samples)))
    buckets = {str(largest): Bucket({1: np.arange(len(samples))})}
    plan: Any = SimpleNamespace(samples=samples, datasets=[], sampler=None, held_out=held_out, buckets=buckets)
    prompts = [ValidationPrompt(prompt="")] if session.settings.validation.samples_images else []
    validation = [each.encoded(text, text) for each in sampled_prompts(session.settings, plan, prompts)]
    return SimpleNamespace(plan=plan, reader=reader, validation=validation)


def dtype_of(name: str) -> torch.dtype:
    return torch.long if "mask" in name else torch.float32


def first_batch(session: Session, prepared: Any) -> StepBatch:
    """Return this rank's micro-batches, in memory that is not pinned yet."""
    training = session.settings.training
    rank_slice = RankSlice(0, 1, training.gradient_accumulation_steps, 0, drops_captions=False)
    indices = range(training.train_batch_size)
    batch = GlobalBatch("", tuple(indices), (0,) * len(indices))
    micro_batches = [collate(prepared.reader, batch, indices, 0, rank_slice)] * rank_slice.accumulation
    return StepBatch(micro_batches, SamplerState(0, 1, 1, {}))
