"""`simpletuner lora average`: the mean of a run's checkpoints, or of LoRA files.

A run's checkpoints lie on one path, and the mean of their weights is what an average kept during the run (EMA)
is: of a LoRA, too, whose matrices keep their meaning along the path. LoRAs of different runs have no matrix in
common, so the mean is that of what they add to each layer, by concatenation: exact, and of the sum of their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.checkpoints.export import check_export
from simpletuner.checkpoints.layout import Checkpoint, is_complete, list_checkpoints, load_checkpoint
from simpletuner.checkpoints.verification import Verification
from simpletuner.errors import SettingsError
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.opening.loading import load_family
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.runs.settings_record import recorded_settings
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.checkpoint_export import StoredWeights, write_export
from simpletuner.tools.lora.lora_pairs import MatrixPair, WholeLayer, concatenated, read_pairs
from simpletuner.tools.lora.low_rank import Wanted
from simpletuner.tools.lora.resizing import Resized, write_result
from simpletuner.tools.lora.results import ResultOrigin, check_result, writing_to
from simpletuner.training.run_folder.resuming import check_fits


def average_loras(
    files: Sequence[Path], weights: Sequence[float], target: Path, wanted: Wanted | None, replace: bool, report: Report
) -> Resized:
    """Write the weighted mean of what LoRAs add to each layer; one that lacks a layer adds nothing to it.

    Raises SettingsError for files whose names of layers have nothing in common.
    """
    check_result(target, replace, files)
    read = [read_pairs(path) for path in files]
    shares = shares_of(weights, len(files))
    first = read[0]
    for path, pairs in zip(files[1:], read[1:], strict=True):
        if not first.layers.keys() & pairs.layers.keys():
            raise SettingsError(
                f"{files[0]} and {path} have no layer in common: {min(first.layers)} is in the one, "
                f"{min(pairs.layers)} in the other",
                "average LoRAs of one model, in files of one program",
            )
    if wanted is None and any(isinstance(each, WholeLayer) for pairs in read for each in pairs.layers.values()):
        raise SettingsError(
            "the mean with a LoHa or LoKr is written as a LoRA, of which no rank is given",
            "add --rank=32, or --energy=0.95",
        )
    found, layers = Resized(), dict[str, MatrixPair | WholeLayer]()
    for layer in dict.fromkeys(name for pairs in read for name in pairs.layers):
        having = [(pairs, share) for pairs, share in zip(read, shares, strict=True) if layer in pairs.layers]
        mean_layer = mean_of(layer, [(pairs.layers[layer], share) for pairs, share in having])
        layers[layer] = found.resize(mean_layer, wanted or Wanted(None, None)).in_dtype(first.dtype)
    first.layers = layers
    origin = ResultOrigin("average", first.metadata.get("base_model", ""), described(files, shares))
    write_result(first, target, origin, replace, report)
    return found


def mean_of(name: str, layers: Sequence[tuple[MatrixPair | WholeLayer, float]]) -> MatrixPair | WholeLayer:
    """Return the weighted mean of what is added to a layer: of LoRAs alone as a pair, else as a delta."""
    pairs = [each for each, _ in layers if isinstance(each, MatrixPair)]
    other = SettingsError(f"{name} has other shapes in some of the files", "average LoRAs of one model")
    if len(pairs) == len(layers):
        if len({(each.tensors["down"].shape[1:], each.tensors["up"].shape[0]) for each in pairs}) > 1:
            raise other
        return concatenated(pairs, [share for _, share in layers])
    if any("bias" in each.tensors for each in pairs):
        raise SettingsError(f"{name} has a bias in some of the files, and others are of LoHa or LoKr", "leave it out")
    total = layers[0][0].delta() * layers[0][1]
    for each, share in layers[1:]:
        if (delta := each.delta()).shape != total.shape:
            raise other
        total.add_(delta, alpha=share)
    return WholeLayer(next(each.names for each, _ in layers if isinstance(each, WholeLayer)), lambda: total)


def described(files: Sequence[Path], shares: Sequence[float]) -> list[tuple[Path, str]]:
    return [(path, f"weight {share:.4g}") for path, share in zip(files, shares, strict=True)]


def shares_of(weights: Sequence[float], count: int) -> list[float]:
    """Weights whose sum is 1, by default equal. Raises SettingsError for another number or a sum of 0."""
    given = [*weights] or [1.0] * count
    if len(given) != count:
        raise SettingsError(f"--weights has {len(given)} numbers for {count} files or checkpoints", "give one for each")
    if not sum(given) > 0:
        raise SettingsError("the sum of --weights is not above 0", "give weights such as 1,1,2")
    return [each / sum(given) for each in given]


def average_checkpoints(
    output: Path,
    last: int,
    weights: Sequence[float],
    ema: bool,
    target: Path,
    named: Mapping[str, str],
    replace: bool,
    report: Report,
) -> list[str]:
    """Write the pipeline or LoRA of the mean of a run's last checkpoints, and return their names.

    One weight is in memory. Raises SettingsError where there are fewer checkpoints, or they have no EMA,
    EnvironmentNotReady where one is damaged.
    """
    check_result(target, replace, [])
    chosen = last_checkpoints(output, last)
    if ema and (bare := next((each for each in chosen if each.state["ema_updates"] is None), None)):
        raise SettingsError(f"{bare.folder} has no EMA", "average the trained weights, without --ema")
    shares = shares_of(weights, len(chosen))
    settings = recorded_settings(output, named, "lora average")
    with libraries_silenced(), joined_world({}, use_cpu=True) as world:
        family = load_family(settings, world, StopRequest().check, skips_checked=True)
        check_export(family, [target])
        for checkpoint in chosen:
            verification = Verification(checkpoint, world)
            check_fits(checkpoint, family, world, verification)
            verification.wait()
        stored = [StoredWeights(each, family, "ema" if ema else "model") for each in chosen]
        origin = ResultOrigin("average", "", described([each.folder for each in chosen], shares))
        with writing_to(target, family, world, replace):
            report.say(f"writing {target}")
            card = partial(origin.write_card, model=settings.model)
            write_export(family, target, partial(mean, stored, shares), world, chosen[-1].step, card)
    return [each.folder.name for each in chosen]


@torch.no_grad()
def mean(stored: Sequence[StoredWeights], shares: Sequence[float], name: str) -> Tensor:
    """Weighted mean of one weight, summed in float64; of a buffer of integers the newest."""
    last = stored[-1].read(name)
    if not last.is_floating_point():
        return last
    found = last.double() * shares[-1]
    for each, share in zip(stored[:-1], shares[:-1], strict=True):
        found.add_(each.read(name), alpha=share)
    return found.to(last.dtype)


def last_checkpoints(output: Path, last: int) -> list[Checkpoint]:
    """Return the newest complete checkpoints of a run, the newest last."""
    folders = [each for each in list_checkpoints(output / "checkpoints") if is_complete(each)]
    if len(folders) < last:
        known = ", ".join(each.name for each in folders) or "none"
        hint = "a later run keeps more of them with checkpoints_total_limit"
        raise SettingsError(f"{output} has {len(folders)} complete checkpoints, and --last is {last} ({known})", hint)
    return [load_checkpoint(each) for each in reversed(folders[:last])]
