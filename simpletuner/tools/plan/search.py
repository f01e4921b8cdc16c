"""The fastest settings that fit, over engine, state layout, recomputation and micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.parallel.devices import MemoryBudget
from simpletuner.report import Report
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import LARGEST_BATCH
from simpletuner.settings.resolving.loading import settings_as_json
from simpletuner.settings.values.shape import Shape
from simpletuner.tools.plan.estimate import RunPlan

CHOICES: dict[str, tuple[object, ...]] = {
    "base_model_precision": ("no_change", "int8", "nf4"),  # float8 has as many bytes as int8, and three times its error
    "fsdp_enable": (False, True),
    "fsdp_offload_params": (False, True),
    "state_layout": ("fp32", "split", "bf16"),
    "optimizer_release_gradients": (False, True),
    "gradient_checkpointing": (False, True),
    "offload_activations": (False, True),
}
BATCH = ("train_batch_size", "gradient_accumulation_steps")
# Settings whose steps differ by no more than this share count as equally fast: the simpler one is taken.
SAME_SPEED = 0.01
ROUNDED = "bf16"
"""The `state_layout` whose weights are rounded at each step: `split` keeps float32 ones."""
# Share of a step's seconds that coarser weights must not exceed where finer ones fit, too.
ROUNDED_SHARE = 0.5


@dataclass(frozen=True)
class Proposal:
    """A configuration; of the fastest that fits also the settings to change, each with a reason."""

    plan: RunPlan
    shape: Shape
    """The largest of the samples, in px."""
    settings: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    problem: SimpleTunerError | None = None
    """Why a run on the images would end before its first step."""


def candidates(loaded: Loaded) -> Iterator[dict[str, Any]]:
    """Yield values of all free settings, the simplest first; the effective batch stays as it is."""
    free = {name: values for name, values in CHOICES.items() if name not in loaded.origins}
    if loaded.settings.training.gradient_checkpointing is None:
        free["gradient_checkpointing"] = CHOICES["gradient_checkpointing"]
    if loaded.settings.model.model_type == "full":
        free.pop("base_model_precision", None)
    if loaded.settings.parallel.zero_stage is not None:
        free = {name: free[name] for name in ("gradient_checkpointing", "offload_activations") if name in free}
    training = loaded.settings.training
    whole = training.train_batch_size * training.gradient_accumulation_steps
    sizes = [size for size in range(min(whole, LARGEST_BATCH), 0, -1) if whole % size == 0]
    batches = [dict(zip(BATCH, (size, whole // size), strict=True)) for size in sizes]
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        if chosen.get("fsdp_offload_params") and not chosen.get("fsdp_enable", True):
            continue
        for batch in batches:
            yield chosen | batch


def propose(
    loaded: Loaded, with_settings: Callable[[Mapping[str, object]], Loaded], estimate: Callable[[Loaded], RunPlan],
    budget: MemoryBudget, report: Report,
) -> tuple[RunPlan, dict[str, Any], dict[str, str]]:  # fmt: skip
    """Return the fastest candidate that fits, the settings that it changes, and the reasons.

    Raises SettingsError where none fits, naming the one that needs least.
    """
    # Kept, since `reason` asks again for the neighbours of the one that is chosen.
    known: dict[tuple[object, ...], RunPlan | None] = {}

    def plan_of(values: Mapping[str, object]) -> RunPlan | None:
        key = tuple(sorted(values.items()))
        if key not in known:
            try:
                known[key] = estimate(with_settings(values))
            except SettingsError:  # settings that contradict each other, such as a layout and an optimizer
                known[key] = None
        return known[key]

    plans = []
    with report.progress("combinations", len(all_values := list(candidates(loaded)))) as progress:
        for done, values in enumerate(all_values, start=1):
            if (plan := plan_of(values)) is not None:
                plans.append((values, plan))
            progress.update(done)
    fitting = [(values, plan) for values, plan in plans if not plan.shortfall(budget)]
    if not fitting:
        least = min((plan for _, plan in plans), key=lambda plan: plan.peak_bytes)
        raise SettingsError(
            f"nothing fits: the least needs {least.shortfall(budget)}",
            "use more GPUs (--num_processes), larger ones, or a smaller train_batch_size or resolution",
        )
    values, plan = best_of(fitting)
    reasons = {name: reason(name, values, plan, plan_of, budget) for name in values if name not in BATCH}
    return plan, changed(loaded, values), reasons | batch_reason(values, plan, plans, budget)


def best_of(fitting: Sequence[tuple[dict[str, Any], RunPlan]]) -> tuple[dict[str, Any], RunPlan]:
    """Fastest candidate; of those that are equally fast the first, which is the simplest.

    Coarser weights, `state_layout=bf16` or a quantized base, are taken where nothing finer fits or is half as fast.
    """
    chosen, limit = fitting, math.inf
    for coarseness in sorted({coarseness_of(plan) for _, plan in fitting}):
        alike = [each for each in fitting if coarseness_of(each[1]) == coarseness]
        if (fastest := min(seconds_of(plan) for _, plan in alike)) <= limit:
            chosen, limit = alike, ROUNDED_SHARE * fastest
    fastest = min(seconds_of(plan) for _, plan in chosen)
    return next(each for each in chosen if seconds_of(each[1]) <= (1 + SAME_SPEED) * fastest)


def coarseness_of(plan: RunPlan) -> int:
    """Return a number that is larger the coarser a run's weights are; 0 where they are as a plain run's."""
    is_rounded = plan.settings.optimizer.state_layout == ROUNDED
    base, known = plan.settings.lora.base_model_precision, CHOICES["base_model_precision"]
    return is_rounded + (known.index(base) if base in known else 0)


def seconds_of(plan: RunPlan) -> float:
    assert plan.step_seconds is not None
    return plan.step_seconds


def reason(
    name: str, values: Mapping[str, object], plan: RunPlan, plan_of: Callable[[Mapping[str, object]], RunPlan | None],
    budget: MemoryBudget,
) -> str:  # fmt: skip
    """Return the effect of the simplest other value of one setting, all others being as chosen."""
    other, *_ = (each for each in CHOICES[name] if each != values[name])
    alternative = {**values, name: other}
    if name == "fsdp_enable" and not other:
        alternative["fsdp_offload_params"] = False
    return compared(str(other).lower(), plan_of(alternative), plan, budget)


def batch_reason(
    values: Mapping[str, object], plan: RunPlan, plans: list[tuple[dict[str, Any], RunPlan]], budget: MemoryBudget
) -> dict[str, str]:
    """Return the reason for which the micro-batch is not larger, or not smaller."""
    alike = [
        (each[BATCH[0]], other)
        for each, other in plans
        if {**each, **{name: values[name] for name in BATCH}} == dict(values)
    ]
    larger = [(size, other) for size, other in alike if size > values[BATCH[0]]]
    smaller = [(size, other) for size, other in alike if size < values[BATCH[0]]]
    if not (larger or smaller):
        return {}
    size, other = min(larger) if larger else max(smaller)
    return {BATCH[0]: compared(str(size), other, plan, budget)}


def compared(value: str, other: RunPlan | None, plan: RunPlan, budget: MemoryBudget) -> str:
    if other is None:
        return f"{value} is not possible here"
    if missing := other.shortfall(budget):
        return f"{value} would need {missing}"
    if abs(seconds_of(other) / seconds_of(plan) - 1) <= SAME_SPEED:
        return f"{value} would take as long"
    return f"{value} would take {seconds_of(other):.2f} s per step, not {seconds_of(plan):.2f}"


def changed(loaded: Loaded, values: Mapping[str, object]) -> dict[str, Any]:
    """Return those values that the settings do not have yet."""
    current = settings_as_json(loaded)
    return {name: value for name, value in values.items() if current[name] != value}
