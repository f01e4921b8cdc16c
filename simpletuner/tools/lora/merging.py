"""`simpletuner lora merge`: write a pipeline with adapters merged into its weights, one in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.checkpoints.export import export_pipeline
from simpletuner.checkpoints.precision import exported_dtypes, rounded
from simpletuner.checkpoints.tensors import TensorGroup, streamed_group
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.opening.stored_weights import StoredTensors, denoiser_weights, encoder_weights
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.settings.declared.sections import ExportPrecision
from simpletuner.tools.lora.base_model import NamedModel, open_base
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
    converted: float = 0.0
    lost_in_conversion: float = 0.0
    """Squared sums of the weights that get another precision, and of what that rounds off."""

    @property
    def share(self) -> float:
        return (self.lost / self.changed) ** 0.5 if self.changed else 0.0

    @property
    def share_of_converted(self) -> float:
        return (self.lost_in_conversion / self.converted) ** 0.5 if self.converted else 0.0


def merge_loras(
    base: NamedModel,
    loras: Sequence[tuple[Path, float]],
    target: Path,
    replace: bool,
    report: Report,
    precision: ExportPrecision | None = None,
) -> Rounding:
    """Write the pipeline `base` with LoRAs merged, each at its strength, to `target`.

    The denoiser is written in a `precision`, else in its own. Sums are made in float32 (float64 where the
    base is in that) and rounded once. Raises SettingsError for a LoRA that does not fit, naming its keys,
    EnvironmentNotReady for what is damaged or cannot be written.
    """
    check_result(target, replace, [path for path, _ in loras])
    rounding = Rounding()
    with libraries_silenced(), joined_world({}, use_cpu=True) as world:
        family = open_base(base, world, precision=precision)
        deltas = combined(loras, family)
        weights = denoiser_weights(family)
        dtypes = exported_dtypes(family, {name: each.dtype for name, each in weights.shapes.items()})
        origin = ResultOrigin("merge", base.name, [(path, f"strength {strength:g}") for path, strength in loras])
        with writing_to(target, family, world, replace):
            report.say(f"writing {target}")
            merge_group = partial(group_of, origin=origin, rounding=rounding)
            denoiser = merge_group(weights, deltas.pop(family.denoiser_name, {}), dtypes)
            encoders = {name: merge_group(encoder_weights(family, name), each, {}) for name, each in deltas.items()}
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
    if loras and not found:
        raise SettingsError(f"{loras[0][0]} holds no tensors", "take another LoRA")
    return {**found}


def group_of(
    stored: StoredTensors,
    deltas: Deltas,
    dtypes: Mapping[str, torch.dtype],
    origin: ResultOrigin,
    rounding: Rounding,
) -> TensorGroup:
    """Plan the files of a component's merged weights, each of which is made when it is written.

    `dtypes` are those of weights that get another one.
    """
    shapes = {name: each.to(dtypes.get(name, each.dtype)) for name, each in stored.shapes.items()}

    def make(name: str) -> Tensor:
        if name in deltas or shapes[name].dtype != stored.shapes[name].dtype:
            return merged(stored, name, deltas.get(name, ()), shapes[name].dtype, rounding)
        return stored.read(name)

    return streamed_group(shapes, make, origin.metadata())


@torch.no_grad()
def merged(
    stored: StoredTensors,
    name: str,
    deltas: Sequence[tuple[float, Delta]],
    dtype: torch.dtype,
    rounding: Rounding,
) -> Tensor:
    """Return a weight with all that is added to it, rounded once to a dtype."""
    before = stored.read_finite(name)
    exact = before.clone()
    for strength, delta in deltas:
        exact.add_(delta(exact), alpha=strength)
    changed = squared(exact - before)
    del before  # of a model's largest weight each copy is hundreds of MiB
    written, whole = rounded(exact, dtype), squared(exact)
    lost = squared(exact.sub_(written.to(exact.dtype))) if written is not exact else 0.0
    if dtype != stored.shapes[name].dtype:
        rounding.converted, rounding.lost_in_conversion = rounding.converted + whole, rounding.lost_in_conversion + lost
    else:
        rounding.changed, rounding.lost = rounding.changed + changed, rounding.lost + lost
        rounding.dtypes.add(dtype)
    return written


def squared(tensor: Tensor) -> float:
    return tensor.norm().item() ** 2
