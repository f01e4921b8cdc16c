"""What `state.json` of a checkpoint holds, but for the sizes and checksums of its files."""

from __future__ import annotations

from typing import Any

from simpletuner.data.sampler.batch_sampler import DATA_VERSION


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
