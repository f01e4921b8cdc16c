"""DeepSpeed's JSON as a source of settings: what it says of a setting becomes that setting, once, in one place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from simpletuner.errors import SettingsError
from simpletuner.settings.deepspeed.optimizers import read_optimizer
from simpletuner.settings.deepspeed.reading import Found, read_keys
from simpletuner.settings.deepspeed.schedules import CONSTANT, read_scheduler
from simpletuner.settings.merging import Merged, checked
from simpletuner.settings.sources import RawValue, Source

NAME = "deepspeed_config"
SMALLEST_STAGE = 1
"""What `zero_optimization: true` means, an older form."""


def spread(merged: Merged) -> list[str]:
    """Turn what deepspeed_config says into settings, leave the rest in it, and return warnings.

    A setting that another source gives with another value is a mistake that names both.
    """
    try:
        config = checked(NAME, merged.values.get(NAME))
    except ValidationError:
        return []  # validation says so
    if config is None:
        return []
    found = read(config, merged)
    origin = merged.origins[NAME]
    for given in found.settings:
        same = given.name == "lr_scheduler" and given.value in CONSTANT and merged.value(given.name) in CONSTANT
        if not same:
            merged.agree(given, origin.source)
    share_batch(found, merged, origin.source)
    if merged.value("zero_stage") is None and not found.mistakes:
        found.mistakes.append(f"{NAME} ({origin}) names no ZeRO stage: set zero_stage, or leave it out")
    merged.values[NAME] = found.kept or None
    merged.mistakes += found.mistakes
    return found.warnings


def as_source(name: str, config: Mapping[str, Any]) -> Source:
    """Return what a DeepSpeed JSON says of settings as a source of its own. Raises SettingsError for its mistakes."""
    merged = Merged()
    merged.take(RawValue(NAME, dict(config), name), name)
    warnings = spread(merged)
    if merged.mistakes:
        raise SettingsError("\n  ".join(merged.mistakes), "correct these keys")
    return Source(name, [RawValue(knob, value, name) for knob, value in merged.values.items()], warnings)


def read(config: Mapping[str, Any], merged: Merged) -> Found:
    """Account for a whole JSON."""
    origin = merged.origins[NAME]
    found = Found(origin.place, origin.file)
    rest = dict(config)
    optimizer, scheduler = rest.pop("optimizer", None), rest.pop("scheduler", None)
    if rest.get("zero_optimization") is True:
        rest["zero_optimization"] = {"stage": SMALLEST_STAGE}
    read_keys(rest, found)
    read_optimizer(optimizer, str(merged.value("optimizer")), found)
    read_scheduler(scheduler, peak_of(found, merged), found)
    return found


def peak_of(found: Found, merged: Merged) -> float:
    """Return the learning rate as far as it is known."""
    said = next((given.value for given in found.settings if given.name == "learning_rate"), None)
    rate = merged.value("learning_rate") if said is None else said
    return rate if isinstance(rate, int | float) else 0.0


def share_batch(found: Found, merged: Merged, source: str) -> None:
    """Share DeepSpeed's train_batch_size, which is that of all ranks, out over ranks and accumulation."""
    total = found.kept.pop(MICRO, None)
    numbers = {name: merged.value(name) for name in FACTORS}
    if total is None or not all(isinstance(number, int) and number > 0 for number in numbers.values()):
        return
    both = {MICRO, STEPS} <= merged.origins.keys()
    missing = None if both else STEPS if MICRO in merged.origins else MICRO
    known = {name: number for name, number in numbers.items() if name == RANKS or name in merged.origins}
    product = math.prod(known.values())
    said = " x ".join(f"{name} {number}" for name, number in known.items())
    if total % product or (missing is None and total != product):
        wanted = f"{said} = {product}" if missing is None else f"a multiple of {said}"
        found.wrong(MICRO, total, f"DeepSpeed counts all ranks: it must be {wanted} [{places(merged, known)}]")
    elif missing is not None:
        reason = f"{total} samples over all ranks / ({said})"
        merged.agree(RawValue(missing, total // product, found.at(MICRO)), source, reason)


MICRO, STEPS, RANKS = FACTORS = ("train_batch_size", "gradient_accumulation_steps", "num_processes")
"""Our names; the first one is per rank, and DeepSpeed uses the same word for the product of all three."""


def places(merged: Merged, names: Iterable[str]) -> str:
    """Return where settings stand."""
    return ", ".join(f"{name}: {merged.origins.get(name, 'default')}" for name in names)
