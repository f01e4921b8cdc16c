"""What DeepSpeed estimates, or allocates on each rank, in bytes (per parameter)."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from simpletuner.deepspeed.engine import OWN_CONFIG
from simpletuner.parallel.world import joined_world

WIDTH, LAYERS, STEPS = 512, 16, 2


def estimators(parameters: int, ranks: int, report: str) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    third = estimate_zero3_model_states_mem_needs(parameters, 0, ranks, 1, cpu_offload=False, cpu_offload_params=False)
    found = {
        "stage2": estimate_zero2_model_states_mem_needs(parameters, ranks, 1, cpu_offload=False)[1],
        "stage2 cpu": estimate_zero2_model_states_mem_needs(parameters, ranks, 1, cpu_offload=True)[1],
        "stage3": third[1],
    }
    Path(report).write_text(json.dumps(found))


def living() -> int:
    """Return the bytes of all living tensors, each storage once."""
    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in (torch.Tensor, Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def allocated(config: dict[str, Any], report: str) -> None:
    """Take two steps, and report what the first rank holds then."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    with joined_world() as world:
        logger.setLevel(logging.ERROR)
        deepspeed.ops.__dict__["__compatible_ops__"] = {}  # else it compiles an operator that we never use
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        deepspeed.init_distributed("gloo", verbose=False)
        optimizer = torch.optim.AdamW(model.parameters())
        config = {key: value for key, value in config.items() if key not in ("scheduler", "optimizer")} | OWN_CONFIG
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        del model, optimizer
        for _ in range(STEPS):
            loss = engine(torch.randn(1, WIDTH, dtype=next(engine.parameters()).dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        del loss
        if world.is_first:
            Path(report).write_text(json.dumps(living() / (WIDTH * WIDTH * LAYERS)))
