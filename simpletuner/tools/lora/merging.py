"""`simpletuner lora merge`: write a pipeline whose weights have adapters merged into them, one weight in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from simpletuner.checkpoints.export import export_pipeline
from simpletuner.checkpoints.tensors import TensorGroup, streamed_group
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.opening.stored_weights import StoredTensors, denoiser_weights, encoder_weights
from simpletuner.parallel.model.blocks import block_paths, recommended_blocks
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
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
    in_eight_bits: float = 0.0
    lost_in_eight_bits: float = 0.0
    """Squared sums of the weights in float8, and of what that rounds off."""

    @property
    def share(self) -> float:
        return (self.lost / self.changed) ** 0.5 if self.changed else 0.0

    @property
    def share_of_eight_bits(self) -> float:
        return (self.lost_in_eight_bits / self.in_eight_bits) ** 0.5 if self.in_eight_bits else 0.0


def merge_loras(
    base: NamedModel,
    loras: Sequence[tuple[Path, float]],
    target: Path,
    replace: bool,
    report: Report,
    in_float8: bool = False,
) -> Rounding:
    """Write the pipeline `base` with LoRAs merged, each at its strength, in its own precision, to `target`.

    `in_float8` rounds the linear layers of the denoiser's blocks to float8. Sums are made in float32 (float64
    where the base is in that) and rounded once. Raises SettingsError for a LoRA that does not fit, naming its
    keys, EnvironmentNotReady for what is damaged or cannot be written.
    """
    check_result(target, replace, [path for path, _ in loras])
    rounding = Rounding()
    with libraries_silenced(), joined_world({}, use_cpu=True) as world:
        family = open_base(base, world)
        deltas = combined(loras, family)
        eight = weights_of_blocks(family) if in_float8 else frozenset[str]()
        origin = ResultOrigin("merge", base.name, [(path, f"strength {strength:g}") for path, strength in loras])
        with writing_to(target, family, world):
            report.say(f"writing {target}")
            merge_group = partial(group_of, origin=origin, rounding=rounding)
            denoiser = merge_group(denoiser_weights(family), deltas.pop(family.denoiser_name, {}), eight=eight)
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
    if loras and not found:
        raise SettingsError(f"{loras[0][0]} holds no tensors", "take another LoRA")
    return {**found}


def weights_of_blocks(family: ModelFamily) -> frozenset[str]:
    """Weights of the linear layers in the denoiser's repeated blocks, the others of which are few."""
    model = family.meta_denoiser
    paths = block_paths(model, recommended_blocks(model))
    names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return frozenset(f"{name}.weight" for name in names if name.startswith(tuple(f"{path}." for path in paths)))


def group_of(
    stored: StoredTensors,
    deltas: Deltas,
    origin: ResultOrigin,
    rounding: Rounding,
    eight: Collection[str] = (),
) -> TensorGroup:
    """Plan the files of a component's merged weights, each of which is made when it is written."""
    shapes = {name: each.to(EIGHT_BITS) if name in eight else each for name, each in stored.shapes.items()}

    def make(name: str) -> Tensor:
        if name in deltas or name in eight:
            return merged(stored, name, deltas.get(name, ()), shapes[name].dtype, rounding)
        return stored.read(name)

    return streamed_group(shapes, make, origin.metadata())


EIGHT_BITS = torch.float8_e4m3fn


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
    rounding.changed += squared(exact - before)
    del before  # of a model's largest weight each copy is hundreds of MiB
    if dtype == EIGHT_BITS:
        rounding.in_eight_bits += squared(exact)
        exact.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)  # what is larger would become NaN
        rounded = exact.to(dtype)
        rounding.lost_in_eight_bits += squared(exact.sub_(rounded.to(exact.dtype)))
        return rounded
    rounded = exact.to(dtype)
    if rounded is not exact:
        rounding.lost += squared(exact.sub_(rounded))
    rounding.dtypes.add(dtype)
    return rounded


def squared(tensor: Tensor) -> float:
    return tensor.norm().item() ** 2
