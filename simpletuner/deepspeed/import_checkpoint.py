"""Read a checkpoint folder of DeepSpeed's own, as `engine.save_checkpoint` writes it, and write it as one of ours.

Its files are pickles: whoever made them can run any program here, so this happens only where `allow_pickle` says so.
They hold no named tensors but flat ones per parameter group and rank, and in another file the names and shapes, in
order. At stages 1 and 2 the ranks' parts of a group follow one another; at stage 3 each parameter is cut into equal
parts, the last padded, and a rank's parts of all parameters follow one another, over several sub-groups.
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

from simpletuner.checkpoints.layout import folder_of_step, sizes
from simpletuner.checkpoints.saving import WEIGHTS_STEM, write_state
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.checksums import file_checksum
from simpletuner.system.files import replace_folder, unfinished_path, write_json

RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(?:model|optim)_states\.pt")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dump:
    """What DeepSpeed wrote: `models` and `optimizers` by rank; only at stage 3 has every rank its own model file."""

    folder: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO."""
        return int(self.optimizers[0]["zero_stage"])

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps taken."""
        return int(self.models[0]["global_steps"])

    def moments(self) -> list[str]:
        """Return the names of the optimizer's moments; of what DeepSpeed's own optimizers keep, too."""
        return sorted(name for name, value in self._states(0)[0].items() if isinstance(value, Tensor) and value.dim())

    def tensors(self, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter of a moment, or of the float32 masters, by name."""
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in self.models[0]["param_shapes"]]
        ranks = [self._flats(rank, of) for rank in range(len(self.optimizers))]
        if self.stage == 3:
            yield from cut_by_parameter(
                {k: v for group in groups for k, v in group.items()}, [torch.cat(r) for r in ranks]
            )
            return
        paddings = self.optimizers[0].get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        for number, group in enumerate(groups):
            yield from cut_by_group(group, torch.cat([flats[number] for flats in ranks]), paddings[number])

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers and frozen parameters, which no optimizer has."""
        model = self.models[0]
        yield from ((name, model["module"][name]) for name in model.get("buffer_names", ()) if name in model["module"])
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            parts = [each["frozen_param_fragments"][name].flatten() for each in self.models]
            yield name, torch.cat(parts)[: prod(shape)].view(tuple(shape)).float()

    def _flats(self, rank: int, of: str) -> list[Tensor]:
        if of:
            return [state[of] for state in self._states(rank)]
        return list(self.optimizers[rank]["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"])

    def _states(self, rank: int) -> list[dict[str, Any]]:
        kept = self.optimizers[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        return kept if isinstance(kept, list) else [state for _, state in sorted(kept["state"].items())]


def cut_by_group(shapes: Shapes, flat: Tensor, paddings: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that follow one another in a flat group."""
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        yield name, flat.narrow(0, offset, prod(shape)).view(shape)
        offset += prod(shape) + padding


def cut_by_parameter(shapes: Shapes, ranks: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of which each rank has an equal part."""
    offset = 0
    for name, shape in shapes.items():
        share = -(-prod(shape) // len(ranks))
        parts = [flat.narrow(0, offset, share) for flat in ranks]
        yield name, torch.cat(parts)[: prod(shape)].view(shape)
        offset += share


def import_dump(source: Path, root: Path, shapes: Shapes, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint of ours below `root` from one of DeepSpeed's, and return its folder.

    `shapes` are those of the denoiser's weights. Raises EnvironmentFault for files that are missing, damaged, or of
    another model.
    """
    dump = opened_dump(source)
    folder = folder_of_step(root, dump.steps)
    hidden = unfinished_path(folder)
    prefix = prefix_of([name for name, _ in dump.tensors()], shapes, source)
    moments = dump.moments()
    write(hidden / "model", {**dict(dump.tensors()), **dict(dump.rest())}, prefix)
    for moment in moments:
        write(hidden / moment, dict(dump.tensors(moment)), prefix)
    write_json(hidden / "model" / "config.json", dict(config))
    state = {
        "step": dump.steps,
        "imported_from": str(source),
        "position": {"epoch": -1, "batch": 0, "batch_size": 1, "consumed": {}},  # of other data: go on with epoch 0
        "data": "",
        "optimizer": {"steps": dump.steps, "moments": moments},
        "ema_updates": None,
    }
    write_state(hidden, state, {name: file_checksum(hidden / name) for name in sizes(hidden)})
    replace_folder(hidden, folder)
    return folder


def write(folder: Path, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Write one group of tensors, under the denoiser's own names."""
    folder.mkdir(parents=True)
    named = {name.removeprefix(prefix): tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(named, folder / f"{WEIGHTS_STEM}.safetensors", metadata={"format": "pt"})


def opened_dump(source: Path) -> Dump:
    """Read the files of all ranks. Raises EnvironmentFault when some are missing or cannot be read."""
    latest = source / "latest"
    folder = source / latest.read_text(encoding="utf-8").strip() if latest.is_file() else source
    optimizers = [read(path)["optimizer_state_dict"] for path in by_rank(folder, "optim")]
    models = [read(path) for path in by_rank(folder, "model") or sorted(folder.glob("mp_rank_00_model_states.pt"))]
    if not optimizers or not models or "zero_stage" not in optimizers[0]:
        raise EnvironmentNotReady(
            f"{folder} is no checkpoint of DeepSpeed's ZeRO",
            "give the folder that holds `latest`, or one with *_model_states.pt and *_optim_states.pt",
        )
    counts = optimizers[0]["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else int(counts)
    if ranks != len(optimizers):
        raise EnvironmentNotReady(f"{folder} was written by {ranks} ranks, and files of {len(optimizers)} are there")
    return Dump(folder, models, optimizers)


def by_rank(folder: Path, kind: str) -> list[Path]:
    """Return the files that ranks wrote, in order of rank."""
    found = [
        (match, path)
        for path in folder.glob(f"*zero_pp_rank_*_{kind}_states.pt")
        if (match := RANK.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, key=lambda item: int(item[0][1]))]


def read(path: Path) -> dict[str, Any]:
    """Unpickle a file, its tensors left on disk until they are used."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except ModuleNotFoundError as error:
        raise EnvironmentNotReady(f"{path} needs {error.name} to be read", f"pip install {error.name}") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise EnvironmentNotReady(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def prefix_of(found: list[str], shapes: Shapes, source: Path) -> str:
    """Return what stands before the denoiser's own names. Raises EnvironmentFault when it is another model."""
    first = next(iter(shapes))
    prefixes = [name.removesuffix(first) for name in found if name.endswith(first)] or [""]
    missing = min((sorted(shapes.keys() - {name.removeprefix(p) for name in found}) for p in prefixes), key=len)
    for prefix in prefixes:
        if {name.removeprefix(prefix) for name in found} <= shapes.keys():
            return prefix
    raise EnvironmentNotReady(
        f"{source} is of another model: it has no {', '.join(missing[:3]) or 'such weights'}",
        "set model_family and pretrained_model_name_or_path to what it was trained from",
    )
