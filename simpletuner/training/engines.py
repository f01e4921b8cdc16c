"""Choose the engine that the settings ask for, and give its denoiser memory and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.models.family import ModelFamily
from simpletuner.models.weights import weights_files
from simpletuner.parallel.blocks import recommended_blocks
from simpletuner.parallel.ddp import ddp_engine
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.fsdp2 import fsdp2_engine, units_of
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.parallelize import parallelize
from simpletuner.parallel.torch_engine import MakeOptimizer
from simpletuner.session import Session
from simpletuner.settings.deepspeed.config import deepspeed_options
from simpletuner.settings.sections import Settings
from simpletuner.training.optimizers import make_optimizer


def check_engine(session: Session, family: ModelFamily) -> None:
    """Raise for what would stop the engine, before anything is encoded: weights, sharding units, DeepSpeed."""
    settings = session.settings
    weights_files(family.folder / family.denoiser_name, settings.model.variant)
    if settings.parallel.fsdp_enable:
        model = family.meta_denoiser
        units_of(model, recommended_blocks(model), settings.parallel)
    if (options := deepspeed_options(settings)) is not None:
        from simpletuner.deepspeed.startup import start_deepspeed  # DeepSpeed is optional, and takes seconds to import

        start_deepspeed(options, session.world, session.report.say, session.stop.check)


def open_engine(session: Session, family: ModelFamily, checkpoint: Checkpoint | None) -> Engine:
    """Build the engine with the weights of the checkpoint, or else of the base model. Collective."""
    settings = session.settings
    folder = checkpoint.folder if checkpoint else family.folder / family.denoiser_name
    files = checkpoint.files("model") if checkpoint else weights_files(folder, settings.model.variant)

    def load_weights(tensors: NamedTensors) -> None:
        read_tensors(files, tensors, str(folder))

    model = family.denoiser()
    optimizer = partial(make_optimizer, settings=settings.optimizer)
    return build_engine(model, recommended_blocks(model), settings, session.mesh, load_weights, optimizer)


def build_engine(
    model: nn.Module,
    blocks: tuple[str, ...],
    settings: Settings,
    mesh: Mesh,
    load_weights: Callable[[dict[str, Tensor]], None],
    make_optimizer: MakeOptimizer,
) -> Engine:
    """Wrap a denoiser on the meta device; `load_weights` fills float32 tensors by name. Collective.

    Memory comes after sharding, so that no rank ever holds more than its share; weights come before the optimizer and
    DDP, which copy or broadcast them.
    """
    dtype, world = compute_dtype(settings), mesh.world
    parallelize(model, blocks, settings, mesh)
    if settings.parallel.zero_stage is not None:
        from simpletuner.deepspeed.engine import build_deepspeed_engine  # importing DeepSpeed takes seconds

        return build_deepspeed_engine(model, settings, mesh, dtype, load_weights, make_optimizer)
    allocate(model, world.device, torch.device("cpu") if settings.parallel.fsdp_offload_params else world.device)
    load_weights(model.state_dict())
    if settings.parallel.fsdp_enable:
        return fsdp2_engine(model, settings.parallel, mesh, make_optimizer)
    return ddp_engine(model, mesh, make_optimizer, dtype)


def allocate(model: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    """Give parameters (of this rank's shards only) uninitialized float32 memory; buffers keep their values."""
    # to_empty() also empties buffers; those that are not in the checkpoint, such as rotary tables, exist only here
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=parameters_on)
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = buffer.to(device)
