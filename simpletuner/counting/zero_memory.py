"""Estimate the bytes that a DeepSpeed configuration needs, and choose the lowest ZeRO stage that fits.

Rajbhandari et al. 2020 (arXiv:1910.02054, sections 3 and 5): with W bytes per weight, an optimizer of K
float32 states, P parameters and N ranks, a rank keeps W P of weights, W P of gradients and 4 (1 + K) P of
optimizer state; stage 1 divides the last by N, stage 2 also the second, stage 3 also the first. DeepSpeed
0.19 needs more than that: gradients become float32 for the step, and buckets and gathered weights pass
through buffers. Activations are not included.

tests/zero/deepspeed/test_estimate.py compares these numbers with what DeepSpeed allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.parallel.devices import FLOAT32_BYTES, MemoryBudget, MemoryEstimate, MemoryInputs, MemoryRow, place_row
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings import Settings
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config
from simpletuner.system.numbers import format_gib

# DeepSpeed's defaults, in elements (0.19.8: runtime/zero/config.py and offload_config.py).
DEFAULT_ELEMENTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "max_in_cpu": 1_000_000_000,
}

OPTIMIZER_BUFFER_COUNT, PARAM_BUFFER_COUNT = 4, 5
"""DeepSpeed's default numbers of buffers for swapping optimizer state and weights to files."""


def estimate_for_settings(settings: Settings, num_parameters: int) -> MemoryEstimate:
    config = deepspeed_config(settings, settings.launch.num_processes)
    return estimate_memory(config, MemoryInputs.of(settings, TrainedWeights.of_count(num_parameters)))


def estimate_memory(config: Mapping[str, object], inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate what a complete DeepSpeed JSON, as `deepspeed_config` makes it, keeps."""
    kinds = (estimate_weights, estimate_gradients, estimate_optimizer, estimate_ema, estimate_buffers)
    return MemoryEstimate(inputs, tuple(kind(config, inputs) for kind in kinds))


def estimate_weights(config: Mapping[str, Any], inputs: MemoryInputs) -> MemoryRow:
    """Estimate the compute-dtype weights: whole on every rank at stages 1 and 2, partitioned at stage 3."""
    block, width, share = config["zero_optimization"], weight_bytes(config), inputs.parameters_per_rank
    if block["stage"] < 3:
        # DeepSpeed keeps a compute-dtype copy of this rank's partition next to offloaded master weights.
        is_copied = place_of(config, "offload_optimizer") != "none"
        formula = f"{width} P" + (f" + {width} P / N" if is_copied else "")
        return MemoryRow("weights", gpu=width * inputs.num_parameters, host=width * share * is_copied, formula=formula)
    place, formula = place_of(config, "offload_param"), f"{width} P / N"
    row = place_row("weights", place, width * share, formula)
    # Of what is offloaded to files, up to `max_in_cpu` elements stay in memory as well.
    max_in_cpu = block.get("offload_param", {}).get("max_in_cpu", DEFAULT_ELEMENTS["max_in_cpu"])
    return replace(row, host=width * min(share, max_in_cpu)) if place == "nvme" else row


def estimate_gradients(config: Mapping[str, Any], inputs: MemoryInputs) -> MemoryRow:
    """Estimate gradients at their peak, in the optimizer step.

    A rank keeps its share as it was reduced, flattened, and in float32. If the optimizer is offloaded, the
    float32 copy is where it is; next to it stage 3 always keeps the flat share, stage 2 while it accumulates.
    At stage 1 every rank has all gradients on its GPU while it accumulates.
    """
    stage, width, share = config["zero_optimization"]["stage"], weight_bytes(config), inputs.parameters_per_rank
    accumulation_width = accumulation_bytes(config)
    accumulates, place = config["gradient_accumulation_steps"] > 1, place_of(config, "offload_optimizer")
    whole = width * inputs.num_parameters if stage == 1 and accumulates else 0
    flat_width = accumulation_width if stage == 3 or (stage == 2 and accumulates) else 0
    whole_formula = f"{width} P + " if whole else ""
    if place == "none":
        total_width = FLOAT32_BYTES + (accumulation_width if stage == 3 else FLOAT32_BYTES)
        return MemoryRow("gradients", gpu=total_width * share + whole, formula=f"{whole_formula}{total_width} P / N")
    formula = f"{whole_formula}{flat_width + FLOAT32_BYTES} P / N"
    row = place_row("gradients", place, FLOAT32_BYTES * share, formula)
    return replace(row, gpu=whole, host=row.host + flat_width * share)


def estimate_optimizer(config: Mapping[str, object], inputs: MemoryInputs) -> MemoryRow:
    """Estimate float32 master weights and optimizer states."""
    width = FLOAT32_BYTES * (1 + inputs.num_states)
    place = place_of(config, "offload_optimizer")
    return place_row("optimizer", place, width * inputs.parameters_per_rank, f"{width:.3g} P / N")


def estimate_ema(config: Mapping[str, object], inputs: MemoryInputs) -> MemoryRow:
    """Estimate the float32 EMA, which every engine partitions over the ranks."""
    if not inputs.ema_device:
        return MemoryRow("EMA", formula="off")
    place = "cpu" if inputs.ema_device == "cpu" else "none"
    return place_row("EMA", place, FLOAT32_BYTES * inputs.parameters_per_rank, "4 P / N")


def estimate_buffers(config: Mapping[str, Any], inputs: MemoryInputs) -> MemoryRow:
    """Estimate the largest buffers for reducing gradients, gathering weights and swapping to files."""
    block, width = {**DEFAULT_ELEMENTS, **config["zero_optimization"]}, weight_bytes(config)
    # overlap_comm fills one bucket while the other one is reduced.
    num_buckets = 2 if block["stage"] < 3 and block.get("overlap_comm") else 1
    gpu = width * block["reduce_bucket_size"] * num_buckets
    gathered = min(inputs.num_parameters, block["stage3_max_live_parameters"]) if block["stage"] == 3 else 0
    host = 0.0
    if place_of(config, "offload_optimizer") == "nvme":
        count = block["offload_optimizer"].get("buffer_count", OPTIMIZER_BUFFER_COUNT)
        host += count * FLOAT32_BYTES * min(inputs.parameters_per_rank, block["sub_group_size"])
    if place_of(config, "offload_param") == "nvme":
        count = block["offload_param"].get("buffer_count", PARAM_BUFFER_COUNT)
        host += count * width * block["offload_param"]["buffer_size"]
    formula = "buckets, gathered" if gathered else "buckets"
    return MemoryRow("buffers", gpu=gpu + width * gathered, host=host, formula=formula)


def place_of(config: Mapping[str, object], block: str) -> str:
    return config["zero_optimization"].get(block, {}).get("device", "none")


def weight_bytes(config: Mapping[str, Any]) -> int:
    return 2 if config["bf16"]["enabled"] else FLOAT32_BYTES


def accumulation_bytes(config: Mapping[str, object]) -> int:
    """Bytes of a gradient while micro-batches are accumulated."""
    grad_accum_dtype = config.get("data_types", {}).get("grad_accum_dtype")
    return FLOAT32_BYTES if grad_accum_dtype == "fp32" else weight_bytes(config)


OFFLOAD_PLACES = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))
"""Places of optimizer state and weights, from no offloading to everything."""

# The share of a GPU that a choice must leave for activations and for CUDA itself.
FREE_SHARE = 0.1


@dataclass(frozen=True)
class StageChoice:
    """The ZeRO stage and offloading that were chosen, as settings, and why."""

    settings: dict[str, Any]
    reason: str


def stage_candidates(with_files: bool, fixed: Mapping[str, object] | None = None) -> Iterator[dict[str, object]]:
    """Yield combinations of stage and offloading: lowest stage first, then least offloading.

    `fixed` are settings already chosen. Below stage 3 DeepSpeed offloads no weights, and nothing to files.
    """
    for stage in (1, 2, 3):
        for optimizer, weights in OFFLOAD_PLACES:
            candidate = {"zero_stage": stage, "offload_optimizer": optimizer, "offload_param": weights}
            is_possible = stage == 3 or (optimizer != "nvme" and weights == "none")
            keeps_fixed = candidate == {**candidate, **(fixed or {})}
            if is_possible and keeps_fixed and (with_files or "nvme" not in candidate.values()):
                yield candidate


def choose_stage(
    budget: MemoryBudget,
    candidates: Iterable[dict[str, object]],
    estimate_of: Callable[[dict[str, object]], MemoryEstimate],
) -> StageChoice:
    """Return the first candidate that fits. Raises SettingsError if none does.

    It knows a number of parameters alone. `plan --auto` (tools/plan/search.py) compares seconds, for which it
    needs a GPU of the table and a trace of the model, so neither can answer for the other.
    """
    assert budget.gpu_bytes is not None
    too_large: list[str] = []
    for settings in candidates:
        estimate = estimate_of(settings)
        shortfall = budget.shortfall(estimate.gpu_bytes, estimate.host_bytes)
        if not shortfall:
            gpu, left = format_gib(budget.gpu_bytes), format_gib(budget.gpu_bytes - estimate.gpu_bytes)
            fits = f"{describe_stage(settings)} fits {gpu} per GPU, {left} are left for activations"
            return StageChoice(settings, "; ".join([fits, *too_large]))
        too_large.append(f"{describe_stage(settings)} would need {shortfall}")
    raise SettingsError(
        f"nothing fits {format_gib(budget.gpu_bytes)} per GPU: {'; '.join(too_large)}",
        "use more GPUs (--num_processes), or name a disk with --offload_param_path",
    )


def describe_stage(settings: Mapping[str, object]) -> str:
    """Describe stage and offloading, such as `stage 2 with optimizer state on cpu`."""
    places = {"optimizer state": settings["offload_optimizer"], "weights": settings["offload_param"]}
    offloaded = [f"{what} on {place}" for what, place in places.items() if place != "none"]
    return f"stage {settings['zero_stage']}{' with ' if offloaded else ''}{' and '.join(offloaded)}"
