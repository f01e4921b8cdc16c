"""What two ranks find out about their data and folders, in one world for many cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.discovery import discover
from simpletuner.errors import SimpleTunerError
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.same_data import verify_same_folders
from simpletuner.preparation.shared_scan import scan_datasets
from simpletuner.report import Report
from simpletuner.settings.values.shape import Shape


def compare(cases: str, report: str) -> None:
    """Compare the folders `rank0` and `rank1` of every case; write what each rank said, by case, into `report`."""
    with joined_world() as world:
        said: dict[str, list[str]] = {}
        for case in sorted(Path(cases).iterdir()):
            own = replace(world, store=dist.PrefixStore(case.name, world.store))
            said[case.name] = world.gather_texts(answer(compared, own, case))
            said[f"{case.name}, folders"] = world.gather_texts(answer(probed, own, case))
        if world.is_first:
            Path(report).write_text(json.dumps(said))


def answer(compare: Callable[[World, Path], str], world: World, case: Path) -> str:
    """Return what a comparison says, or with which exit code and sentence it ends."""
    try:
        return compare(world, case)
    except SimpleTunerError as error:
        return f"{int(error.exit_code)}: {error.message}"


def compared(world: World, case: Path) -> str:
    """Return the id and version of every sample that is agreed on."""
    folder, world = case / f"rank{world.rank}", replace(world, local_rank=0, machine=world.rank)
    values = json.loads((case / f"rank{world.rank}.json").read_text())
    datasets = [LocalImages(id="d", instance_data_dir=folder, resolution=64, **values)]
    scans = scan_datasets(datasets, [], case / "scan", world, Report(quiet=True), lambda: None)
    return " ".join(f"{sample.id}={sample.version}" for sample in discover(scans, Shape(1, 64, 64), 0).samples)


def probed(world: World, case: Path) -> str:
    """Return nothing if the folder `out` is the same one; a case may give rank 1 another by the file `apart`."""
    out = case / (f"out{world.rank}" if (case / "apart").exists() else "out")
    verify_same_folders([("output_dir", out)], world, lambda: None, "probe")
    return ""
