"""`simpletuner lora resize`: a LoRA of another rank, by the best approximation of each layer's product."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from simpletuner.checkpoints.export import replace_export
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.tools.lora.lora_pairs import MatrixPair, PairedLora, WholeLayer, read_pairs, write_pairs
from simpletuner.tools.lora.low_rank import Wanted, best_pair, pair_of_product
from simpletuner.tools.lora.merging import squared
from simpletuner.tools.lora.results import ResultOrigin, check_result, writing_to


@dataclass
class Resized:
    """Ranks of a LoRA before and after, and the squared sums of what it adds."""

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    whole: float = 0.0
    kept: float = 0.0

    @property
    def share(self) -> float:
        return self.kept / self.whole if self.whole else 1.0

    def resize(self, layer: MatrixPair | WholeLayer, wanted: Wanted) -> MatrixPair:
        """Return a pair of the wanted rank or energy; one of no more than the rank as it is."""
        if isinstance(layer, WholeLayer):
            return self.cut(layer, wanted)
        pair = layer
        self.before.append(pair.rank)
        square = square_of(pair)
        if wanted.energy is not None or pair.rank > (wanted.rank or pair.rank):
            pair = pair.with_matrices(*pair_of_product(*pair.flat(), wanted))
        self.after.append(pair.rank)
        self.whole, self.kept = self.whole + square, self.kept + square_of(pair)
        return pair

    def cut(self, layer: WholeLayer, wanted: Wanted) -> MatrixPair:
        """Return the nearest pair to the delta of a LoHa or LoKr."""
        delta = layer.delta()
        down, up = best_pair(delta.flatten(1), wanted)
        kernel = [1] * (delta.ndim - 2)
        tensors = {"down": down.view(len(down), *delta.shape[1:]), "up": up.view(*up.shape, *kernel)}
        pair = MatrixPair(layer.names, tensors)
        self.after.append(pair.rank)
        self.whole, self.kept = self.whole + squared(delta), self.kept + square_of(pair)
        return pair


def resize_lora(path: Path, target: Path, wanted: Wanted, replace: bool, report: Report) -> Resized:
    """Write a LoRA in its own names with layers of no more than the wanted rank or energy.

    A LoHa or LoKr becomes a LoRA, by the delta of each layer. Raises SettingsError for what is no adapter,
    and for DoRA and OFT, EnvironmentNotReady for a damaged one.
    """
    check_result(target, replace, [path])
    pairs = read_pairs(path)
    found = Resized()
    for name, layer in pairs.layers.items():
        pairs.layers[name] = found.resize(layer, wanted).in_dtype(pairs.dtype)
    origin = ResultOrigin("resize", pairs.metadata.get("base_model", ""), [(path, "")])
    write_result(pairs, target, origin, replace, report)
    return found


def square_of(pair: MatrixPair) -> float:
    # The product is never made: the trace of two small ones.
    down, up = pair.flat()
    return ((up.T @ up) * (down @ down.T)).sum().clamp_min(0).item()


def write_result(pairs: PairedLora, target: Path, origin: ResultOrigin, replace: bool, report: Report) -> None:
    with libraries_silenced(), joined_world({}, use_cpu=True) as world, writing_to(target, None, world, replace):
        report.say(f"writing {target}")
        write = partial(write_pairs, pairs=pairs, origin=origin.metadata())
        replace_export(target, world, 0, lambda _: {}, write, origin.write_card)
