"""Print what DeepSpeed estimates, or allocates on two ranks, in bytes (per parameter), as JSON on the last line."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import socket
import sys
from typing import Any

WIDTH, LAYERS, STEPS = 512, 16, 2


def estimators(parameters: int, ranks: int) -> dict[str, int]:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    third = estimate_zero3_model_states_mem_needs(parameters, 0, ranks, 1, cpu_offload=False, cpu_offload_params=False)
    return {
        "stage2": estimate_zero2_model_states_mem_needs(parameters, ranks, 1, cpu_offload=False)[1],
        "stage2 cpu": estimate_zero2_model_states_mem_needs(parameters, ranks, 1, cpu_offload=True)[1],
        "stage3": third[1],
    }


def living() -> int:
    """Return the bytes of all living tensors, each storage once."""
    import torch

    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in (torch.Tensor, Parameter())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def Parameter() -> Any:  # noqa: N802
    from torch.nn import Parameter

    return Parameter


def rank(number: int, port: int, config: dict[str, Any], answer: Any) -> None:
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
    import deepspeed
    import deepspeed.ops
    import torch
    from deepspeed.utils import logger

    from simpletuner.deepspeed.engine import OWN_CONFIG

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
    if number == 0:
        answer.put(living() / (WIDTH * WIDTH * LAYERS))


def allocated(config: dict[str, Any]) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    ranks = [context.Process(target=rank, args=(number, port, config, answer)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return answer.get(timeout=10)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    what, *rest = sys.argv[1:]
    print("\n" + json.dumps(estimators(*map(int, rest)) if what == "estimators" else allocated(json.loads(rest[0]))))
