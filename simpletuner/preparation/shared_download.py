"""Downloads of datasets named by address or hub id, once per machine or folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeGuard

from simpletuner.data.config.dataset_types import ImageDataset, SnapshotImages, UrlImages
from simpletuner.data.samples.discovery import format_names
from simpletuner.data.storage.hub_datasets import HubFiles, as_fetched, fetch_files, find_files
from simpletuner.data.tables.downloads import as_folder, download, read_urls
from simpletuner.errors import DataError, EnvironmentNotReady, RemoteFailure
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.regular_files import read_state
from simpletuner.system.numbers import count_noun


def download_datasets(
    datasets: Sequence[ImageDataset],
    world: World,
    report: Report,
    stop: Callable[[], None],
    record: Path | None = None,
    renew: bool = False,
) -> list[ImageDataset]:
    """Download datasets named by address or hub id, and return them with local folders. Collective.

    `record` is the file that keeps which commits of the hub a run trains on; with `renew` they are asked for
    again. Raises, on all ranks, what ends the run on one of them.
    """
    listed = [each for each in datasets if isinstance(each, UrlImages) or is_on_hub(each)]
    if not listed:
        return list(datasets)
    world.activity.begin("downloading images")
    hub = find_on_hub([each for each in listed if is_on_hub(each)], world, report, stop, None if renew else record)
    if record is not None and world.is_first and hub:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, {name: asdict(found) for name, found in hub.items()})
    # The first machine before the others, which find all of it done where they share the folder.
    turns = {"first": world.is_first, "others": world.local_rank == 0 and not world.is_first}
    for name, is_turn in turns.items():
        error = download_all(listed, hub, report, stop) if is_turn else []
        world.store_barrier(f"download/{name}", stop, math.inf)
        for other in map(json.loads, world.gather_texts(json.dumps(error))):
            if other:
                raise RemoteFailure(*other)
    return [fetched(each, hub) for each in datasets]


def is_on_hub(dataset: ImageDataset) -> TypeGuard[SnapshotImages]:
    return isinstance(dataset, SnapshotImages) and dataset.is_on_hub


def fetched(dataset: ImageDataset, hub: Mapping[str, HubFiles]) -> ImageDataset:
    if isinstance(dataset, UrlImages):
        return as_folder(dataset)
    return as_fetched(dataset, hub[dataset.id]) if is_on_hub(dataset) else dataset


def find_on_hub(
    datasets: Sequence[SnapshotImages], world: World, report: Report, stop: Callable[[], None], record: Path | None
) -> dict[str, HubFiles]:
    """Return the commit and the files of each dataset, which rank 0 asks the hub for, by id. Collective.

    What the record of an earlier start has counts: a run that resumes trains on what it began with.
    """
    if not datasets:
        return {}

    def find() -> str:
        known = read_record(record, report)
        try:
            found = {
                each.id: known[each.id] if each.id in known and known[each.id].is_of(each) else find_files(each)
                for each in datasets
            }
        except (DataError, EnvironmentNotReady) as error:
            return json.dumps({"error": [int(error.exit_code), error.message, error.hint]})
        return json.dumps({"found": {name: asdict(each) for name, each in found.items()}})

    answer = json.loads(world.from_first("hub", find, stop))
    if "error" in answer:
        raise RemoteFailure(*answer["error"])
    found = {name: HubFiles(**values) for name, values in answer["found"].items()}
    for name, each in found.items():
        report.say(f"dataset `{name}`: {each.dataset_name} of the hub at {each.commit[:12]}")
    return found


def read_record(record: Path | None, report: Report) -> dict[str, HubFiles]:
    """Read the files that an earlier start found, by id; empty without a readable record."""

    def parse(content: bytes) -> dict[str, HubFiles]:
        return {name: HubFiles(**values) for name, values in json.loads(content).items()}

    return (read_state(record, parse, report.warn) if record else None) or {}


Fetchable = UrlImages | SnapshotImages


def download_all(
    datasets: Sequence[Fetchable], hub: Mapping[str, HubFiles], report: Report, stop: Callable[[], None]
) -> list[int | str]:
    """Download the files of all datasets; return exit code, sentence and hint of an error, or nothing."""
    try:
        for dataset in datasets:
            if isinstance(dataset, UrlImages):
                download_one(dataset, report, stop)
            else:
                files = hub[dataset.id]
                with report.progress(f"fetching {files.dataset_name}", len(files.files)) as progress:
                    fetch_files(dataset, files, stop, progress.update)
    except (DataError, EnvironmentNotReady) as error:
        return [int(error.exit_code), error.message, error.hint]
    return []


def download_one(dataset: UrlImages, report: Report, stop: Callable[[], None]) -> None:
    with report.progress(f"downloading {dataset.noun}s of {dataset.id}", len(read_urls(dataset))) as progress:
        found = download(dataset, stop, progress.update)
    if found.unreachable:
        named = format_names([f"{url}: {why}" for url, why in found.unreachable.items()])
        raise EnvironmentNotReady(
            f"dataset `{dataset.id}`: {count_noun(len(found.unreachable), dataset.noun)} cannot be downloaded:{named}",
            "run the same command again: it goes on where it stopped; remove rows of hosts that are gone from csv_file",
        )
    if found.lost:
        named = format_names([f"{url}: {why}" for url, why in found.lost.items()])
        a_noun = "a video" if dataset.clips else "an image"
        report.warn(
            f"dataset `{dataset.id}`: {count_noun(len(found.lost), 'address')} without {a_noun} left out:{named}"
        )
