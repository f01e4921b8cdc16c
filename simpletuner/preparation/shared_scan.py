"""All ranks scan the images together: one list of files, headers and captions read by free ranks.

Each machine lists its files, since only so it is known whether all have the same. What an earlier start has scanned,
or a killed one has left, is not read again. The result is an Arrow file in output_dir, which all ranks map.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.scan.comparison import DatasetFiles
from simpletuner.data.scan.file_list import FileList, OtherFiles, list_images, table_of
from simpletuner.data.scan.scan import (
    IDENTITY,
    SCANNED,
    Scan,
    forget_folder_times,
    intact_files,
    match_rows,
    open_table,
    remove_all_but,
    scan_files,
    unchanged_files,
    write_folder_times,
    write_table,
)
from simpletuner.data.scan.stale_file_watcher import FileCheck
from simpletuner.data.scan.table_join import TableDescription, describe_files, files_to_read, with_described
from simpletuner.data.storage.storage import LocalStorage, Storage, open_storage
from simpletuner.errors import DataError, EnvironmentNotReady
from simpletuner.parallel.world import World
from simpletuner.preparation.same_data import ListedFiles, verify_same_data
from simpletuner.report import Report
from simpletuner.system.files.atomic import remove
from simpletuner.system.files.late_files import wait_for_files
from simpletuner.system.numbers import count_noun

# Each chunk costs a round trip to the store, which all ranks ask.
CHUNK_FILES = 256
# A rank that is killed loses no more of its work.
PART_SECONDS = 20


NOT_LISTED = FileList(pa.table({}), OtherFiles())


def scan_datasets(
    datasets: Sequence[ImageDataset],
    outputs: Sequence[Path],
    folder: Path,
    world: World,
    report: Report,
    stop: Callable[[], None],
    rescan: bool = False,
    checks: ExitStack | None = None,
) -> list[Scan]:
    """Find the images of all datasets; results are kept below `folder`, unless `rescan`. Collective.

    Nothing in `outputs`, the folders that the run writes into, is found. Where no folder has changed since a
    kept scan, its files count; what looks in the background for rewritten ones is stopped by `checks`. Raises
    DataError on all ranks when a folder is missing, or when machines have other files, and what a store
    raises that does not answer.
    """
    world.activity.begin("finding images")
    if rescan and world.is_first:
        remove(folder)
    scans = [
        SharedScan(dataset, open_storage(dataset, outputs), folder / dataset.id, f"scan/{number}", world, stop)
        for number, dataset in enumerate(datasets)
    ]
    # preserve_data_backend_cache: the user says that the files are as they were, and nothing is listed.
    kept = [scan.preserved() for scan in scans]
    new = [scan for scan, name in zip(scans, kept, strict=True) if not name]
    # Once per machine: only so it is known whether all machines have the same files.
    listed = list_all(new, stop, rescan) if world.local_rank == 0 else ListedFiles()
    verify_same_data(listed, datasets, world, stop)
    files = (each.list for each in listed.datasets)
    found = [
        scan.open(name) if name else scan.run(next(files, NOT_LISTED), report)
        for scan, name in zip(scans, kept, strict=True)
    ]
    if checks is not None and world.local_rank == 0:
        host = "" if world.is_first else f" on {socket.gethostname()}"
        for scan, files in zip(new, listed.datasets, strict=True):
            # `folders` is empty where a kept scan counts without a look at each file, which may be rewritten.
            if isinstance(scan.storage, LocalStorage) and not files.list.folders:
                scan.check_files(checks, host)
    world.barrier()  # what is wrong with the data ends all ranks alike, at one point
    return found


def list_all(scans: Sequence[SharedScan], stop: Callable[[], None], rescan: bool) -> ListedFiles:
    """List the files of datasets; an error is kept, so that all ranks can raise it."""
    listed = ListedFiles()
    try:
        for scan in scans:
            known = None if rescan else scan.unchanged()
            files = known or list_images(scan.dataset, scan.storage, stop)
            listed.datasets.append(DatasetFiles(scan.dataset, scan.storage, files))
    except (DataError, EnvironmentNotReady) as error:
        listed.error = error
    return listed


@dataclass(frozen=True)
class SharedScan:
    """The scan of one dataset by all ranks; `place` is unique among those of a run."""

    dataset: ImageDataset
    storage: Storage
    folder: Path
    place: str
    world: World
    stop: Callable[[], None]

    def run(self, files: FileList, report: Report) -> Scan:
        """Scan what no earlier scan knows. `files` of other ranks than 0 are ignored. Collective."""
        described = cache(lambda: self._describe(files))
        task = self._from_first("task", lambda: self._task(files, described))
        if error := task.get("error"):  # of the table, which only rank 0 reads
            self.world.barrier()
            raise DataError(*error)
        if task["rows"]:
            self._scan_share(task["name"], task["rows"], report)
        if not (name := task["kept"]):
            ranks = self.world.size if task["rows"] else 0
            name = self._from_first("result", lambda: self._merge(files, described, ranks))
        if files.folders:
            write_folder_times(self.folder, self.storage, files, name)
        return self.open(name)

    def unchanged(self) -> FileList | None:
        """Files of a kept scan where no folder has changed since; None where all files must be listed."""
        table = table_of(self.dataset, self.storage)
        for path in self._kept():
            files = unchanged_files(self.folder, self.storage, path)
            if files and files.others.table == (table.version() if table else ""):
                return files
        return None

    def check_files(self, checks: ExitStack, host: str) -> None:
        """Look in the background for files that were rewritten since the kept scan, and warn of them."""
        assert isinstance(self.storage, LocalStorage)
        for path in self._kept()[:1]:
            captions = self.dataset.caption_strategy == "textfile"
            checks.callback(FileCheck(path, self.storage.folder, captions, partial(self._warn, host)).stop)

    def _warn(self, host: str, changed: int, first: str) -> None:
        forget_folder_times(self.folder, self.storage)
        # Its own report: that of a rank above 0 is quiet, and other machines may have other files.
        Report().warn(
            f"dataset `{self.dataset.id}`: {count_noun(changed, 'file')}{host} changed in place since the scan that "
            f"this run uses, the first is {self.storage.describe(first)}",
            "stop and start again to train on what is there now: the next start finds them; --rescan reads all files",
        )

    def preserved(self) -> str:
        """Name of a kept scan that is to be used without a look at the files; empty for none. Collective."""
        if not self.dataset.preserve_data_backend_cache:
            return ""
        return self._from_first("preserved", lambda: next((path.name for path in self._kept() if self._fits(path)), ""))

    def open(self, name: str) -> Scan:
        table, others = self._open(name)
        return Scan(self.dataset, self.storage, table, OtherFiles(**others))

    def _fits(self, path: Path) -> bool:
        """True if a kept scan was made with the current settings of the dataset's table."""
        table = table_of(self.dataset, self.storage)
        return not table or self._open(path.name)[1].get("table", "").startswith(table.settings_id())

    def _describe(self, files: FileList) -> TableDescription | None:
        """Read the table, if there is one. Raises DataError where it cannot be read."""
        if table := table_of(self.dataset, self.storage):
            table = table.with_own_columns()
            return describe_files(table, table.rows(), files.table["name"])
        return None

    def _kept(self) -> list[Path]:
        # Other columns are those of another version.
        return [path for path in intact_files(self.folder, self._kind("scan")) if open_table(path)[0].schema == SCANNED]

    def _task(self, files: FileList, described: Callable[[], TableDescription | None]) -> dict[str, Any]:
        for path in self._kept():
            table, others = open_table(path)
            if table.select(IDENTITY).equals(files.table.select(IDENTITY)) and OtherFiles(**others) == files.others:
                return {"kept": path.name, "rows": 0}
        try:
            needed = files_to_read(files.table, described())
        except DataError as error:
            return {"error": [error.message, error.hint]}
        new = needed.filter(pc.is_null(match_rows(needed, self._known())))
        return {"kept": "", "rows": len(new), "name": write_table(self.folder, "task", new)}

    def _known(self, parts: Iterable[str] = ()) -> pa.Table:
        """Return the rows of earlier scans and of this one, whose files may not be listed yet."""
        paths = [path for kind in ("scan", "part") for path in intact_files(self.folder, self._kind(kind), parts)]
        tables = [open_table(path)[0] for path in paths]
        # The empty table, since Arrow cannot join none. Other columns are those of another version.
        return pa.concat_tables([SCANNED.empty_table(), *(each for each in tables if each.schema == SCANNED)])

    def _kind(self, name: str) -> str:
        encoding = self.dataset.caption_encoding
        if clips := self.dataset.clips:  # of a GIF, frames count only here
            name = f"{name}-video" + "-folders" * bool(clips.frame_folders_fps)
        return f"{name}-{self.dataset.caption_strategy}{f'-{encoding}' if encoding else ''}"

    def _scan_share(self, name: str, rows: int, report: Report) -> None:
        """Read files until none is left, and write what they say. Collective."""
        files, _ = self._open(name)
        with report.progress(f"reading {self.dataset.noun} headers", rows) as progress:
            parts = [write_table(self.folder, self._kind("part"), part) for part in self._parts(files, progress.update)]
            self.world.wait_for_count(f"{self.place}/rows", rows, self.stop, progress.update)
        sizes = {name: (self.folder / name).stat().st_size for name in parts}
        self.world.store.set(f"{self.place}/parts/{self.world.rank}", json.dumps(sizes))
        self.world.store_barrier(f"{self.place}/scanned", self.stop)

    def _parts(self, files: pa.Table, show: Callable[[int], object]) -> Iterator[pa.Table]:
        batches: list[pa.RecordBatch] = []
        begun = time.monotonic()
        while (start := self.world.next_chunk(self.place) * CHUNK_FILES) < len(files):
            self.stop()
            chunk = files.slice(start, CHUNK_FILES).to_pylist()
            batches.append(scan_files(self.dataset, self.storage, chunk))
            show(self.world.add_progress(f"{self.place}/rows", len(chunk)))
            if time.monotonic() - begun > PART_SECONDS:
                yield pa.Table.from_batches(batches)
                batches, begun = [], time.monotonic()
        if batches:
            yield pa.Table.from_batches(batches)

    def _merge(self, files: FileList, described: Callable[[], TableDescription | None], ranks: int) -> str:
        """Sort known and new scans of the first `ranks` in the order of the files; return its name."""
        # Other machines' ranks wrote these; a network file system may show new files late, or not list them.
        texts = [self.world.store.get(f"{self.place}/parts/{rank}") for rank in range(ranks)]
        parts = {name: size for text in texts for name, size in json.loads(text).items()}
        wait_for_files(self.folder, parts, self.stop)
        known, others = self._known(parts), files.others
        table = known.take(match_rows(files.table, known))
        if found := described():
            table, remarks = with_described(self.dataset, files.table, table, found)
            others = replace(
                others, table_remarks=remarks, unmatched_rows=found.unmatched, first_unmatched=found.first_unmatched
            )
        name = write_table(self.folder, self._kind("scan"), table, asdict(others))
        # Last, so that a start after a crash finds the old scan and the parts, or the new scan.
        remove_all_but(self.folder, name)
        return name

    def _open(self, name: str) -> tuple[pa.Table, dict[str, Any]]:
        wait_for_files(self.folder, {name: 0}, self.stop)
        return open_table(self.folder / name)

    def _from_first(self, key: str, make: Callable[[], object]) -> Any:
        return json.loads(self.world.from_first(f"{self.place}/{key}", lambda: json.dumps(make()), self.stop))
