"""Print what the installed DeepSpeed knows, as JSON on stdout; run in its own process: importing it takes seconds.

`facts` prints the keys that it knows; `accept` reads a JSON list of [config, ranks] and prints the error for each.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

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
        "schedules": VALID_LR_SCHEDULES,
    }


def accepted(wanted: dict[str, Any], ranks: int) -> str:
    """Return DeepSpeed's error for a configuration; empty if it accepts it."""
    from types import SimpleNamespace

    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank, comm.get_world_size = lambda: 0, lambda *_: ranks  # no ranks are started for this
    try:
        config = DeepSpeedConfig(wanted, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: ranks))
    except Exception as error:  # noqa: BLE001 - whatever DeepSpeed raises is its answer
        return f"{type(error).__name__}: {error}"
    micro = wanted["train_micro_batch_size_per_gpu"]
    return "" if config.train_batch_size == micro * wanted["gradient_accumulation_steps"] * ranks else "other batch"


if __name__ == "__main__":
    answer: Any = facts() if sys.argv[1] == "facts" else [accepted(*case) for case in json.load(sys.stdin)]
    print("\n" + json.dumps(answer))
