"""DeepSpeed's learning rate schedules as ours, and back, as far as one can say the other.

What each does stands in runtime/lr_schedules.py (0.19). Ours is a function of the step alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from simpletuner.settings.declared.errors import did_you_mean
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.foreign.deepspeed_keys import AUTO, number
from simpletuner.settings.foreign.deepspeed_parsed import ParsedConfig
from simpletuner.settings.values.spelling import is_equal, normalize_name

# Two names of one schedule: lr_warmup_steps decides about the warm-up.
CONSTANT = ("constant", "constant_with_warmup")

PARAMS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}
SHARED_PARAMS = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
LR_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
REFUSED = {
    "OneCycle": "it also moves the momentum in cycles, which no lr_scheduler does; use WarmupCosineLR",
    "LRRangeTest": "it looks for a learning rate, it does not train; use WarmupLR",
}


def read_scheduler(block: object, learning_rate: float, parsed: ParsedConfig) -> None:
    if block is None or block == AUTO:
        return
    if not isinstance(block, Mapping) or not isinstance(block.get("params") or {}, Mapping):
        parsed.refuse("scheduler", block, "use a JSON object with type and params")
        return
    for key in block.keys() - {"type", "params"}:
        parsed.refuse_unknown(f"scheduler.{key}", ("type", "params"))
    if name := read_type(block.get("type", AUTO), parsed):
        params = block.get("params") or {}
        given = {key: value for key, value in params.items() if value not in (None, AUTO)}
        for key in given.keys() - {*PARAMS[name], *SHARED_PARAMS}:
            parsed.refuse_unknown(f"scheduler.params.{key}", (*PARAMS[name], *SHARED_PARAMS))
        parsed.set("lr_scheduler", LR_SCHEDULERS[name], "scheduler.type")
        read_warmup(name, given, parsed)
        read_end(name, given, learning_rate, parsed)
        note_defaults(name, params, learning_rate, parsed)


# DeepSpeed's defaults of `warmup_num_steps`, of `warmup_max_lr` in WarmupDecayLR, and of `cos_min_ratio`.
WARMUP_STEPS, DECAY_PEAK, COSINE_END = 1000, 1e-3, 1e-4


def note_defaults(name: str, params: Mapping[str, object], learning_rate: float, parsed: ParsedConfig) -> None:
    """Record DeepSpeed's defaults for parameters that the JSON does not name."""
    if "warmup_num_steps" not in params:
        parsed.leave_out("lr_warmup_steps", WARMUP_STEPS, "scheduler.params.warmup_num_steps", WARMUP_STEPS)
    if name == "WarmupCosineLR" and "cos_min_ratio" not in params:
        parsed.leave_out("lr_end", COSINE_END * learning_rate, "scheduler.params.cos_min_ratio", COSINE_END)
    if name == "WarmupDecayLR" and "warmup_max_lr" not in params and not is_equal(learning_rate, DECAY_PEAK):
        # Of the three it alone does not take the optimizer's (0.19.8: runtime/lr_schedules.py).
        parsed.warnings.append(
            f"scheduler.params.warmup_max_lr{parsed.where} is not given: DeepSpeed would rise to {DECAY_PEAK:g}, "
            f"here the peak is {learning_rate:g}"
        )


def read_type(given: object, parsed: ParsedConfig) -> str:
    """DeepSpeed's name of the schedule; empty for one that cannot be used."""
    if given in (None, AUTO):
        return ""
    names = {normalize_name(name): name for name in (*PARAMS, *REFUSED)}
    name = names.get(normalize_name(given), "")
    if not name:
        parsed.refuse(
            "scheduler.type", given, f"use one of {', '.join(PARAMS)}", did_you_mean(str(given), names.values())
        )
    elif name in REFUSED:
        parsed.refuse("scheduler.type", given, f"it cannot be used: {REFUSED[name]}")
        return ""
    return name


def read_warmup(name: str, given: Mapping[str, object], parsed: ParsedConfig) -> None:
    """Set the peak and the length of the warm-up."""
    lowest, highest = ("warmup_min_ratio", 1.0) if name == "WarmupCosineLR" else ("warmup_min_lr", None)
    highest = given.get("warmup_max_lr", highest)
    if "warmup_max_lr" in given:
        parsed.set("learning_rate", highest, "scheduler.params.warmup_max_lr")
    starts_at = given.get(lowest, 0)
    # A warm-up from the peak to the peak is none, whatever its length.
    if starts_at != 0 and starts_at == highest:
        parsed.set("lr_warmup_steps", 0, f"scheduler.params.{lowest}")
        return
    if starts_at != 0:
        parsed.warn_unused(f"scheduler.params.{lowest}", starts_at, "the warm-up rises from 0")
    if "warmup_num_steps" in given:
        parsed.set("lr_warmup_steps", given["warmup_num_steps"], "scheduler.params.warmup_num_steps")
        # DeepSpeed's own default rises with the logarithm of the step; ours has one shape.
        if (shape := given.get("warmup_type", "log")) != "linear":
            why = LINEAR if "warmup_type" in given else f"{LINEAR}; this is DeepSpeed's default"
            parsed.warn_unused("scheduler.params.warmup_type", shape, why)


LINEAR = "the warm-up rises linearly"


def read_end(name: str, given: Mapping[str, object], learning_rate: float, parsed: ParsedConfig) -> None:
    if "total_num_steps" in given:
        parsed.set("max_train_steps", given["total_num_steps"], "scheduler.params.total_num_steps")
    if name == "WarmupDecayLR":
        parsed.set("lr_end", 0.0, "scheduler.type")
    if "cos_min_ratio" in given and name == "WarmupCosineLR":
        path, ratio = "scheduler.params.cos_min_ratio", given["cos_min_ratio"]
        try:
            parsed.set("lr_end", number(0, 1)(ratio) * learning_rate, path)
        except ValueError as error:
            parsed.refuse(path, ratio, str(error))


def scheduler_block(settings: Settings) -> dict[str, object]:
    """Scheduler of DeepSpeed's JSON for our settings; empty where DeepSpeed has none that does the same."""
    own, total = settings.optimizer, settings.training.max_train_steps
    if 0 < own.lr_warmup_steps < 1:
        return {}  # DeepSpeed has no warm-up that is a fraction of the run
    rises = own.lr_warmup_steps > 0
    # No warm-up is written as one from the peak to the peak: DeepSpeed has no schedule without one.
    warmup = {"warmup_num_steps": max(1, int(own.lr_warmup_steps)), "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0 if rises else own.learning_rate, "warmup_max_lr": own.learning_rate}
    if own.lr_scheduler in CONSTANT:
        return {"type": "WarmupLR", "params": rates | warmup}
    if own.lr_scheduler == "linear" and total and own.lr_end == 0:
        return {"type": "WarmupDecayLR", "params": {"total_num_steps": total} | rates | warmup}
    end = own.lr_end / own.learning_rate
    # A ratio below 2e-308 has lost digits: what it gives back would contradict lr_end.
    if own.lr_scheduler == "cosine" and total and end <= 1 and is_equal(end * own.learning_rate, own.lr_end):
        ratios = {"warmup_min_ratio": 0.0 if rises else 1.0, "cos_min_ratio": end}
        return {"type": "WarmupCosineLR", "params": {"total_num_steps": total} | ratios | warmup}
    return {}
