"""DeepSpeed's options from settings: those set by our code, and a complete JSON."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.foreign.deepspeed_keys import AUTO, RULES, TABLE
from simpletuner.settings.foreign.deepspeed_optimizers import OPTIMIZERS, SETTINGS, optimizer_block
from simpletuner.settings.foreign.deepspeed_schedules import scheduler_block
from simpletuner.settings.foreign.key_table import Maps, export

Device = Literal["none", "cpu", "nvme"]

# File I/O options: DeepSpeed's own defaults, as benchmarked for an NVMe disk by its `ds_nvme_tune`.
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}

# DeepSpeed's default buffer for weights on their way to files; a larger tensor needs a larger one.
BUFFER_ELEMENTS = 100_000_000


@dataclass(frozen=True)
class DeepSpeedOptions:
    """DeepSpeed's options that our code asks for: its stage, the devices of the state, and the optimizer."""

    stage: Literal[1, 2, 3]
    offload_optimizer: Device
    offload_param: Device
    nvme_path: Path | None
    """Absolute; None unless something is offloaded to files."""
    optimizer: str
    """DeepSpeed's name."""
    bf16: bool

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)


def deepspeed_options(settings: Settings) -> DeepSpeedOptions | None:
    parallel = settings.parallel
    if parallel.zero_stage is None:
        return None
    uses_nvme = "nvme" in (parallel.offload_optimizer, parallel.offload_param)
    path = parallel.offload_param_path
    return DeepSpeedOptions(
        stage=parallel.zero_stage,
        offload_optimizer=parallel.offload_optimizer,
        offload_param=parallel.offload_param,
        nvme_path=path.absolute() if path and uses_nvme else None,
        optimizer=OPTIMIZERS[settings.optimizer.optimizer].name,
        bf16=settings.training.mixed_precision == "bf16",
    )


def deepspeed_config(settings: Settings, world_size: int, largest_tensor: int = 0) -> dict[str, Any]:
    """Return the JSON for `deepspeed.initialize`: nothing is `auto`, nothing is left to find out.

    `largest_tensor` is the number of elements of the model's largest weight; buffers must hold a rank's part
    of it. The scheduler is left out where DeepSpeed has none that does what ours does. The settings must have
    DeepSpeed on.
    """
    options = deepspeed_options(settings)
    assert options is not None
    training = settings.training
    accumulation_steps = training.gradient_accumulation_steps
    config: dict[str, Any] = {"train_batch_size": training.train_batch_size * accumulation_steps * world_size}
    config |= export(TABLE, settings)
    if options.offload_param == "nvme":
        # Stage 3 swaps a rank's part of a weight through one buffer, so the largest part must fit.
        buffer_size = max(BUFFER_ELEMENTS, -(-largest_tensor // world_size))
        config["zero_optimization"]["offload_param"]["buffer_size"] = buffer_size
    if options.bf16 and accumulation_steps > 1 and options.stage > 1:
        # As the other engines add up; DeepSpeed's default is bf16, which errs by 0.3 % over 8 passes. Stage 1
        # would keep all gradients in float32 on every rank, 4 bytes per parameter more.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.uses_nvme:
        config["aio"] = AIO
    rest: dict[str, Any] = dict(settings.parallel.deepspeed_config or {})
    config = merge(config, rest) | {"optimizer": optimizer_block(settings)}
    scheduler = scheduler_block(settings)
    return config | ({"scheduler": scheduler} if scheduler else {})


def extra_deepspeed_settings(settings: Settings) -> dict[str, object] | None:
    """Keys of deepspeed_config that no other setting produces."""
    bare = settings.model_copy(update={"parallel": settings.parallel.model_copy(update={"deepspeed_config": None})})
    return diff(settings.parallel.deepspeed_config or {}, deepspeed_config(bare, settings.launch.num_processes)) or None


def diff(kept: Mapping[str, object], ours: Mapping[str, object]) -> dict[str, object]:
    """Return `kept` without what `ours` says already, at any depth."""
    result = {}
    for name, value in kept.items():
        own = ours.get(name)
        rest = diff(value, own) if isinstance(value, Mapping) and isinstance(own, Mapping) else value
        if rest != own and rest != {}:
            result[name] = rest
    return result


def merge(ours: Mapping[str, object], kept: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of `ours` with `kept` put over it, at any depth."""
    result = copy.deepcopy(dict(ours))
    for name, value in kept.items():
        below = result.get(name)
        result[name] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


SCHEDULE_SETTINGS = {
    "warmup_min_lr": ("learning_rate", "lr_warmup_steps"),
    "warmup_max_lr": ("learning_rate",),
    "warmup_min_ratio": ("lr_warmup_steps",),
    "warmup_num_steps": ("lr_warmup_steps",),
    "total_num_steps": ("max_train_steps",),
    "cos_min_ratio": ("lr_end", "learning_rate"),
}
"""Parameters of schedules, and the settings that they are made of."""


def with_auto(config: Mapping[str, Any], chosen: Collection[str]) -> dict[str, object]:
    """Complete configuration with `auto` for each number of a setting that is not among the chosen ones."""
    result = {name: value if name in chosen_keys(chosen) else AUTO for name, value in numbers_of(config).items()}
    rest = {name: value for name, value in config.items() if name not in result}
    # A number in the file would contradict another one in the settings of a run; `auto` takes theirs.
    if "mixed_precision" not in chosen:
        rest["bf16"] = {**config["bf16"], "enabled": AUTO}
    rest["optimizer"] = {**config["optimizer"], "params": params_with_auto(config["optimizer"]["params"], chosen)}
    if "scheduler" in config:
        rest["scheduler"] = schedule_with_auto(config["scheduler"], chosen)
    return result | {name: value for name, value in rest.items() if value}


def numbers_of(config: Mapping[str, object]) -> dict[str, object]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {name: config[name] for name in names}


def chosen_keys(chosen: Collection[str]) -> set[str]:
    # train_batch_size depends on the number of ranks, so it is never one.
    return {name for name, rule in RULES.items() if isinstance(rule, Maps) and rule.setting in chosen}


def params_with_auto(params: Mapping[str, object], chosen: Collection[str]) -> dict[str, object]:
    settings = {name: {setting} for name, setting in SETTINGS.items()} | {"betas": {"adam_beta1", "adam_beta2"}}
    return {
        name: value if name not in settings or settings[name] & set(chosen) else AUTO for name, value in params.items()
    }


def schedule_with_auto(block: Mapping[str, Any], chosen: Collection[str]) -> dict[str, object]:
    """Return a schedule; an empty one where none was chosen."""
    if "lr_scheduler" not in chosen and "lr_warmup_steps" not in chosen:
        return {}
    params = {
        name: value if set(SCHEDULE_SETTINGS.get(name, ())) <= set(chosen) else AUTO
        for name, value in block["params"].items()
    }
    return {"type": block["type"], "params": params}
