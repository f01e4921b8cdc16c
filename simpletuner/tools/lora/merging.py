"""`simpletuner lora merge`: write a pipeline whose weights have adapters merged into them, one weight in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.checkpoints.export import export_pipeline
from simpletuner.checkpoints.tensors import TensorGroup, streamed_group
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.tools.lora.base_model import (
    NamedModel,
    StoredTensors,
    denoiser_weights,
    encoder_weights,
    open_base,
)
from simpletuner.tools.lora.deltas import Delta, read_deltas
from simpletuner.tools.lora.results import ResultOrigin, check_result, writing_to

Deltas = Mapping[str, Sequence[tuple[float, Delta]]]
"""Deltas of each weight of a component by name, in order, each with its strength."""


@dataclass
class Rounding:
    """Squared sums of what adapters change, and of what the precision of the weights rounds off of it."""

    changed: float = 0.0
    lost: float = 0.0
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def share(self) -> float:
        return (self.lost / self.changed) ** 0.5 if self.changed else 0.0


def merge_loras(
    base: NamedModel, loras: Sequence[tuple[Path, float]], target: Path, replace: bool, report: Report
) -> Rounding:
    """Write the pipeline `base` with LoRAs merged, each at its strength, in its own precision, to `target`.

    Sums are made in float32 (float64 where the base is in that) and rounded once. Raises SettingsError for a
    LoRA that does not fit, naming its keys, EnvironmentNotReady for what is damaged or cannot be written.
    """
    check_result(target, replace, [path for path, _ in loras])
    rounding = Rounding()
    with libraries_silenced(), joined_world({}, use_cpu=True) as world:
        family = open_base(base, world)
        deltas = combined(loras, family)
        origin = ResultOrigin("merge", base.name, [(path, f"strength {strength:g}") for path, strength in loras])
        with writing_to(target, family, world):
            report.say(f"writing {target}")
            merge_group = partial(group_of, origin=origin, rounding=rounding)
            denoiser = merge_group(denoiser_weights(family), deltas.pop(family.denoiser_name, {}))
            encoders = {name: merge_group(encoder_weights(family, name), each) for name, each in deltas.items()}
            card = partial(origin.write_card, model=family.settings.model)
            export_pipeline(family, target, family.exported_config(), denoiser, world, 0, card, encoders)
    return rounding


def combined(loras: Sequence[tuple[Path, float]], family: ModelFamily) -> dict[str, Deltas]:
    """Return what all files add, by component. Raises SettingsError where that is nothing."""
    found: dict[str, dict[str, list[tuple[float, Delta]]]] = {}
    for path, strength in loras:
        for component, deltas in read_deltas(path, family).items():
            for name, delta in deltas.items():
                found.setdefault(component, {}).setdefault(name, []).append((strength, delta))
    if not found:
        raise SettingsError(f"{loras[0][0]} holds no tensors", "take another LoRA")
    return {**found}


def group_of(stored: StoredTensors, deltas: Deltas, origin: ResultOrigin, rounding: Rounding) -> TensorGroup:
    """Plan the files of a component's merged weights, each of which is made when it is written."""

    def make(name: str) -> Tensor:
        return merged(stored, name, deltas[name], rounding) if name in deltas else stored.read(name)

    return streamed_group(stored.shapes, make, origin.metadata())


@torch.no_grad()
def merged(stored: StoredTensors, name: str, deltas: Sequence[tuple[float, Delta]], rounding: Rounding) -> Tensor:
    """Return a weight with all that is added to it, rounded once to its dtype."""
    before, dtype = stored.read_finite(name), stored.shapes[name].dtype
    exact = before.clone()
    for strength, delta in deltas:
        exact.add_(delta(exact), alpha=strength)
    rounding.changed += squared(exact - before)
    del before  # of a model's largest weight each copy is hundreds of MiB
    rounded = exact.to(dtype)
    if rounded is not exact:
        rounding.lost += squared(exact.sub_(rounded))
    rounding.dtypes.add(dtype)
    return rounded


def squared(tensor: Tensor) -> float:
    return tensor.norm().item() ** 2
