"""A kept scan of many files is used where no folder has changed, and files that were rewritten are noticed later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import scanning
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.scan import scan as folder_times
from simpletuner.data.scan.comparison import digest_of
from simpletuner.data.scan.file_list import list_images
from simpletuner.data.scan.scan import Scan
from simpletuner.data.scan.stale_file_watcher import FileCheck
from simpletuner.parallel.world import joined_world
from simpletuner.preparation import shared_scan
from simpletuner.preparation.shared_scan import scan_datasets
from simpletuner.report import Report

BEFORE = time.time() - 100
running: list[ExitStack] = []
"""What stops the checks of a test."""


@pytest.fixture
def images(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder that was last changed some time ago."""
    monkeypatch.setattr(folder_times, "FEW_FILES", 1)
    folder = tmp_path / "images"
    for place in (".", "a", "a/b", "empty"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for name in ("1.png", "a/2.png", "a/b/3.png"):
        write(folder / name)
    (folder / "a" / "cut.png").write_bytes(b"no image")
    settle(folder)
    yield folder
    while running:
        running.pop().close()


def write(path: Path, color: str = "red") -> None:
    Image.new("RGB", (64, 64), color).save(path)
    path.with_suffix(".txt").write_text(f"{color} {path.stem}")


def settle(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (BEFORE, BEFORE))


def scan(images: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Scan, bool, ExitStack]:
    """Scan a folder; return also whether its files were listed, and what stops the checks."""
    listed: list[Path] = []

    def list_noted(dataset, *more):
        listed.append(dataset.instance_data_dir)
        return list_images(dataset, *more)

    monkeypatch.setattr(shared_scan, "list_images", list_noted)
    checks = ExitStack()
    running.append(checks)
    dataset = LocalImages(id="d", instance_data_dir=images)
    with joined_world({}, use_cpu=True) as world:
        (found,) = scan_datasets(
            [dataset], [], images.parent / "scans", world, Report(quiet=True), lambda: None, checks=checks
        )
    return found, bool(listed), checks


def assert_as_fresh(found: Scan) -> None:
    fresh = scanning.scanned(found.dataset, found.storage)
    assert found.table.to_pylist() == fresh.table.to_pylist() and found.others == fresh.others


def test_files_are_listed_again_where_a_folder_has_changed(images, monkeypatch):
    first, was_listed, _ = scan(images, monkeypatch)
    assert was_listed
    changes = [
        lambda: write(images / "empty" / "new.png"),
        lambda: (images / "a" / "2.png").rename(images / "a" / "9.png"),
        lambda: (images / "a" / "b" / "3.txt").unlink(),
        lambda: ((images / "more").mkdir(), write(images / "more" / "4.png")),
        lambda: (images / "1.png").unlink(),
    ]
    for change in changes:
        again, was_listed, checks = scan(images, monkeypatch)
        checks.close()
        assert not was_listed and again.table.equals(scan(images, monkeypatch)[0].table)
        change()
        found, was_listed, _ = scan(images, monkeypatch)
        assert was_listed
        assert_as_fresh(found)
        assert scan(images, monkeypatch)[1], "another change in the same second would not show"
        settle(images)
        assert_as_fresh(scan(images, monkeypatch)[0])
    assert len(first.table) == 4 and len(found.table) == 5
    monkeypatch.setattr(folder_times, "KEEP_TIMES", frozenset())
    assert scan(images, monkeypatch)[1], "other file systems may not keep the times of folders"


def test_a_file_that_was_rewritten_is_named_and_read_by_the_next_start(images, monkeypatch, capsys):
    first, _, _ = scan(images, monkeypatch)
    write(images / "a" / "2.png", "blue")
    (images / "a" / "b" / "3.txt").write_text("new")
    os.utime(images / "a", (BEFORE, BEFORE))
    found, was_listed, checks = scan(images, monkeypatch)
    assert not was_listed and found.table.equals(first.table)
    said, end = "", time.monotonic() + 300
    while "--rescan" not in said:
        assert time.monotonic() < end
        said += "".join(capsys.readouterr())
        time.sleep(0.02)
    checks.close()
    assert "dataset `d`: 2 files changed in place since the scan" in said and f"the first is {images}/a/2.png" in said
    found, was_listed, _ = scan(images, monkeypatch)
    assert was_listed and found.table["captions"].to_pylist()[1:3] == [["blue 2"], ["new"]]
    assert_as_fresh(found)


def test_a_check_ends_with_the_run(images, monkeypatch, capsys):
    scan(images, monkeypatch)
    write(images / "a" / "2.png", "blue")
    os.utime(images / "a", (BEFORE, BEFORE))
    started: list[FileCheck] = []
    monkeypatch.setattr(shared_scan, "FileCheck", lambda *given: started.append(FileCheck(*given)) or started[-1])
    scan(images, monkeypatch)[2].close()
    (check,) = started
    assert check.process.returncode is not None
    assert "changed in place" not in "".join(capsys.readouterr())


def test_a_machine_that_lists_files_agrees_with_one_that_uses_a_kept_scan(images, monkeypatch):
    found, _, _ = scan(images, monkeypatch)
    (kept,) = (images.parent / "scans" / "d").glob("scan-*")
    fresh = list_images(found.dataset, found.storage, lambda: None)
    known = folder_times.unchanged_files(kept.parent, found.storage, kept)
    assert known is not None and digest_of([known.table]) == digest_of([fresh.table])
    assert known.table.to_pylist() == fresh.table.to_pylist() and known.others == fresh.others
