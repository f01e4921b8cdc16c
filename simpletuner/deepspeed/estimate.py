"""What a DeepSpeed configuration keeps of a model, in bytes: on each GPU, in each machine's memory, and on its disk.

Rajbhandari et al. 2020 (arXiv:1910.02054, sections 3 and 5): with W bytes per weight, an optimizer of K float32 states,
P parameters and N ranks, a rank keeps W P of weights, W P of gradients and 4 (1 + K) P of optimizer state; stage 1
divides the last by N, stage 2 also the second, stage 3 also the first. To that comes what DeepSpeed 0.19 does:
gradients become float32 for the step, and buckets and gathered weights pass through buffers. Activations come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

FLOAT32_BYTES = 4
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "max_in_cpu": 1_000_000_000,
}
"""What DeepSpeed takes, in elements, where a configuration does not say it."""
OPTIMIZER_BUFFERS, PARAM_BUFFERS = 4, 5
"""DeepSpeed's numbers of buffers through which a rank's optimizer state and weights travel to files."""


@dataclass(frozen=True)
class Model:
    """What is shared out: parameters, ranks, machines, the optimizer's float32 states per weight; where an EMA lies."""

    parameters: int
    ranks: int
    machines: int = 1
    states: int = 2
    ema_device: Literal["", "cpu", "accelerator"] = ""
    """Empty without one."""

    @property
    def ranks_per_machine(self) -> int:
        """Return how many ranks share a machine's memory and disk."""
        return self.ranks // self.machines


@dataclass(frozen=True)
class Row:
    """Bytes of one kind that one rank keeps, by place, and how they are reckoned."""

    what: str
    gpu: float = 0
    host: float = 0
    disk: float = 0
    formula: str = ""


@dataclass(frozen=True)
class Estimate:
    """All that a configuration keeps."""

    model: Model
    rows: tuple[Row, ...]

    @property
    def gpu_bytes(self) -> int:
        """Return what each GPU holds, without activations."""
        return round(sum(row.gpu for row in self.rows))

    @property
    def host_bytes(self) -> int:
        """Return what the ranks of one machine hold in its memory."""
        return round(sum(row.host for row in self.rows) * self.model.ranks_per_machine)

    @property
    def disk_bytes(self) -> int:
        """Return what the ranks of one machine hold in files."""
        return round(sum(row.disk for row in self.rows) * self.model.ranks_per_machine)


def estimate(config: Mapping[str, Any], model: Model) -> Estimate:
    """Return what a complete configuration, as of `zero_config`, keeps of a model."""
    kinds = (weights, gradients, optimizer, average, buffers)
    return Estimate(model, tuple(kind(config, model) for kind in kinds))


def weights(config: Mapping[str, Any], model: Model) -> Row:
    """Return the weights that compute: whole on every rank below stage 3, there with a copy beside offloaded masters.

    Of what stage 3 offloads to files, `max_in_cpu` elements stay in memory as well.
    """
    block, width, share = config["zero_optimization"], width_of(config), model.parameters / model.ranks
    if block["stage"] < 3:
        copied = place_of(config, "offload_optimizer") != "none"
        formula = f"{width} P" + (f" + {width} P / N" if copied else "")
        return Row("weights", gpu=width * model.parameters, host=width * share * copied, formula=formula)
    place, formula = place_of(config, "offload_param"), f"{width} P / N"
    row = placed("weights", place, width * share, formula)
    most = block.get("offload_param", {}).get("max_in_cpu", DEFAULTS["max_in_cpu"])
    return replace(row, host=width * min(share, most)) if place == "nvme" else row


def gradients(config: Mapping[str, Any], model: Model) -> Row:
    """Return the gradients at their most, in the step: a rank's share as it came, flat, and in float32.

    Beside offloaded state lies only the last; stage 3 always keeps its share flat as well, stage 2 while it
    accumulates, and at stage 1 every rank has all gradients on its GPU until then.
    """
    stage, width, share = config["zero_optimization"]["stage"], width_of(config), model.parameters / model.ranks
    kept = accumulation_width(config)
    accumulates, place = config["gradient_accumulation_steps"] > 1, place_of(config, "offload_optimizer")
    whole = width * model.parameters if stage == 1 and accumulates else 0
    flat = kept if stage == 3 or (stage == 2 and accumulates) else 0
    if place == "none":
        bytes_each = FLOAT32_BYTES + (kept if stage == 3 else FLOAT32_BYTES)
        return Row("gradients", gpu=bytes_each * share + whole, formula=formula_of(width, whole, bytes_each))
    row = placed("gradients", place, FLOAT32_BYTES * share, formula_of(width, whole, flat + FLOAT32_BYTES))
    return replace(row, gpu=whole, host=row.host + flat * share)


def formula_of(width: int, whole: float, bytes_each: int) -> str:
    """Return how gradients are reckoned."""
    return f"{width} P + " * bool(whole) + f"{bytes_each} P / N"


def optimizer(config: Mapping[str, Any], model: Model) -> Row:
    """Return float32 masters and states."""
    width = FLOAT32_BYTES * (1 + model.states)
    share = width * model.parameters / model.ranks
    return placed("optimizer", place_of(config, "offload_optimizer"), share, f"{width} P / N")


def average(config: Mapping[str, Any], model: Model) -> Row:
    """Return the float32 EMA, shared out over the ranks."""
    if not model.ema_device:
        return Row("EMA", formula="off")
    place = "cpu" if model.ema_device == "cpu" else "none"
    return placed("EMA", place, FLOAT32_BYTES * model.parameters / model.ranks, "4 P / N")


def buffers(config: Mapping[str, Any], model: Model) -> Row:
    """Return what gradients, gathered weights and what travels to files pass through, at most."""
    block, width = {**DEFAULTS, **config["zero_optimization"]}, width_of(config)
    share = model.parameters / model.ranks
    buckets = 2 if block["stage"] < 3 and block.get("overlap_comm") else 1
    gpu = width * block["reduce_bucket_size"] * buckets
    gathered = min(model.parameters, block["stage3_max_live_parameters"]) if block["stage"] == 3 else 0
    host = 0.0
    if place_of(config, "offload_optimizer") == "nvme":
        count = block["offload_optimizer"].get("buffer_count", OPTIMIZER_BUFFERS)
        host += count * FLOAT32_BYTES * min(share, block["sub_group_size"])
    if place_of(config, "offload_param") == "nvme":
        count = block["offload_param"].get("buffer_count", PARAM_BUFFERS)
        host += count * width * block["offload_param"]["buffer_size"]
    return Row("buffers", gpu=gpu + width * gathered, host=host, formula="buckets" + ", gathered" * bool(gathered))


def placed(what: str, place: str, share: float, formula: str) -> Row:
    """Return a row for bytes that lie on the GPU, in memory or in files."""
    where = {"none": "gpu", "cpu": "host", "nvme": "disk"}[place]
    return Row(what, formula=formula, **{where: share})


def place_of(config: Mapping[str, Any], part: str) -> str:
    """Return where a part is offloaded to."""
    return config["zero_optimization"].get(part, {}).get("device", "none")


def width_of(config: Mapping[str, Any]) -> int:
    """Return the bytes of a weight that computes."""
    return 2 if config["bf16"]["enabled"] else FLOAT32_BYTES


def accumulation_width(config: Mapping[str, Any]) -> int:
    """Return the bytes of a gradient while several passes are added up."""
    return FLOAT32_BYTES if config.get("data_types", {}).get("grad_accum_dtype") == "fp32" else width_of(config)
