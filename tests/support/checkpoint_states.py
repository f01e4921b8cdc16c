"""Checkpoints without a run: what `state.json` holds, and whole ones of two files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpletuner.checkpoints.saving import write_state
from simpletuner.data.sampler.batch_sampler import DATA_VERSION
from simpletuner.system.files.checksums import file_checksum


def state_of(step: int, moments: tuple[str, ...] = ("exp_avg",)) -> dict[str, Any]:
    return {
        "step": step,
        "position": {"epoch": 0, "batch": step, "batch_size": 4, "consumed": {"64x64": 0}},
        "data": "d",
        "data_version": DATA_VERSION,
        "optimizer": {"steps": step, "moments": [*moments]},
        "ema_updates": None,
        "max_steps": 1000,
        "schedule": {"epochs": None, "start_step": 0, "start_progress": 0.0, "planned_steps": 0},
    }


def save_checkpoint(output: Path, step: int, size: int = 1000) -> Path:
    """Write a checkpoint as a run does, with files of so many bytes."""
    folder = output / "checkpoints" / f"checkpoint-{step:06d}"
    hidden = folder.with_name(f".{folder.name}.unfinished")
    names = ("model/w.safetensors", "exp_avg/w.safetensors")
    for number, name in enumerate(names):
        (hidden / name).parent.mkdir(parents=True)
        (hidden / name).write_bytes(bytes([step, number]) * (size // 2))
    write_state(hidden, state_of(step), {name: file_checksum(hidden / name) for name in names})
    hidden.rename(folder)
    return folder
