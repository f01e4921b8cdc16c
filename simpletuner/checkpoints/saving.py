"""Save a run's state on all ranks together, and read it back on any number of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.checkpoints.layout import STATE, folder_of_step, prune, sizes
from simpletuner.checkpoints.tensors import (
    FILE_FAULTS,
    NamedTensors,
    reason,
    write_full,
    write_sharded,
)
from simpletuner.checkpoints.verification import checksums
from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.world import World
from simpletuner.system.checksums import with_checksum
from simpletuner.system.files import replace_folder, unfinished_path, write_json

WEIGHTS_STEM = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds: groups of named tensors, each made when it is written, and all the rest; `config` is
    the denoiser's."""

    step: int
    groups: Mapping[str, Callable[[], NamedTensors]]
    state: dict[str, Any]
    config: dict[str, Any]


def save(root: Path, snapshot: Snapshot, world: World, full: bool, keep: int) -> Path:
    """Write a checkpoint to a hidden folder, rename it when complete, keep the newest `keep`. Collective.

    Raises EnvironmentFault on all ranks when any of them cannot write; older checkpoints stay as they are.
    """
    folder = folder_of_step(root, snapshot.step)
    hidden = unfinished_path(folder)
    together(world, hidden, lambda: prepare(hidden, world))
    for group, make in snapshot.groups.items():
        tensors = make()
        if full:
            together(world, hidden, write_full(hidden / group, tensors, world, WEIGHTS_STEM))
        else:
            together(world, hidden, lambda group=group, tensors=tensors: write_sharded(hidden / group, tensors))
    together(world, hidden, lambda: write_config(hidden, snapshot, world))
    sums = checksums(hidden, world)
    together(world, hidden, lambda: complete(hidden, folder, snapshot, sums, world))
    if world.is_first:
        prune(root, keep)
    return folder


def together(world: World, hidden: Path, action: Callable[[], None]) -> None:
    """Do something on every rank; if it fails on any, remove the unfinished folder and raise the same fault on all."""
    problem = ""
    try:
        action()
    except FILE_FAULTS as error:
        problem = reason(error)
    problems = sorted({text for text in world.gather_texts(problem) if text})
    if problems:
        if world.is_first:
            shutil.rmtree(hidden, ignore_errors=True)
        raise EnvironmentNotReady(
            f"cannot save to {hidden.parent}: {'; '.join(problems)}",
            "make room and run the same command again: it resumes from the newest complete checkpoint",
        )


def prepare(hidden: Path, world: World) -> None:
    """Make an empty folder to write into."""
    if world.is_first:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)


def write_config(hidden: Path, snapshot: Snapshot, world: World) -> None:
    """Write the denoiser's config.json."""
    if world.is_first:
        write_json(hidden / "model" / "config.json", snapshot.config)


def complete(hidden: Path, folder: Path, snapshot: Snapshot, sums: Mapping[str, str], world: World) -> None:
    """Write the state with every file's size and checksum, and give the folder its name."""
    if world.is_first:
        write_state(hidden, {"step": snapshot.step, **snapshot.state}, sums)
        replace_folder(hidden, folder)


def write_state(hidden: Path, state: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Write state.json, which makes a folder a checkpoint."""
    write_json(
        hidden / STATE, with_checksum({**state, "files": sizes(hidden), "checksums": dict(sorted(sums.items()))})
    )
