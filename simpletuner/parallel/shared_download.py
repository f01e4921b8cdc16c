"""Download images that are given by their addresses, once per machine, or once where machines share the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from simpletuner.data.dataset_kinds import ImageDataset, UrlImages
from simpletuner.data.discovery import format_names
from simpletuner.data.downloads import as_folder, download, read_urls
from simpletuner.errors import DataError, EnvironmentNotReady, RemoteFailure
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.system.numbers import count_noun


def download_datasets(
    datasets: Sequence[ImageDataset], world: World, report: Report, stop: Callable[[], None]
) -> list[ImageDataset]:
    """Return datasets with folders in the place of lists of addresses, after downloading them. Collective.

    Raises, on all ranks, what ends the run on one of them.
    """
    listed = [dataset for dataset in datasets if isinstance(dataset, UrlImages)]
    if not listed:
        return list(datasets)
    world.activity.begin("downloading images")
    # The first machine before the others, which find all of it done where they share the folder.
    turns = {"first": world.is_first, "others": world.local_rank == 0 and not world.is_first}
    for name, is_turn in turns.items():
        error = download_all(listed, report, stop) if is_turn else []
        world.store_barrier(f"download/{name}", stop, math.inf)
        for other in map(json.loads, world.gather_texts(json.dumps(error))):
            if other:
                raise RemoteFailure(*other)
    return [as_folder(each) if isinstance(each, UrlImages) else each for each in datasets]


def download_all(datasets: Sequence[UrlImages], report: Report, stop: Callable[[], None]) -> list[int | str]:
    """Download the images of all lists; return exit code, sentence and hint of an error, or nothing."""
    try:
        for dataset in datasets:
            download_one(dataset, report, stop)
    except (DataError, EnvironmentNotReady) as error:
        return [int(error.exit_code), error.message, error.hint]
    return []


def download_one(dataset: UrlImages, report: Report, stop: Callable[[], None]) -> None:
    with report.progress(f"downloading images of {dataset.id}", len(read_urls(dataset))) as progress:
        found = download(dataset, stop, progress.update)
    if found.unreachable:
        named = format_names([f"{url}: {why}" for url, why in found.unreachable.items()])
        raise EnvironmentNotReady(
            f"dataset `{dataset.id}`: {count_noun(len(found.unreachable), 'image')} cannot be downloaded:{named}",
            "run the same command again: it goes on where it stopped; remove rows of hosts that are gone from csv_file",
        )
    if found.lost:
        named = format_names([f"{url}: {why}" for url, why in found.lost.items()])
        report.warn(
            f"dataset `{dataset.id}`: {count_noun(len(found.lost), 'address')} without an image left out:{named}"
        )
