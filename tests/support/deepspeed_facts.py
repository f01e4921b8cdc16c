"""Answer questions about the installed DeepSpeed, each a line of JSON on stdin; a process of its own, since importing
DeepSpeed takes seconds, and what it prints stands between the answers.

["facts"] asks for the keys that it knows; ["accept", LIST] for the error of each [config, ranks]; ["run", LIST] for
[rate, weight decay, clipping] of each of ten steps of a tiny model by each config, or for the error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_LOG_LEVEL"] = "error"


class RecordingDict(dict):
    """A JSON object that records which names are looked up."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.names: set[str] = set()

    def __copy__(self) -> RecordingDict:
        return self

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self


def models() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def facts() -> dict[str, Any]:
    """Return every key by section, defaults of what we fill in, and names of optimizers and schedules."""
    from deepspeed.profiling.constants import FLOPS_PROFILER
    from deepspeed.runtime import config
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    top, profiler = RecordingDict(train_batch_size=1), RecordingDict(enabled=False)
    top[FLOPS_PROFILER] = profiler
    config.DeepSpeedConfig(top)
    keys = {
        section: sorted({name for key, field in model.model_fields.items() for name in (key, field.alias) if name})
        for section, model in models().items()
    }
    keys |= {"": sorted(top.names), "flops_profiler": sorted(profiler.names), "aio": sorted(AIO_DEFAULT_DICT)}
    removed = [config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS]
    return {
        "keys": keys,
        "removed": [sorted(names) for names in removed],
        "aio": AIO_DEFAULT_DICT,
        "buffer_size": models()["zero_optimization.offload_param"]().buffer_size,
        "optimizers": config.DEEPSPEED_OPTIMIZERS,
        "defaults": defaults(),
        "schedules": VALID_LR_SCHEDULES,
    }


def defaults() -> dict[str, dict[str, Any]]:
    """Return what optimizers take where no parameter is given."""
    import inspect

    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lion import FusedLion
    from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam

    classes = {"adamw": FusedAdam, "adam": FusedAdam, "lion": FusedLion, "adagrad": torch.optim.Adagrad}
    found = {
        name: {key: each.default for key, each in inspect.signature(kind).parameters.items()}
        for name, kind in classes.items()
    }
    groups = [{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": each} for each in (True, False)]
    matrices, rest = MuonWithAuxAdam(groups).param_groups
    found["muon"] = {"lr": matrices["lr"], "weight_decay": matrices["weight_decay"]}
    found["muon"] |= {"betas": rest["betas"], "eps": rest["eps"]}
    known = ("lr", "betas", "eps", "weight_decay")
    return {name: {key: values[key] for key in known if key in values} for name, values in found.items()}


def taken(config: dict[str, Any]) -> list[tuple[float, float, float]] | str:
    """Train a layer by a configuration as DeepSpeed's own programs do."""
    import deepspeed
    import torch

    # It would be compiled for a minute: ranks of one machine talk by it, and here is one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    layer = torch.nn.Linear(4, 4)
    try:
        engine, optimizer, *_ = deepspeed.initialize(model=layer, model_parameters=layer.parameters(), config=config)
    except ValueError as error:
        return str(error)
    rows = []
    for _ in range(10):
        group = optimizer.param_groups[0]
        rows.append((group["lr"], group["weight_decay"], engine.gradient_clipping()))
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    return rows


def accepted(wanted: dict[str, Any], ranks: int) -> str:
    """Return DeepSpeed's error for a configuration; empty if it accepts it."""
    from types import SimpleNamespace

    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: ranks)
    with patch.multiple(comm, get_rank=lambda: 0, get_world_size=lambda *_: ranks):  # no ranks are started for this
        try:
            config = DeepSpeedConfig(wanted, mpu=mpu)
        except Exception as error:  # noqa: BLE001 - whatever DeepSpeed raises is its answer
            return f"{type(error).__name__}: {error}"
    micro = wanted["train_micro_batch_size_per_gpu"]
    return "" if config.train_batch_size == micro * wanted["gradient_accumulation_steps"] * ranks else "other batch"


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    answers: dict[str, Any] = {
        "facts": facts,
        "accept": lambda cases: [accepted(*case) for case in cases],
        "run": lambda configs: [taken(config) for config in configs],
    }
    for line in sys.stdin:
        what, *question = json.loads(line)
        print("\nanswer " + json.dumps(answers[what](*question)), flush=True)
