"""What a scan keeps: nothing is read twice, and whatever is found again is what a fresh scan would find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest
import scanning
import torch
import torch.distributed as dist
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.scan.file_list import list_images
from simpletuner.data.scan.scan import Scan
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.errors import EnvironmentNotReady, Stopped
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation import shared_scan
from simpletuner.preparation.shared_scan import SharedScan, scan_datasets
from simpletuner.report import Report


@dataclass(frozen=True)
class CountingStorage(LocalStorage):
    """A folder that remembers which images were opened."""

    opened: list[str] = field(default_factory=list, hash=False, compare=False)

    def open(self, name: str) -> BinaryIO:
        self.opened.append(name)
        return super().open(name)


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(9):
        Image.new("RGB", (64 + number, 64), "red").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"caption {number}\nanother")
    return folder


def scan(
    images: Path, stop: Callable[[], None] = lambda: None, scans: Path | None = None, **values
) -> tuple[Scan, list[str]]:
    """Scan a folder, keeping the result beside it; return also which images were opened."""
    dataset = LocalImages(id="d", instance_data_dir=images, **values)
    storage = CountingStorage(images)
    world = World(0, 1, 0, torch.device("cpu"), dist.HashStore())
    files = list_images(dataset, storage, stop)
    shared = SharedScan(dataset, storage, (scans or images.parent / "scans") / "d", "scan", world, stop)
    return shared.run(files, Report(quiet=True)), storage.opened


def assert_as_fresh(found: Scan) -> None:
    fresh = scanning.scanned(found.dataset, found.storage)
    assert found.table.to_pylist() == fresh.table.to_pylist()
    assert found.others == fresh.others


def test_an_unchanged_folder_is_not_read_again(images):
    first, opened = scan(images)
    assert sorted(opened) == [f"{number}.png" for number in range(9)]
    assert_as_fresh(first)
    again, opened = scan(images)
    assert opened == [] and again.table.equals(first.table)
    assert len(list((images.parent / "scans" / "d").iterdir())) == 1


def test_what_was_added_changed_and_removed_is_noticed_and_nothing_else_is_read(images):
    scan(images)
    (images / "3.png").unlink()
    Image.new("RGB", (99, 64), "blue").save(images / "5.png")
    (images / "7.txt").write_text("another caption")
    (images / "8.txt").unlink()
    shutil.copy(images / "0.png", images / "00.png")
    (images / "x.psd").touch()
    found, opened = scan(images)
    assert sorted(opened) == ["00.png", "5.png", "7.png", "8.png"]
    assert_as_fresh(found)
    assert found.others.not_read == {".psd": 1}


def test_what_was_only_removed_is_noticed_without_reading_anything(images):
    scan(images)
    (images / "3.png").unlink()
    found, opened = scan(images)
    assert opened == [] and len(found.table) == 8
    assert_as_fresh(found)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(images, tmpfs):
    disk = tmpfs("size=4k")
    with pytest.raises(EnvironmentNotReady, match=f"cannot use {disk}/scans/d: No space left on device"):
        scan(images, scans=disk / "scans")
    assert list(disk.rglob(".*")) == []


def test_a_preserved_scan_looks_for_nothing_and_a_rescan_for_everything(images):
    first, _ = scan(images)
    (images / "3.png").unlink()

    def again(**more) -> list[Scan]:
        dataset = LocalImages(id="d", instance_data_dir=images, preserve_data_backend_cache=True)
        return scan_datasets([dataset], [], images.parent / "scans", world, Report(quiet=True), lambda: None, **more)

    with joined_world({}, use_cpu=True) as world:
        assert again()[0].table.equals(first.table)
    with joined_world({}, use_cpu=True) as world:
        assert len(again(rescan=True)[0].table) == 8


def test_captions_are_read_once_they_are_asked_for(images):
    scan(images, caption_strategy="filename")
    found, opened = scan(images)
    assert len(opened) == 9
    assert_as_fresh(found)


def test_captions_are_read_again_in_another_encoding(images):
    (images / "3.txt").write_bytes("ein Bär".encode("latin-1"))
    found, _ = scan(images)
    assert found.table["caption_problem"][3].as_py().startswith("is not UTF-8")
    found, opened = scan(images, caption_encoding="latin-1")
    assert len(opened) == 9 and found.table["captions"][3].as_py() == ["ein Bär"]
    assert_as_fresh(found)


def test_a_damaged_result_is_not_believed(images):
    scan(images)
    (kept,) = (images.parent / "scans" / "d").iterdir()
    whole = kept.read_bytes()
    damaged = [whole[:-1], b"", *(flipped(whole, place) for place in range(0, len(whole), len(whole) // 7))]
    for content in damaged:
        kept.write_bytes(content)
        found, opened = scan(images)
        assert len(opened) == 9
        assert_as_fresh(found)
    kept.unlink()
    kept.mkdir()
    assert_as_fresh(scan(images)[0])


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_a_scan_that_was_stopped_goes_on(images, monkeypatch):
    monkeypatch.setattr(shared_scan, "CHUNK_FILES", 2)
    monkeypatch.setattr(shared_scan, "PART_SECONDS", 0)
    calls = iter(range(100))

    def stop() -> None:
        if next(calls) > 3:
            raise Stopped(15, "stopped")

    with pytest.raises(Stopped):
        scan(images, stop)
    found, opened = scan(images)
    assert 0 < len(opened) < 9
    assert_as_fresh(found)
    assert [path.name for path in (images.parent / "scans" / "d").iterdir() if not path.name.startswith("scan-")] == []


def test_a_name_that_is_no_text_is_kept_with_the_result(images):
    (images / "4.png").rename(images / os.fsdecode(b"caf\xe9.png"))
    for _ in range(2):
        found, _ = scan(images)
        assert found.others.undecodable == ["caf\udce9.png"]


COUNT_THREADS = """
import os, sys
from pathlib import Path
from simpletuner.data.scan.scan import match_rows, open_table
from simpletuner.data.scan.scan import SCANNED
before = len(os.listdir("/proc/self/task"))
table, _ = open_table(Path(sys.argv[1]))
table.take(match_rows(table, table))
print(len(os.listdir("/proc/self/task")) - before, len(table))
"""


def test_reading_a_scan_starts_no_threads(images):
    """Threads of Arrow's pool have aborted finished processes at their exit."""
    scan(images)
    (kept,) = (images.parent / "scans" / "d").iterdir()
    said = subprocess.run([sys.executable, "-c", COUNT_THREADS, str(kept)], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["0", "9"]
