"""DeepSpeed's learning rate schedules as ours, and back, as far as one can say the other.

What each does stands in deepspeed/runtime/lr_schedules.py (0.19). Ours is a function of the step alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner.settings.deepspeed.kinds import number
from simpletuner.settings.deepspeed.reading import AUTO, Found
from simpletuner.settings.mistakes import nearest
from simpletuner.settings.sections import Settings
from simpletuner.settings.spelling import normalize_name

CONSTANT = ("constant", "constant_with_warmup")
"""Two words for the same: `lr_warmup_steps` decides about the warm-up."""

PARAMS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}
OF_ALL = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
OURS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
REFUSED = {
    "OneCycle": "it also moves the momentum in cycles, which no lr_scheduler does; use WarmupCosineLR",
    "LRRangeTest": "it looks for a learning rate, it does not train; use WarmupLR",
}


def read_scheduler(block: Any, learning_rate: float, found: Found) -> None:
    """Account for the scheduler of DeepSpeed's JSON, for a peak learning rate."""
    if block is None or block == AUTO:
        return
    if not isinstance(block, Mapping) or not isinstance(block.get("params") or {}, Mapping):
        found.wrong("scheduler", block, "use a JSON object with type and params")
        return
    for key in block.keys() - {"type", "params"}:
        found.unknown(f"scheduler.{key}", ("type", "params"))
    if name := read_type(block.get("type", AUTO), found):
        given = {key: value for key, value in (block.get("params") or {}).items() if value not in (None, AUTO)}
        for key in given.keys() - {*PARAMS[name], *OF_ALL}:
            found.unknown(f"scheduler.params.{key}", (*PARAMS[name], *OF_ALL))
        found.say("lr_scheduler", OURS[name], "scheduler.type")
        read_warm_up(name, given, found)
        read_end(name, given, learning_rate, found)


def read_type(given: Any, found: Found) -> str:
    """Return DeepSpeed's name of the schedule; empty for one that is not used."""
    if given in (None, AUTO):
        return ""
    names = {normalize_name(name): name for name in (*PARAMS, *REFUSED)}
    name = names.get(normalize_name(given), "")
    if not name:
        found.wrong("scheduler.type", given, f"use one of {', '.join(PARAMS)}{nearest(str(given), names.values())}")
    elif name in REFUSED:
        found.wrong("scheduler.type", given, f"it cannot be used: {REFUSED[name]}")
        return ""
    return name


def read_warm_up(name: str, given: Mapping[str, Any], found: Found) -> None:
    """Note the peak and the length of the warm-up."""
    lowest, highest = ("warmup_min_ratio", 1.0) if name == "WarmupCosineLR" else ("warmup_min_lr", None)
    highest = given.get("warmup_max_lr", highest)
    if "warmup_max_lr" in given:
        found.say("learning_rate", highest, "scheduler.params.warmup_max_lr")
    starts_at = given.get(lowest, 0)
    if starts_at != 0 and starts_at == highest:
        found.say("lr_warmup_steps", 0, f"scheduler.params.{lowest}")
        return
    if starts_at != 0:
        found.leave_out(f"scheduler.params.{lowest}", starts_at, "the warm-up rises from 0")
    if "warmup_num_steps" in given:
        found.say("lr_warmup_steps", given["warmup_num_steps"], "scheduler.params.warmup_num_steps")
        if (shape := given.get("warmup_type", "log")) != "linear":
            told = "" if "warmup_type" in given else " (DeepSpeed's default)"
            found.warnings.append(f"{found.name('scheduler.params.warmup_type')} = {shape}{told} is not used: {LINEAR}")


LINEAR = "the warm-up rises linearly"


def read_end(name: str, given: Mapping[str, Any], learning_rate: float, found: Found) -> None:
    """Note where and when the learning rate ends."""
    if "total_num_steps" in given:
        found.say("max_train_steps", given["total_num_steps"], "scheduler.params.total_num_steps")
    if name == "WarmupDecayLR":
        found.say("lr_end", 0.0, "scheduler.type")
    if "cos_min_ratio" in given and name == "WarmupCosineLR":
        path, ratio = "scheduler.params.cos_min_ratio", given["cos_min_ratio"]
        try:
            found.say("lr_end", number(0, 1).read(ratio) * learning_rate, path)
        except ValueError:
            found.wrong(path, ratio, f"use {number(0, 1).name}")


def scheduler_block(settings: Settings) -> dict[str, Any]:
    """Return the scheduler of DeepSpeed's JSON for our settings; empty where DeepSpeed has none that does the same."""
    own, total = settings.optimizer, settings.training.max_train_steps
    rises = own.lr_warmup_steps > 0
    warm_up = {"warmup_num_steps": max(1, own.lr_warmup_steps), "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0 if rises else own.learning_rate, "warmup_max_lr": own.learning_rate}
    if own.lr_scheduler in CONSTANT:
        return {"type": "WarmupLR", "params": rates | warm_up}
    if own.lr_scheduler == "linear" and total and own.lr_end == 0:
        return {"type": "WarmupDecayLR", "params": {"total_num_steps": total} | rates | warm_up}
    if own.lr_scheduler == "cosine" and total and own.lr_end <= own.learning_rate:
        ratios = {"warmup_min_ratio": 0.0 if rises else 1.0, "cos_min_ratio": own.lr_end / own.learning_rate}
        return {"type": "WarmupCosineLR", "params": {"total_num_steps": total} | ratios | warm_up}
    return {}
