"""What FSDP2 makes of the settings of sharding, read from a model of two blocks on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compiling import small_engine
from engines import ENGINES
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from simpletuner.parallel.world import World, joined_world
from simpletuner.settings.declared.sections import Parallel


def facts_by_engine(names: list[str], folder: str) -> None:
    """Write for each engine how a weight of 16 x 16 is sharded, and what it has as gradient after each micro-batch."""
    with joined_world() as world:
        facts = {name: facts_of(world, Parallel(**ENGINES[name])) for name in names}
        Path(folder, f"rank{world.rank}.json").write_text(json.dumps(facts))


def facts_of(world: World, parallel: Parallel) -> dict[str, Any]:
    engine = small_engine(world, parallel)
    weight = engine.module.get_parameter("blocks.0.inner.weight")
    assert isinstance(weight, DTensor)
    gradients = []
    for is_last in (False, True):
        with engine.micro_batch(is_last):
            engine.backward(engine.model(torch.ones(4, 16)).square().mean())
        gradients.append(list(weight.grad.to_local().shape) if isinstance(weight.grad, DTensor) else None)
    # In what units reduce gradients, and where they keep weights: torch keeps that in private fields.
    states = [module._get_fsdp_state() for module in engine.module.modules() if isinstance(module, FSDPModule)]
    return {
        "mesh": list(weight.device_mesh.mesh_dim_names or ()),
        "shard": list(weight.to_local().shape),
        "offload": sorted(
            {type(group.offload_policy).__name__ for state in states for group in state._fsdp_param_groups}
        ),
        "reduced in": sorted({str(state._mp_policy.reduce_dtype) for state in states}),
        "gradients": gradients,
    }
