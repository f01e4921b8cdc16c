"""The fastest settings that fit, over engine, state layout, recomputation and micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.parallel.devices import MemoryBudget, MemoryEstimate
from simpletuner.preparation.class_images import ClassImages
from simpletuner.report import Report
from simpletuner.settings import Loaded, Settings
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
    "offload_activations": (False, True),
}
# From the fastest to the one that takes least memory.
RECOMPUTATION: tuple[dict[str, object], ...] = (
    {"gradient_checkpointing": False},
    *({"activation_memory_budget": share} for share in (1.0, 0.5)),
    {"gradient_checkpointing": True},
)
BATCH = ("train_batch_size", "gradient_accumulation_steps")
# Settings whose steps differ by no more than this share count as equally fast: the simpler one is taken.
SAME_SPEED = 0.01
# Settings that save memory, and never make a step faster.
SLOWER = ("optimizer_release_gradients", "offload_activations")
# The `state_layout` whose weights are rounded at each step: `split` keeps float32 ones.
ROUNDED = "bf16"
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
    class_images: Sequence[tuple[ClassImages, float | None]] = ()
    """Images that the base model makes first, and the seconds that this takes, where they are known."""


def candidates(loaded: Loaded) -> Iterator[dict[str, object]]:
    """Yield values of all free settings, the simplest first; the effective batch stays as it is."""
    free = {name: values for name, values in CHOICES.items() if name not in loaded.origins}
    if loaded.settings.model.model_type == "full":
        free.pop("base_model_precision", None)
    if loaded.settings.parallel.zero_stage is not None:
        free = {name: free[name] for name in ("offload_activations",) if name in free}
    training = loaded.settings.training
    is_open = training.gradient_checkpointing is None and training.activation_memory_budget is None
    recomputation = RECOMPUTATION if is_open else ({},)
    of_rank = batches(training.train_batch_size * training.gradient_accumulation_steps)
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        if chosen.get("fsdp_offload_params") and not chosen.get("fsdp_enable", True):
            continue
        for recomputed, batch in product(recomputation, of_rank):
            # What is offloaded leaves room for all: its budgets would only be counted in vain.
            if not (chosen.get("offload_activations") and "activation_memory_budget" in recomputed):
                yield chosen | recomputed | batch


def simpler(values: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the same settings with less of what saves memory and never makes a step faster."""
    found = [{**values, name: False} for name in SLOWER if values.get(name)]
    if (own := recomputation_of(values)) is not None:
        rest = {name: value for name, value in values.items() if name not in own}
        found += [rest | other for other in RECOMPUTATION[: RECOMPUTATION.index(own)]]
    size, count = (values[name] for name in BATCH)
    found += [{**values, **batch} for batch in batches(size * count) if batch[BATCH[0]] > size]
    return found


def batches(whole: int) -> list[dict[str, object]]:
    """Return the micro-batches of an effective batch of one rank, the largest first."""
    sizes = [size for size in range(min(whole, LARGEST_BATCH), 0, -1) if whole % size == 0]
    return [dict(zip(BATCH, (size, whole // size), strict=True)) for size in sizes]


def recomputation_of(values: Mapping[str, object]) -> dict[str, object] | None:
    return next((each for each in RECOMPUTATION if each.items() <= values.items()), None)


@dataclass
class Search:
    """Plans of combinations of settings, each counted where it is asked for."""

    with_settings: Callable[[Mapping[str, object]], Loaded]
    estimate: Callable[[Loaded], RunPlan]
    at_least: Callable[[Settings], MemoryEstimate]
    """Memory without activations and gradients, which costs nothing to count."""
    budget: MemoryBudget
    known: dict[tuple[object, ...], RunPlan | None] = field(default_factory=dict)

    def plan_of(self, values: Mapping[str, object]) -> RunPlan | None:
        """Return the plan of these settings; None where they conflict, as a layout and an optimizer do."""
        key = tuple(sorted(values.items()))
        if key not in self.known:
            try:
                self.known[key] = self.estimate(self.with_settings(values))
            except SettingsError:
                self.known[key] = None
        return self.known[key]

    def least_of(self, values: Mapping[str, object]) -> MemoryEstimate | None:
        """Return the memory that these settings take at least; None where they contradict each other."""
        try:
            return self.at_least(self.with_settings(values).settings)
        except SettingsError:
            return None

    def lack_of(self, values: Mapping[str, object]) -> str:
        """Return what is missing whatever a step takes; empty where a step may fit."""
        least = self.least_of(values)
        return self.budget.shortfall(least.gpu_bytes, least.host_bytes) if least is not None else ""

    def fitting_plan(self, values: Mapping[str, object]) -> RunPlan | None:
        if self.lack_of(values) or (plan := self.plan_of(values)) is None or plan.shortfall(self.budget):
            return None
        return plan

    def fitting(
        self, all_values: Sequence[dict[str, object]], report: Report
    ) -> list[tuple[dict[str, object], RunPlan]]:
        """Return the combinations that fit, without those that only save memory beside a simpler one."""
        found: list[tuple[dict[str, Any], RunPlan]] = []
        as_fast: list[dict[str, object]] = []  # what fits, and what is no faster than one of these
        with report.progress("combinations", len(all_values)) as progress:
            for done, values in enumerate(all_values, start=1):
                if any(each in as_fast for each in simpler(values)):
                    as_fast.append(values)
                elif (plan := self.fitting_plan(values)) is not None:
                    found.append((values, plan))
                    as_fast.append(values)
                progress.update(done)
        return found

    def smallest(self, all_values: Sequence[dict[str, object]]) -> RunPlan:
        """Return the plan with the least memory of all that are possible."""
        floors = [(least.gpu_bytes, values) for values in all_values if (least := self.least_of(values)) is not None]
        smallest: RunPlan | None = None
        for floor, values in sorted(floors, key=lambda each: each[0]):
            if smallest is not None and floor >= smallest.peak_bytes:
                break
            plan = self.plan_of(values)
            if plan is not None and (smallest is None or plan.peak_bytes < smallest.peak_bytes):
                smallest = plan
        assert smallest is not None
        return smallest


def propose(loaded: Loaded, search: Search, report: Report) -> tuple[RunPlan, dict[str, object], dict[str, str]]:
    """Return the fastest candidate that fits, the settings that it changes, and the reasons.

    Raises SettingsError where none fits, naming the one that needs least.
    """
    all_values = list(candidates(loaded))
    fitting = search.fitting(all_values, report)
    if not fitting:
        raise SettingsError(
            f"nothing fits: the least needs {search.smallest(all_values).shortfall(search.budget)}",
            "use more GPUs (--num_processes), larger ones, or a smaller train_batch_size or resolution",
        )
    values, plan = best_of(fitting)
    reasons = {name: reason(name, values, plan, search) for name in values if name not in BATCH}
    return plan, changed(loaded, values), reasons | batch_reason(values, plan, all_values, search)


def best_of(fitting: Sequence[tuple[dict[str, object], RunPlan]]) -> tuple[dict[str, object], RunPlan]:
    """Fastest candidate; of those that are equally fast the first, which is the simplest.

    Coarser weights, `state_layout=bf16` or a quantized base, are taken if finer ones do not fit or are slow.
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


def reason(name: str, values: Mapping[str, Any], plan: RunPlan, search: Search) -> str:
    """Return the effect of the simplest other value of one setting, all others being as chosen."""
    if (own := recomputation_of(values)) is not None and name in own:
        rest = {each: value for each, value in values.items() if each not in own}
        other = RECOMPUTATION[0] if own != RECOMPUTATION[0] else RECOMPUTATION[-1]
        said = str(other["gradient_checkpointing"]).lower()
        named = said if name in other else f"gradient_checkpointing = {said}"
        return compared(named, rest | other, plan, search)
    other, *_ = (each for each in CHOICES[name] if each != values[name])
    alternative = {**values, name: other}
    if name == "fsdp_enable" and not other:
        alternative["fsdp_offload_params"] = False
    return compared(str(other).lower(), alternative, plan, search)


def batch_reason(
    values: Mapping[str, Any], plan: RunPlan, all_values: Sequence[dict[str, Any]], search: Search
) -> dict[str, str]:
    """Return the reason for which the micro-batch is not larger, or not smaller."""
    batch = {name: values[name] for name in BATCH}
    alike = {each[BATCH[0]]: each for each in all_values if {**each, **batch} == dict(values)}
    larger, smaller = ([size for size in alike if way * size > way * values[BATCH[0]]] for way in (1, -1))
    if not (larger or smaller):
        return {}
    size = min(larger) if larger else max(smaller)
    return {BATCH[0]: compared(str(size), alike[size], plan, search)}


def compared(value: str, alternative: Mapping[str, object], plan: RunPlan, search: Search) -> str:
    """Describe an alternative to a plan; one that is too large without activations is not traced."""
    if lack := search.lack_of(alternative):
        return f"{value} would need {lack}, without activations"
    if (other := search.plan_of(alternative)) is None:
        return f"{value} is not possible here"
    if missing := other.shortfall(search.budget):
        return f"{value} would need {missing}"
    if abs(seconds_of(other) / seconds_of(plan) - 1) <= SAME_SPEED:
        return f"{value} would take as long"
    return f"{value} would take {seconds_of(other):.2f} s per step, not {seconds_of(plan):.2f}"


def changed(loaded: Loaded, values: Mapping[str, object]) -> dict[str, Any]:
    """Return those values that the settings do not have yet."""
    current = settings_as_json(loaded)
    return {name: value for name, value in values.items() if current[name] != value}
