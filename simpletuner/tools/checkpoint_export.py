"""A pipeline or LoRA of a checkpoint, as its run would have written it then. One process, no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.checkpoints.export import check_export, check_targets, export_lora, export_pipeline
from simpletuner.checkpoints.layout import (
    EXPORTS,
    Checkpoint,
    checkpoint_folder,
    is_complete,
    list_checkpoints,
    load_checkpoint,
    parse_step,
)
from simpletuner.checkpoints.tensors import read_tensors, stored_rows, streamed_group
from simpletuner.checkpoints.verification import Verification
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.folder.malformed import translate_load_errors
from simpletuner.models.opening.loading import load_family
from simpletuner.parallel.world import World, joined_world
from simpletuner.report import Report
from simpletuner.runs.health.best_step import best_saved_of
from simpletuner.runs.settings_record import recorded_settings
from simpletuner.settings.values.parsed import checkpoint_name
from simpletuner.system.files.locks import sole_writer
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.run_folder.resuming import check_fits


def export_checkpoint(
    output: Path, name: str, target: Path | None, average: bool, named: Mapping[str, str], report: Report
) -> Path:
    """Verify a checkpoint of a run, write its pipeline or LoRA, without a model card, and return the folder.

    An empty name means the newest, digits a step, `best` the one with the best held-out loss; `average` takes
    the EMA; `named` as in `recorded_settings`. Raises SettingsError where there is no such checkpoint, or it
    has no EMA, EnvironmentNotReady where it is damaged or not of the base model that its run names.
    """
    settings, checkpoint = recorded_settings(output, named), find_checkpoint(output, name)
    if average and checkpoint.state["ema_updates"] is None:
        raise SettingsError(f"{checkpoint.folder} has no EMA", "export the trained weights, without --ema")
    kind = EXPORTS[settings.model.model_type] + ("-ema" if average else "")
    target = target or output / f"{kind}-{checkpoint.step:06d}"
    check_targets([target])
    with libraries_silenced(), joined_world({}, use_cpu=True) as world, sole_writer(target):
        verification = Verification(checkpoint, world)
        family = load_family(settings, world, StopRequest().check, skips_checked=True)
        check_export(family, [target])
        check_fits(checkpoint, family, world, verification)
        verification.wait()
        report.say(f"writing {target}")
        stored = StoredWeights(checkpoint, family, "ema" if average else "model")
        write_export(family, target, stored.read, world, checkpoint.step, without_card)
    return target


def write_export(
    family: ModelFamily,
    target: Path,
    read: Callable[[str], Tensor],
    world: World,
    step: int,
    write_card: Callable[[Path], None],
) -> None:
    """Write the LoRA or pipeline whose weights `read` returns by name; a pipeline has one in memory."""
    shapes = {name: torch.empty(shape, device="meta") for name, shape in family.trained_shapes().items()}
    if family.adapter is not None:
        export_lora(family, family.adapter, target, {name: read(name) for name in shapes}, world, step, write_card)
        return
    buffers = {name: each for name, each in family.meta_denoiser.state_dict().items() if name in not_floating(family)}
    weights = streamed_group({**shapes, **buffers}, read)
    export_pipeline(family, target, family.exported_config(), weights, world, step, write_card)


def without_card(folder: Path) -> None:
    """Write no model card: it would say what the whole run was."""


def find_checkpoint(output: Path, name: str) -> Checkpoint:
    folders = list_checkpoints(output / "checkpoints")
    name = name_of_best(output, folders) if name == "best" else checkpoint_name(name)
    chosen = [folder for folder in folders if name in ("", folder.name)]
    if not chosen:
        known = ", ".join(folder.name for folder in folders) or "none yet"
        raise SettingsError(f"{output} has no checkpoint {name}".rstrip(), f"checkpoints here: {known}")
    return load_checkpoint(chosen[0])


def name_of_best(output: Path, folders: Sequence[Path]) -> str:
    """Return the name of the best of the checkpoints. Raises SettingsError where no held-out loss tells."""
    step = best_saved_of(output, [parse_step(folder) for folder in folders if is_complete(folder)])
    if step is None:
        raise SettingsError(
            f"{output} has no checkpoint with a held-out loss", "name one; eval_split measures the loss of a next run"
        )
    return checkpoint_folder(output, step).name


def not_floating(family: ModelFamily) -> dict[str, torch.dtype]:
    """Buffers of the denoiser that are no floating-point numbers."""
    meta = {} if family.adapter else family.meta_denoiser.state_dict()
    return {name: each.dtype for name, each in meta.items() if not each.is_floating_point()}


class StoredWeights:
    """Weights of a checkpoint, read one by one: float32, and buffers as the denoiser has them."""

    def __init__(self, checkpoint: Checkpoint, family: ModelFamily, group: str) -> None:
        """Raises EnvironmentNotReady for a damaged file."""
        self.files, self.what = checkpoint.files(group), str(checkpoint.folder)
        self.shapes, self.dtypes = family.trained_shapes(), not_floating(family)
        with translate_load_errors(checkpoint.folder):
            self.rows = stored_rows(self.files)

    def read(self, name: str) -> Tensor:
        """Return one, whole. Raises EnvironmentNotReady where it is missing, damaged or of another shape."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes.get(name, torch.float32))
        read_tensors(self.files, {name: tensor}, self.what, self.rows)
        return tensor
