"""What DeepSpeed is told, from our settings. No deepspeed import."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.sections import Settings


def config_of(settings: Settings, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's complete JSON: `deepspeed_config`, with our numbers where it has its own."""
    training = settings.training
    config: dict[str, Any] = copy.deepcopy(settings.parallel.deepspeed_config or {})
    for ours in ("optimizer", "scheduler", "fp16"):
        config.pop(ours, None)
    return config | {
        "train_micro_batch_size_per_gpu": training.train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "train_batch_size": training.train_batch_size * training.gradient_accumulation_steps * ranks,
        "gradient_clipping": settings.optimizer.max_grad_norm,
        "bf16": {"enabled": training.mixed_precision == "bf16"},
    }


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO."""
    return int(config["zero_optimization"]["stage"])


def offload_of(config: Mapping[str, Any], what: str) -> str:
    """Return where the `optimizer` or `param` is offloaded to: none, cpu or nvme."""
    return (config["zero_optimization"].get(f"offload_{what}") or {}).get("device", "none")


def uses_disk(config: Mapping[str, Any]) -> bool:
    """Return whether anything is offloaded to a disk."""
    return "nvme" in (offload_of(config, "optimizer"), offload_of(config, "param"))


def swap_parent(settings: Settings, config: Mapping[str, Any]) -> Path | None:
    """Return the folder below which processes make theirs for what goes to a disk; None if nothing does."""
    if not uses_disk(config):
        return None
    parts = [config["zero_optimization"].get(f"offload_{what}") or {} for what in ("param", "optimizer")]
    named = settings.parallel.offload_param_path or next(
        (part["nvme_path"] for part in parts if part.get("nvme_path")), None
    )
    if named is None:
        raise SettingsError("offloading to a disk needs a folder on it", "set --offload_param_path=FOLDER")
    return Path(named).expanduser()


def with_swap_folder(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config that offloads to this process's own folder whatever goes to a disk."""
    changed = copy.deepcopy(dict(config))
    for what in ("optimizer", "param"):
        if offload_of(changed, what) == "nvme":
            changed["zero_optimization"][f"offload_{what}"]["nvme_path"] = str(folder)
    return changed


def described(config: Mapping[str, Any]) -> str:
    """Return in a few words how the model is sharded, and what lies elsewhere."""
    places = {"cpu": "the CPU", "nvme": "disk"}
    names = {"optimizer": "optimizer", "param": "weights"}
    away = [
        f"{names[what]} on {places[offload_of(config, what)]}" for what in names if offload_of(config, what) in places
    ]
    return ", ".join([f"ZeRO-{stage_of(config)}", *away])
