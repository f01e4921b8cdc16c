"""What two machines download, in one world for many cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from comparing import answer

from simpletuner.data.config.dataset_types import UrlImages
from simpletuner.data.samples.discovery import discover
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.shared_download import download_datasets
from simpletuner.preparation.shared_scan import scan_datasets
from simpletuner.report import Report
from simpletuner.settings.values.shape import Shape


def download_cases(cases: str, report: str) -> None:
    """Download the list of every case on two ranks as if each was a machine; write what each found into `report`."""
    with joined_world() as world:
        said: dict[str, list[str]] = {}
        for case in sorted(Path(cases).iterdir()):
            own = replace(world, store=dist.PrefixStore(case.name, world.store), local_rank=0, machine=world.rank)
            said[case.name] = world.gather_texts(answer(downloaded, own, case))
        if world.is_first:
            Path(report).write_text(json.dumps(said))


def downloaded(world: World, case: Path) -> str:
    """Return the captions of all images, from `shared` if the case has that folder, else from one of each rank."""
    folder = case / ("shared" if (case / "shared").exists() else f"rank{world.rank}")
    keys = {"caption_strategy": "csv", "csv_caption_column": "text", "resolution": 64}
    dataset = UrlImages(id="d", type="csv", csv_file=case / "urls.csv", csv_cache_dir=folder, **keys)
    datasets = download_datasets([dataset], world, Report(quiet=True), lambda: None)
    scans = scan_datasets(datasets, [], case / "scan", world, Report(quiet=True), lambda: None)
    return " ".join(caption for sample in discover(scans, Shape(1, 64, 64), 0).samples for caption in sample.captions)
