"""Convert a checkpoint that DeepSpeed's `engine.save_checkpoint` wrote to one of ours.

DeepSpeed's files are pickles: whoever wrote them can run any program here, so they are read only with `allow_pickle`.
They hold no named tensors, but one flat tensor per parameter group and rank; names and shapes are in another file, in
the same order. Layouts, checked with 0.19.8:

- stages 1 and 2 (`DeepSpeedZeroOptimizer.state_dict`): the ranks' partitions of a group follow one another
- stage 3 (`DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`): each parameter is cut into equal parts, the last one
  padded; a rank's parts of all parameters follow one another, over several sub-groups
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.checkpoints.layout import checkpoint_folder, file_sizes
from simpletuner.checkpoints.saving import WEIGHTS_STEM, write_state
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.checksums import file_checksum
from simpletuner.system.files import replace_folder, unfinished_path, write_json

RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(?:model|optim)_states\.pt")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """The unpickled files, by rank. Below stage 3 there is one model file for all ranks."""

    folder: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]

    @property
    def stage(self) -> int:
        return int(self.optimizers[0]["zero_stage"])

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return int(self.models[0]["global_steps"])

    def moment_names(self) -> list[str]:
        # What is not a tensor of elements is a counter: torch keeps `step` as a scalar tensor, DeepSpeed as an int.
        return sorted(name for name, value in self._states(0)[0].items() if isinstance(value, Tensor) and value.dim())

    def tensors(self, moment: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole trainable parameter, by name: the float32 master weights, or a moment."""
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in self.models[0]["param_shapes"]]
        ranks = [self._flat_tensors(rank, moment) for rank in range(len(self.optimizers))]
        if self.stage == 3:
            shapes = {name: shape for group in groups for name, shape in group.items()}
            yield from split_by_parameter(shapes, [torch.cat(sub_groups) for sub_groups in ranks])
            return
        paddings = self.optimizers[0].get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        for number, group in enumerate(groups):
            flat = torch.cat([flat_tensors[number] for flat_tensors in ranks])
            yield from split_group(group, flat, paddings[number])

    def fixed_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers and frozen parameters, which no optimizer has."""
        model = self.models[0]
        yield from ((name, model["module"][name]) for name in model.get("buffer_names", ()) if name in model["module"])
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            parts = [each["frozen_param_fragments"][name].flatten() for each in self.models]
            yield name, torch.cat(parts)[: prod(shape)].view(tuple(shape)).float()

    def _flat_tensors(self, rank: int, moment: str | None) -> list[Tensor]:
        """Return a rank's 1-D tensors, one per parameter group (per sub-group at stage 3)."""
        if moment is not None:
            return [state[moment] for state in self._states(rank)]
        return list(self.optimizers[rank]["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"])

    def _states(self, rank: int) -> list[dict[str, Any]]:
        saved = self.optimizers[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        # A list with `elastic_checkpoint` (stages 1 and 2), else the state dict of a torch optimizer.
        return saved if isinstance(saved, list) else [state for _, state in sorted(saved["state"].items())]


def split_group(shapes: Shapes, flat: Tensor, paddings: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that follow one another in a flat group (1-D), each followed by its padding."""
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        yield name, flat.narrow(0, offset, prod(shape)).view(shape)
        offset += prod(shape) + padding


def split_by_parameter(shapes: Shapes, ranks: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of which each rank's flat tensor (1-D) has an equal part."""
    offset = 0
    for name, shape in shapes.items():
        part_numel = -(-prod(shape) // len(ranks))
        parts = [flat.narrow(0, offset, part_numel) for flat in ranks]
        yield name, torch.cat(parts)[: prod(shape)].view(shape)
        offset += part_numel


def import_deepspeed_checkpoint(source: Path, root: Path, shapes: Shapes, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint of ours below `root` from one of DeepSpeed's, and return its folder.

    `shapes` are those of the denoiser's weights. Raises EnvironmentNotReady for files that are missing, damaged, or of
    another model.
    """
    theirs = read_checkpoint(source)
    folder = checkpoint_folder(root, theirs.steps)
    hidden = unfinished_path(folder)
    prefix = find_prefix([name for name, _ in theirs.tensors()], shapes, source)
    moments = theirs.moment_names()
    write_tensors(hidden / "model", {**dict(theirs.tensors()), **dict(theirs.fixed_tensors())}, prefix)
    for moment in moments:
        write_tensors(hidden / moment, dict(theirs.tensors(moment)), prefix)
    write_json(hidden / "model" / "config.json", dict(config))
    state = {
        "step": theirs.steps,
        "imported_from": str(source),
        # It was trained on unknown data, so ours begin with epoch 0.
        "position": {"epoch": -1, "batch": 0, "batch_size": 1, "consumed": {}},
        "data": "",
        "optimizer": {"steps": theirs.steps, "moments": moments},
        "ema_updates": None,
    }
    write_state(hidden, state, {name: file_checksum(hidden / name) for name in file_sizes(hidden)})
    replace_folder(hidden, folder)
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Write one group of tensors, under the denoiser's own names."""
    folder.mkdir(parents=True)
    named = {name.removeprefix(prefix): tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(named, folder / f"{WEIGHTS_STEM}.safetensors", metadata={"format": "pt"})


def read_checkpoint(source: Path) -> DeepSpeedCheckpoint:
    """Read the files of all ranks. Raises EnvironmentNotReady when some are missing or cannot be read."""
    latest = source / "latest"  # names the newest tag's folder
    folder = source / latest.read_text(encoding="utf-8").strip() if latest.is_file() else source
    optimizers = [unpickle(path)["optimizer_state_dict"] for path in rank_files(folder, "optim")]
    model_files = rank_files(folder, "model") or sorted(folder.glob("mp_rank_00_model_states.pt"))
    models = [unpickle(path) for path in model_files]
    if not optimizers or not models or "zero_stage" not in optimizers[0]:
        raise EnvironmentNotReady(
            f"{folder} is not a checkpoint of DeepSpeed ZeRO",
            "give the folder that holds `latest`, or one with *_model_states.pt and *_optim_states.pt",
        )
    counts = optimizers[0]["partition_count"]  # one per parameter group at stages 1 and 2
    num_ranks = max(counts) if isinstance(counts, list) else int(counts)
    if num_ranks != len(optimizers):
        raise EnvironmentNotReady(
            f"{folder} was written by {num_ranks} ranks, but has files of {len(optimizers)} of them"
        )
    return DeepSpeedCheckpoint(folder, models, optimizers)


def rank_files(folder: Path, kind: str) -> list[Path]:
    """Return the files of all ranks, in rank order."""
    found = [
        (match, path)
        for path in folder.glob(f"*zero_pp_rank_*_{kind}_states.pt")
        if (match := RANK_FILE.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, key=lambda item: int(item[0][1]))]


def unpickle(path: Path) -> dict[str, Any]:
    """Read a file; mmap leaves its tensors on disk until they are used."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except ModuleNotFoundError as error:
        raise EnvironmentNotReady(f"{path} needs {error.name} to be read", f"pip install {error.name}") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise EnvironmentNotReady(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def find_prefix(found: list[str], shapes: Shapes, source: Path) -> str:
    """Return what precedes the denoiser's own names, such as `unet.`. Raises EnvironmentNotReady for another model."""
    first = next(iter(shapes))
    prefixes = [name.removesuffix(first) for name in found if name.endswith(first)] or [""]
    for prefix in prefixes:
        if {name.removeprefix(prefix) for name in found} <= shapes.keys():
            return prefix
    missing = min((sorted(shapes.keys() - {name.removeprefix(p) for name in found}) for p in prefixes), key=len)
    raise EnvironmentNotReady(
        f"{source} is of another model: it has no {', '.join(missing[:3]) or 'such weights'}",
        "set model_family and pretrained_model_name_or_path to what it was trained from",
    )
