"""DeepSpeed's JSON for a file that people keep: what nobody chose stays `auto`, for settings to fill in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from simpletuner.settings.deepspeed.keys import KEYS
from simpletuner.settings.deepspeed.optimizers import KNOBS
from simpletuner.settings.deepspeed.reading import AUTO

BETAS = ("adam_beta1", "adam_beta2")
RATES = {
    "warmup_min_lr": ("learning_rate", "lr_warmup_steps"),
    "warmup_max_lr": ("learning_rate",),
    "warmup_min_ratio": ("lr_warmup_steps",),
    "warmup_num_steps": ("lr_warmup_steps",),
    "total_num_steps": ("max_train_steps",),
    "cos_min_ratio": ("lr_end", "learning_rate"),
}
"""Parameters of schedules, and the settings that they are made of."""


def with_auto(config: Mapping[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """Return a complete configuration with `auto` for each number of a setting that is not among the chosen ones."""
    result = {name: value if name in chosen_keys(chosen) else AUTO for name, value in numbers_of(config).items()}
    rest = {name: value for name, value in config.items() if name not in result}
    if "mixed_precision" not in chosen:
        rest["bf16"] = {**config["bf16"], "enabled": AUTO}
    rest["optimizer"] = {**config["optimizer"], "params": loose_params(config["optimizer"]["params"], chosen)}
    if "scheduler" in config:
        rest["scheduler"] = loose_schedule(config["scheduler"], chosen)
    return result | {name: value for name, value in rest.items() if value}


def numbers_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers at the top: those of the batch, of accumulation and of clipping."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {name: config[name] for name in names}


def chosen_keys(chosen: Collection[str]) -> set[str]:
    """Return DeepSpeed's keys whose settings were chosen; the batch of all ranks hangs on how many there are."""
    return {name for name, key in KEYS.items() if key.knob in chosen}


def loose_params(params: Mapping[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """Return an optimizer's parameters."""
    knobs = {name: (knob,) for name, knob in KNOBS.items()} | {"betas": BETAS}
    return {
        name: value if name not in knobs or set(knobs[name]) & set(chosen) else AUTO for name, value in params.items()
    }


def loose_schedule(block: Mapping[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """Return a schedule; none where nobody chose one."""
    if "lr_scheduler" not in chosen and "lr_warmup_steps" not in chosen:
        return {}
    params = {
        name: value if set(RATES.get(name, ())) <= set(chosen) else AUTO for name, value in block["params"].items()
    }
    return {"type": block["type"], "params": params}
