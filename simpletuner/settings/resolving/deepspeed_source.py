"""DeepSpeed's JSON as a source of settings: each number in it that a setting can hold becomes that setting.

So a number has one place only, and two places that differ are one mistake that names both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from simpletuner.errors import BrokenRule, SettingsError
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.foreign.deepspeed_keys import TABLE
from simpletuner.settings.foreign.deepspeed_optimizers import read_optimizer
from simpletuner.settings.foreign.deepspeed_parsed import ParsedConfig
from simpletuner.settings.foreign.deepspeed_schedules import CONSTANT, read_scheduler
from simpletuner.settings.resolving.sources import MergedValues, validate_value, warn_of_defaults

NAME = "deepspeed_config"
# DeepSpeed's default of `gradient_clipping`, and accelerate's for it.
CLIPPING = 1.0
# Meaning of `zero_optimization: true`, an older form.
DEFAULT_STAGE = 1
# Our names; the first one is per rank, and DeepSpeed uses the same word for the product of all three.
MICRO, STEPS, RANKS = FACTORS = ("train_batch_size", "gradient_accumulation_steps", "num_processes")


def apply_deepspeed_config(merged: MergedValues) -> list[str]:
    """Turn what deepspeed_config says into settings, leave the rest in it, and return warnings.

    A setting that another source gives with another value is a mistake that names both.
    """
    try:
        config = validate_value(NAME, merged.values[NAME])
    except ValidationError:
        return []  # validation says so
    if config is None:
        return []
    parsed = parse(config, merged)
    origin = merged.origins[NAME]
    for setting in parsed.settings:
        # Two names of one schedule do not contradict each other.
        same = setting.name == "lr_scheduler" and setting.value in CONSTANT and merged.value(setting.name) in CONSTANT
        if not same:
            merged.require_equal(setting, origin.source)
    split_batch(parsed, merged, origin.source)
    if merged.value("zero_stage") is None and not parsed.mistakes:
        message = f"{NAME} ({origin}) names no ZeRO stage: set zero_stage, or leave it out"
        merged.mistakes.append(BrokenRule("zero_stage", message, others=(NAME,)))
    merged.values[NAME] = parsed.kept or None
    merged.mistakes += parsed.mistakes
    return [*parsed.warnings, *warn_of_defaults(parsed.file or origin.place, parsed.left_out, merged)]


def as_source(name: str, config: Mapping[str, object]) -> Source:
    """Settings in a DeepSpeed JSON, as a source. Raises SettingsError for its mistakes."""
    merged = MergedValues()
    merged.set(RawValue(NAME, dict(config), name), name)
    warnings = apply_deepspeed_config(merged)
    if merged.mistakes:
        raise SettingsError(mistakes=merged.mistakes, hint="correct these keys")
    return Source(name, [RawValue(setting, value, name) for setting, value in merged.values.items()], warnings)


def parse(config: Mapping[str, Any], merged: MergedValues) -> ParsedConfig:
    """Read a whole JSON."""
    origin = merged.origins[NAME]
    parsed = ParsedConfig(origin.place, origin.file)
    rest = dict(config)
    optimizer, scheduler = rest.pop("optimizer", None), rest.pop("scheduler", None)
    if rest.get("zero_optimization") is True:
        rest["zero_optimization"] = {"stage": DEFAULT_STAGE}
    parsed.read(rest, TABLE)
    # Of a file alone: who writes {"zero_optimization": {"stage": 2}} among our settings has the others there.
    if parsed.file and "gradient_clipping" not in rest:
        parsed.leave_out("max_grad_norm", CLIPPING, "gradient_clipping", CLIPPING)
    drop_offload_param(parsed, merged)
    read_optimizer(optimizer, str(merged.value("optimizer")), parsed)
    read_scheduler(scheduler, peak_learning_rate(parsed, merged), parsed)
    return parsed


def drop_offload_param(parsed: ParsedConfig, merged: MergedValues) -> None:
    """Warn of offloaded weights below stage 3, which DeepSpeed ignores; samples of the original have them."""
    stage = next((given.value for given in parsed.settings if given.name == "zero_stage"), merged.value("zero_stage"))
    unused = [given for given in parsed.settings if given.name == "offload_param" and given.value != "none"]
    if stage in (1, 2) and unused:
        parsed.settings = [given for given in parsed.settings if given not in unused]
        parsed.kept.get("zero_optimization", {}).pop("offload_param", None)
        reason = f"at stage {stage} every rank keeps all weights at hand"
        parsed.warn_unused("zero_optimization.offload_param", unused[0].value, reason)


def peak_learning_rate(parsed: ParsedConfig, merged: MergedValues) -> float:
    """The learning rate as far as it is known: a cosine's end is a share of it."""
    given = next((given.value for given in parsed.settings if given.name == "learning_rate"), None)
    rate = merged.value("learning_rate") if given is None else given
    return rate if isinstance(rate, int | float) else 0.0


def split_batch(parsed: ParsedConfig, merged: MergedValues, source: str) -> None:
    """Set the missing factor of DeepSpeed's train_batch_size, which counts the samples of all ranks."""
    # Popped: our setting of this name is per rank, and deepspeed_config() computes the total again.
    total = parsed.kept.pop(MICRO, None)
    numbers = {name: merged.value(name) for name in FACTORS}
    if total is None or not all(isinstance(number, int) and number > 0 for number in numbers.values()):
        return
    both = {MICRO, STEPS} <= merged.origins.keys()
    missing = None if both else STEPS if MICRO in merged.origins else MICRO
    known = {name: number for name, number in numbers.items() if name == RANKS or name in merged.origins}
    product = math.prod(known.values())
    factors = " x ".join(f"{name} {number}" for name, number in known.items())
    if total % product or (missing is None and total != product):
        wanted = f"{factors} = {product}" if missing is None else f"a multiple of {factors}"
        message = f"DeepSpeed counts all ranks: it must be {wanted} [{places(merged, known)}]"
        parsed.refuse(MICRO, total, message)
    elif missing is not None:
        reason = f"{total} samples over all ranks / ({factors})"
        merged.require_equal(RawValue(missing, total // product, parsed.place_of(MICRO)), source, reason)


def places(merged: MergedValues, names: Iterable[str]) -> str:
    return ", ".join(f"{name}: {merged.origins.get(name, 'default')}" for name in names)
