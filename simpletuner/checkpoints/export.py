"""Write a complete diffusers pipeline with trained weights: the base pipeline with its denoiser exchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from simpletuner.checkpoints.saving import WEIGHTS_STEM, prepare, together
from simpletuner.checkpoints.tensors import NamedTensors, write_full
from simpletuner.files import replace_folder, unfinished, write_json
from simpletuner.models.family import Family
from simpletuner.models.weights import PICKLE_SUFFIXES
from simpletuner.parallel.world import World

FINISHED = "simpletuner.json"

LEFT_OUT = (*PICKLE_SUFFIXES, ".msgpack", ".onnx", ".onnx_data", ".xml")


def export_pipeline(
    family: Family, target: Path, config: dict[str, Any], weights: NamedTensors, world: World, steps: int
) -> None:
    """Write the pipeline to `target`. All ranks take part in the weights; the first copies the rest.

    `steps`, after which it was written, tells a later start that nothing is left to do.
    """
    hidden, denoiser = unfinished(target), family.denoiser_name
    together(world, hidden, lambda: prepare(hidden, world))
    together(world, hidden, write_full(hidden / denoiser, weights, world, WEIGHTS_STEM))
    if world.is_first:
        write_json(hidden / denoiser / "config.json", config)
        copy_other_components(family.folder, hidden, denoiser)
        write_json(hidden / "scheduler" / "scheduler_config.json", family.scheduler_config)
        write_json(hidden / FINISHED, {"steps": steps})
        replace_folder(hidden, target)


def copy_other_components(base: Path, target: Path, denoiser: str) -> None:
    """Copy model_index.json and every component folder that it names, but the denoiser and any pickle."""
    names = [
        path.name
        for path in base.iterdir()
        if path.is_dir() and path.name != denoiser and not path.name.startswith(".")
    ]
    for name in names:
        shutil.copytree(
            base / name, target / name, ignore=shutil.ignore_patterns(*(f"*{suffix}" for suffix in LEFT_OUT))
        )
    shutil.copyfile(base / "model_index.json", target / "model_index.json")


def finished_steps(pipeline: Path) -> int:
    """Return after how many steps the exported pipeline was written; 0 when there is none."""
    try:
        return int(json.loads((pipeline / FINISHED).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError):
        return 0
