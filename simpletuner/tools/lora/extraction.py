"""`simpletuner lora extract`: the difference of two models as a LoRA, and exactly what is no matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.checkpoints.export import replace_export
from simpletuner.checkpoints.writing import as_bytes, make_header, write_safetensors
from simpletuner.errors import SettingsError
from simpletuner.models.family.adapter import Adapter, layers_ending_with, layers_named
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.opening.lora_config import check_formats, write_formats
from simpletuner.models.opening.lora_file import NAMES, write_lora
from simpletuner.models.opening.stored_weights import StoredTensors, denoiser_weights
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Lora
from simpletuner.tools.lora.base_model import NamedModel, open_base
from simpletuner.tools.lora.deltas import DIFFERENCE, EXACT
from simpletuner.tools.lora.low_rank import Wanted, best_pair
from simpletuner.tools.lora.merging import squared
from simpletuner.tools.lora.results import ResultOrigin, check_result, writing_to


@dataclass(frozen=True)
class Extracted:
    """Layers and ranks of an extracted LoRA, and squared sums: all that changed, and the part in files."""

    ranks: Mapping[str, int]
    others: Sequence[str]
    """Tensors that are no layer's matrix: their differences are kept as they are."""
    left_out: int
    """Layers that changed and were not asked for."""
    changed: float
    kept: float
    in_others: float

    @property
    def share_of_lora(self) -> float:
        return self.kept / self.changed

    @property
    def share_of_others(self) -> float:
        return self.in_others / self.changed


class Differences:
    """Differences of two models' weights, read one at a time, with their squared sum."""

    def __init__(self, before: StoredTensors, after: StoredTensors) -> None:
        self.before, self.after, self.changed = before, after, 0.0

    def read(self, name: str) -> Tensor:
        return self.after.read_finite(name) - self.before.read_finite(name)

    def measured(self, name: str) -> tuple[Tensor, float]:
        difference = self.read(name)
        square = squared(difference)
        self.changed += square
        return difference, square


def extract_lora(
    tuned: NamedModel,
    base: NamedModel,
    target: Path,
    wanted: Wanted,
    lora: Lora,
    replace: bool,
    report: Report,
) -> Extracted:
    """Write what a fine-tuned model adds to its base as a LoRA, and what no LoRA holds beside it.

    `lora` has the layers, all by default, and the programs to write for. Raises SettingsError for models of
    different shapes, or of equal weights.
    """
    check_result(target, replace, [])
    with libraries_silenced(), joined_world({}, use_cpu=True) as world:
        family, other = open_base(base, world, lora), open_base(tuned, world, lora)
        check_same_shapes(family, other)
        differences = Differences(denoiser_weights(family), denoiser_weights(other))
        weights, found = decompose(differences, family, wanted, report)
        rank = max(found.ranks.values())
        adapter = Adapter(rank, float(rank), 0.0, (), tuple(found.ranks), 0)
        origin = ResultOrigin("extract", base.name, [(Path(tuned.name), "fine-tuned model")])

        def write(hidden: Path) -> None:
            write_lora(hidden, family, adapter, weights, origin.metadata())
            write_formats(hidden, family, adapter, weights)
            if found.others:
                write_exact(hidden / EXACT, differences, found.others, origin)

        with writing_to(target, family, world, replace):
            report.say(f"writing {target}")
            card = partial(origin.write_card, model=family.settings.model)
            replace_export(target, world, 0, lambda _: {}, write, card)
    return found


def check_same_shapes(family: ModelFamily, other: ModelFamily) -> None:
    own, others = (
        {name: tuple(each.shape) for name, each in every.meta_denoiser.state_dict().items()}
        for every in (family, other)
    )
    odd = next((name for name in sorted(own.keys() | others.keys()) if own.get(name) != others.get(name)), None)
    if odd is not None:
        raise SettingsError(
            f"{other.folder} and {family.folder} are different models: {odd} is {others.get(odd, 'missing')} in one, "
            f"{own.get(odd, 'missing')} in the other",
            "name the model that the fine-tune began with",
        )


@torch.no_grad()
def decompose(
    differences: Differences, family: ModelFamily, wanted: Wanted, report: Report
) -> tuple[dict[str, Tensor], Extracted]:
    """Return the matrices of all layers that changed, at the scale 1, and their measures."""
    model = family.meta_denoiser
    every = layers_ending_with(model, "")
    targets = tuple(filter(None, (each.strip() for each in family.settings.lora.lora_target_modules.split(","))))
    chosen = set(layers_named(model, targets) if targets else every)
    weights: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    kept, left_out = 0.0, 0
    with report.progress("layers", len(every)) as progress:
        for number, layer in enumerate(every, start=1):
            difference, square = differences.measured(f"{layer}.weight")
            if square and layer in chosen:
                check_formats(family, Adapter(1, 1.0, 0.0, (), (layer,), 0))
                down, up = best_pair(difference.flatten(1), wanted)
                ranks[layer] = len(down)
                # Its projection: what is left is at right angles to it.
                kept += square - squared(difference.flatten(1).double() - up @ down)
                weights |= shaped(layer, down, up, difference)
            left_out += bool(square) and layer not in chosen
            progress.update(number)
    layer_weights = {f"{layer}.weight" for layer in every}
    rest = [name for name in model.state_dict() if name not in layer_weights and name in differences.before.shapes]
    squares = {name: differences.measured(name)[1] for name in rest}
    others = [name for name, square in squares.items() if square]
    if not ranks:
        where = "the layers asked for" if left_out else "all matrices"
        but = f"; {others[0]} differs, which no LoRA holds" if others else ""
        raise SettingsError(f"{where} are equal in both models: there is no LoRA to extract{but}", "name another model")
    return weights, Extracted(ranks, others, left_out, differences.changed, kept, sum(squares.values()))


def shaped(layer: str, down: Tensor, up: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return a pair in float32 as peft has it: of a convolution, the first has its kernel."""
    kernel = weight.shape[2:]
    down, up = down.float().view(len(down), *weight.shape[1:]), up.float().view(*up.shape, *[1] * len(kernel))
    return {f"{layer}.{NAMES['down']}": down.contiguous(), f"{layer}.{NAMES['up']}": up.contiguous()}


def write_exact(path: Path, differences: Differences, names: Sequence[str], origin: ResultOrigin) -> None:
    """Write differences of tensors that are no layer's matrix, in float32, one in memory."""
    shapes = differences.before.shapes
    contents = {f"{name}{DIFFERENCE}": (torch.float32, tuple(shapes[name].shape)) for name in names}
    parts = (as_bytes(differences.read(name).float()) for name in names)
    write_safetensors(path, make_header(contents, {"format": "pt", **origin.metadata()}), parts)
