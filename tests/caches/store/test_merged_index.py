"""The merged index: it finds what the shards' own indexes hold, whatever happens to it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE

from simpletuner.caches.store import shards
from simpletuner.caches.store.records import RecordLocation
from simpletuner.caches.store.shard_index import MergedIndex, list_sources, load, merge, open_index, read_indexes
from simpletuner.caches.store.shards import ShardReader, ShardWriter
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.cache_files import MERGED_INDEX

NAMES, VERSIONS = "abc", "12"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Not a disk: writing and merging wait for it."""


def written(folder: Path, *names: str, rank: int = 0, version: str = "1") -> Path:
    with ShardWriter(folder, rank) as writer:
        for name in names:
            writer.write(name, {"file": version}, {"t": torch.tensor([float(ord(name[0]))])})
    return folder


def by_reading_all_lines(folder: Path) -> dict[tuple[str, str], tuple[Path, int, str, str]]:
    """Return where each record is as if there were no merged index: of equal ones the last, without retracted ones."""
    entries = list(read_indexes(folder))
    retracted = {entry.retracts for entry in entries}
    places = [entry.location for entry in entries if not entry.retracts]
    kept = [place for place in places if (place.shard.name, place.offset) not in retracted]
    return {(place.name, place.parts["file"]): facts(place) for place in kept}


def facts(place: RecordLocation) -> tuple[Path, int, str, str]:
    return place.shard, place.offset, place.broken, place.checksum


def by_the_index(reader: ShardReader) -> dict[tuple[str, str], tuple[Path, int, str, str]]:
    found = {(name, version): reader.find(name, {"file": version}) for name in NAMES for version in VERSIONS}
    return {key: facts(place) for key, place in found.items() if place is not None}


def write(folder: Path, rank: int, names: list[str], version: str) -> None:
    written(folder, *names, rank=rank, version=version)


def write_broken(folder: Path, rank: int, names: list[str], version: str) -> None:
    with ShardWriter(folder, rank) as writer:
        for name in names:
            writer.write_broken(name, {"file": version}, f"cut short {rank}")


def retract(folder: Path, rank: int, names: list[str], version: str) -> None:
    reader = ShardReader(folder)
    with ShardWriter(folder, 999) as writer:
        for place in filter(None, (reader.find(name, {"file": version}) for name in names)):
            writer.retract(place)


def delete(folder: Path, rank: int, names: list[str], version: str) -> None:
    for path in sorted(folder.glob("rank*.shard"))[rank : rank + 1]:
        path.unlink()


def truncate(folder: Path, rank: int, names: list[str], version: str) -> None:
    for path in sorted(folder.glob("rank*.shard"))[rank : rank + 1]:
        os.truncate(path, path.stat().st_size // 2)


STEP = st.tuples(
    st.sampled_from([write, write, write_broken, retract, delete, truncate]),
    st.integers(0, 2),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    st.sampled_from(VERSIONS),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=7))
def test_it_finds_what_all_lines_say_however_often_it_was_merged(steps):
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        for change, *arguments in steps:
            change(folder, *arguments)
            assert by_the_index(ShardReader(folder)) == by_reading_all_lines(folder)
        merged, again = open_index(folder), merge(folder, list_sources(folder), MergedIndex())
        assert rows(merged) == rows(again), "merging step by step is merging at once"


def rows(index: MergedIndex) -> list[tuple[int | bytes | str, ...]]:
    columns = [index.high, *(index.rows[name] for name in ("low", "offset", "length", "checksum", "shard"))]
    reasons = [index.reason(row) for row in range(len(index.rows))]
    return list(zip(*(column.tolist() for column in columns), reasons, strict=True))


def test_a_current_index_is_opened_without_reading_a_line(tmp_path):
    written(tmp_path, "a", "b")
    open_index(tmp_path)
    index, inode = tmp_path / "rank000-00000.index.jsonl", (tmp_path / MERGED_INDEX).stat().st_ino
    times = index.stat()
    index.write_bytes(bytes(times.st_size))
    os.utime(index, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert by_the_index(ShardReader(tmp_path)).keys() == {("a", "1"), ("b", "1")}
    written(tmp_path, "c", rank=1)
    assert by_the_index(ShardReader(tmp_path)).keys() == {("a", "1"), ("b", "1"), ("c", "1")}, "only new lines are read"
    assert (tmp_path / MERGED_INDEX).stat().st_ino != inode
    os.utime(index)
    assert by_the_index(ShardReader(tmp_path)).keys() == {("c", "1")}, "a changed index is read"


def test_any_flipped_bit_and_any_cut_is_noticed_and_repaired(tmp_path):
    written(tmp_path, "a", "b")
    write_broken(tmp_path, 1, ["c"], "1")
    wanted, path = by_the_index(ShardReader(tmp_path)), tmp_path / MERGED_INDEX
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        for content in (damaged, whole[:place]):
            path.write_bytes(content)
            with pytest.raises(ValueError):
                load(path)
            if place % 64 == 0:
                assert by_the_index(ShardReader(tmp_path)) == wanted
                assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0")
    assert by_the_index(ShardReader(tmp_path)) == wanted
    assert path.read_bytes() == whole


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("/etc/hostname"), Path.mkdir])
def test_something_else_in_its_place_is_replaced_or_left(tmp_path, make: Callable[[Path], object]):
    written(tmp_path, "a")
    make(tmp_path / MERGED_INDEX)
    for _ in range(2):
        assert by_the_index(ShardReader(tmp_path)).keys() == {("a", "1")}
    assert (tmp_path / MERGED_INDEX).is_dir() == (make is Path.mkdir)
    assert Path("/etc/hostname").read_bytes()


def test_where_it_cannot_be_written_it_is_kept_in_memory(tmp_path):
    written(tmp_path, "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # rights of a folder would not stop root
    try:
        reader = ShardReader(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reader.read(reader.find("a", {"file": "1"}))["t"] == 97
    assert not [path for path in tmp_path.iterdir() if MERGED_INDEX in path.name]


MERGE_UNTIL_KILLED = """
import os, signal, sys, time
from pathlib import Path
from simpletuner.caches.store.shard_index import open_index

folder = Path(sys.argv[1])
open_index(folder)  # on a loaded machine no other one may be completed
for turn in range(12):
    child = os.fork()
    if child == 0:
        while True:
            os.utime(folder / "rank000-00000.index.jsonl")
            open_index(folder)
    time.sleep(0.02 + 0.003 * turn)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_merge_killed_at_any_moment_leaves_a_folder_that_opens_and_can_be_cleared(tmp_path):
    from simpletuner.system.files.cache_files import files_of

    written(tmp_path, *NAMES * 50)
    wanted = by_reading_all_lines(tmp_path)
    subprocess.run([sys.executable, "-c", MERGE_UNTIL_KILLED, tmp_path], check=True, timeout=PATIENCE)
    for name in ("", ".0123abcd"):  # of an earlier version, and of this one
        (tmp_path / f".{MERGED_INDEX}{name}.unfinished").write_bytes(b"torn")
    ours, others = files_of(tmp_path)
    assert len(ours) >= 5 and not others
    os.utime(tmp_path / "rank000-00000.index.jsonl")
    assert by_the_index(ShardReader(tmp_path)) == wanted


def test_processes_that_merge_at_once_all_find_everything(tmp_path):
    written(tmp_path, *NAMES * 100)
    code = """
import os, sys
from pathlib import Path
from simpletuner.caches.store.shard_index import open_index
from simpletuner.caches.store.records import record_keys
for _ in range(10):
    os.utime(Path(sys.argv[1]) / "rank000-00000.index.jsonl")
    assert open_index(Path(sys.argv[1])).find(record_keys([("b", {"file": "1"})])) >= 0
"""
    running = [subprocess.Popen([sys.executable, "-c", code, tmp_path]) for _ in range(2)]
    assert [process.wait(PATIENCE) for process in running] == [0, 0]


def test_a_retracted_record_is_gone_and_another_one_of_the_same_parts_takes_its_place(tmp_path):
    written(tmp_path, "a")
    written(tmp_path, "a", rank=1)
    for shard in ("rank001-00000.shard", "rank000-00000.shard"):
        reader = ShardReader(tmp_path)
        place = reader.find("a", {"file": "1"})
        assert place.shard.name == shard
        path = tmp_path / shard
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        with pytest.raises(EnvironmentNotReady):
            reader.read(place)
    assert ShardReader(tmp_path).find("a", {"file": "1"}) is None


def test_the_number_of_open_files_and_maps_does_not_grow_with_the_number_of_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAPS", 20)
    with ShardWriter(tmp_path, 0, shard_bytes=1) as writer:
        for number in range(200):
            writer.write(str(number), {}, {"t": torch.tensor([float(number)])})
    reader = ShardReader(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 10, hard))
    try:
        kept = [reader.read(reader.find(str(number), {}))["t"] for number in range(200)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(tensor) for tensor in kept] == list(range(200)), "a tensor keeps its map"
    del kept
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(f"{tmp_path}/rank" in line for line in maps) == 20


def test_a_folder_copied_elsewhere_opens(tmp_path):
    written(tmp_path / "here", "a")
    open_index(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)  # with other times
    shutil.rmtree(tmp_path / "here")
    reader = ShardReader(tmp_path / "there")
    assert reader.read(reader.find("a", {"file": "1"}))["t"] == 97
