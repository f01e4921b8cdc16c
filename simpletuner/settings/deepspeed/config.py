"""From settings to what DeepSpeed is given: a few answers, and one complete JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simpletuner.settings.deepspeed.optimizers import KINDS, optimizer_block, states_of
from simpletuner.settings.deepspeed.schedules import scheduler_block
from simpletuner.settings.sections import Settings

Place = Literal["none", "cpu", "nvme"]

AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
"""How files are read and written: DeepSpeed's own defaults, as benchmarked for an NVMe disk by its `ds_nvme_tune`."""

BUFFER_ELEMENTS = 100_000_000
"""DeepSpeed's default for a buffer through which weights travel to files; a larger tensor needs a larger one."""


@dataclass(frozen=True)
class DeepSpeedOptions:
    """What is asked of DeepSpeed most: its stage, where state lies, and the optimizer."""

    stage: Literal[1, 2, 3]
    offload_optimizer: Place
    offload_param: Place
    nvme_path: Path | None
    """Absolute; None unless something is offloaded to files."""
    optimizer: str
    """DeepSpeed's name."""
    states: tuple[str, ...]
    """The float32 states that the optimizer keeps of each weight, beside its float32 master."""
    bf16: bool

    @property
    def uses_nvme(self) -> bool:
        """Return whether something is offloaded to files."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


def deepspeed_options(settings: Settings) -> DeepSpeedOptions | None:
    """Return what is asked of DeepSpeed; None where it is off."""
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
        optimizer=KINDS[settings.optimizer.optimizer].name,
        states=states_of(settings),
        bf16=settings.training.mixed_precision == "bf16",
    )


def deepspeed_config(settings: Settings, world_size: int, largest_tensor: int = 0) -> dict[str, Any]:
    """Return the JSON for `deepspeed.initialize`: nothing is `auto`, nothing is left to find out.

    `largest_tensor` is the number of elements of the model's largest weight; buffers must hold a rank's part of it.
    The scheduler is left out where DeepSpeed has none that does what ours does. The settings must have DeepSpeed on.
    """
    zero = deepspeed_options(settings)
    assert zero is not None
    training = settings.training
    config: dict[str, Any] = {
        "train_batch_size": training.train_batch_size * training.gradient_accumulation_steps * world_size,
        "train_micro_batch_size_per_gpu": training.train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_clipping": settings.optimizer.max_grad_norm,
        "bf16": {"enabled": zero.bf16},
        "zero_optimization": zero_block(settings, -(-largest_tensor // world_size)),
    }
    if zero.bf16 and training.gradient_accumulation_steps > 1 and zero.stage > 1:
        # As the other engines add up; DeepSpeed's default is bf16, which errs by 0.3 % over 8 passes. Stage 1 would
        # keep all gradients in float32 on every rank, 4 bytes per parameter more.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    config |= {"aio": AIO} if zero.uses_nvme else {}
    rest: dict[str, Any] = dict(settings.parallel.deepspeed_config or {})
    config = merged(config, rest) | {"optimizer": optimizer_block(settings)}
    scheduler = scheduler_block(settings)
    return config | ({"scheduler": scheduler} if scheduler else {})


def zero_block(settings: Settings, largest_part: int) -> dict[str, Any]:
    """Return `zero_optimization`, as far as settings say it."""
    parallel = settings.parallel
    block: dict[str, Any] = {"stage": parallel.zero_stage}
    for name, place in (("offload_optimizer", parallel.offload_optimizer), ("offload_param", parallel.offload_param)):
        if place != "none":
            path = {"nvme_path": str(parallel.offload_param_path)} if place == "nvme" else {}
            block[name] = {"device": place, **path}
    if parallel.offload_param == "nvme":
        block["offload_param"]["buffer_size"] = max(BUFFER_ELEMENTS, largest_part)
    return block


def extra_deepspeed_settings(settings: Settings) -> dict[str, Any] | None:
    """Return what deepspeed_config says beyond what `zero_config` makes of the other settings anyway."""
    bare = settings.model_copy(update={"parallel": settings.parallel.model_copy(update={"deepspeed_config": None})})
    return diff(settings.parallel.deepspeed_config or {}, deepspeed_config(bare, settings.launch.num_processes)) or None


def diff(kept: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object without what another one says already, at any depth."""
    result = {}
    for name, value in kept.items():
        said = ours.get(name)
        left = diff(value, said) if isinstance(value, Mapping) and isinstance(said, Mapping) else value
        if left != said and left != {}:
            result[name] = left
    return result


def merged(ours: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with what is kept from another one put over it, at any depth."""
    result = copy.deepcopy(dict(ours))
    for name, value in kept.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
