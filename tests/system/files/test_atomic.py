from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from disk_calls import recorded_calls
from patience import PATIENCE
from real_mounts import or_skipped, overlay, tree_of

from simpletuner.errors import SettingsError
from simpletuner.system.files.atomic import (
    atomic_file,
    move_folder,
    read_ahead,
    replace_file,
    replace_folder,
    restore_replaced,
    save,
    unfinished_path,
    write_file,
    write_json,
)
from simpletuner.system.files.checksums import write_with_checksum


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_a_file_is_replaced_with_is_whole_and_a_pipe_stays_one(tmp_path):
    (tmp_path / "a").write_text("old")
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and names(tmp_path) == ["a"]
    (tmp_path / "a").chmod(0o640)
    replace_file(tmp_path / "a", b"newer")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640, "a file of secrets stays one's own"
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_file(tmp_path / "pipe", b"new")
    assert os.read(reader, 9) == b"new" and (tmp_path / "pipe").is_fifo()
    replace_file(Path(f"/proc/self/fd/{os.open(tmp_path / 'pipe', os.O_WRONLY)}"), b"more")
    assert os.read(reader, 9) == b"more", "a name such as /dev/stdout leads to it"
    os.close(reader)
    os.mkfifo(tmp_path / "unread")
    with pytest.raises(SettingsError, match="it is a pipe that nobody reads"):
        save(tmp_path / "unread", "new")
    (tmp_path / "loop").symlink_to("loop")
    save(tmp_path / "loop", "new")
    assert (tmp_path / "loop").read_text() == "new", "a link that leads to itself"


def test_an_unfinished_folder_is_hidden_beside_the_finished_one(tmp_path):
    assert unfinished_path(tmp_path / "checkpoint-000100") == tmp_path / ".checkpoint-000100.unfinished"


def test_replace_folder_puts_the_new_one_in_the_place_of_the_old(tmp_path):
    new, old = tmp_path / "new", tmp_path / "pipeline"
    new.mkdir()
    (new / "a").write_text("new")
    replace_folder(new, old)
    assert names(tmp_path) == ["pipeline"]
    newer = tmp_path / "new"
    newer.mkdir()
    (newer / "b").write_text("newer")
    replace_folder(newer, old)
    assert names(tmp_path) == ["pipeline"]
    assert names(old) == ["b"]


def test_replace_folder_survives_what_a_killed_one_left(tmp_path):
    for name in ("new", "pipeline", ".pipeline.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "pipeline")
    assert names(tmp_path) == ["pipeline"]
    assert names(tmp_path / "pipeline") == ["new"]


def test_json_is_written_readable(tmp_path):
    write_json(tmp_path / "x.json", {"a": [1]})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"a": [1]}
    assert text.endswith("}\n")


def test_replace_folder_loses_nothing_when_the_new_one_cannot_be_renamed(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "weights").write_text("trained")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "never written", tmp_path / "pipeline")
    assert [path.read_text() for path in tmp_path.rglob("weights")] == ["trained"]


def fill(folder: Path, content: str) -> None:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_text(content)
    (folder / "link").symlink_to("inner/weights")
    os.mkfifo(folder / "fifo")


def test_folders_of_a_lower_layer_are_moved_and_replaced_and_a_kill_at_any_call_leaves_one_whole(tmp_path):
    """rename(2) of them is EXDEV: a container whose image has results."""
    for name in ("moved", "replaced", *(f"killed-{number}" for number in range(16))):
        fill(tmp_path / "lower" / name, "old")
    with or_skipped(), overlay(tmp_path) as root:
        root.joinpath("target").mkdir()
        with pytest.raises(OSError, match="cross-device"):
            (root / "moved").rename(root / "target" / "moved")
        move_folder(root / "moved", root / "target" / "moved")
        assert tree_of(root / "target" / "moved") == {"inner/weights": b"old", "link": b"old"}
        assert (root / "target" / "moved" / "link").is_symlink()
        fill(root / "new", "new")
        replace_folder(root / "new", root / "replaced")
        assert tree_of(root / "replaced") == {"inner/weights": b"new", "link": b"new"}
        assert not {"new", "moved", ".replaced.new", ".replaced.old"} & set(names(root))
        seen = set()
        for number in range(16):
            folder = root / f"killed-{number}"
            fill(root / "new", "new")
            killed = killed_at_call(number, partial(replace_folder, root / "new", folder))
            restore_replaced(folder)
            left = tree_of(folder)["inner/weights"]
            assert tree_of(folder) == {"inner/weights": left, "link": left}, number
            assert not [name for name in names(root) if name.startswith(f".{folder.name}")]
            seen.add((killed, left))
            shutil.rmtree(root / "new", ignore_errors=True)
        assert seen == {(True, b"old"), (True, b"new"), (False, b"new")}


def killed_at_call(number: int, action: Callable[[], None]) -> bool:
    """Run an action in a process that is killed before that call of it that renames or removes; return whether."""
    if pid := os.fork():
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    before = itertools.count(-number)

    def kill(event: str, _: tuple) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir") and next(before) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    try:
        action()
    finally:
        os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_content_is_on_the_disk_before_the_name_and_the_name_before_anything_else(tmp_path):
    path, folder = tmp_path / "a", str(tmp_path)
    for write in (write_file, replace_file):
        with recorded_calls() as calls:
            write(path, b"new")
        renamed = calls.index(("rename", str(path), -1))
        [(call, written, size)] = calls[:renamed]
        assert (call, size) == ("sync", 3) and re.fullmatch(rf"{folder}/\.a\.\w+\.unfinished", written)
        assert [call[:2] for call in calls[renamed + 1 :]] == [("sync", folder)]
    with recorded_calls() as calls:
        write_with_checksum(path, [np.zeros(300_000, np.uint8).data], b"head")
    assert calls == [("sync", str(path), 300_004)]


def test_of_writers_at_the_same_moment_the_last_one_wins_and_none_sees_another(tmp_path):
    """With one hidden name for all, half of 1,000 writes by two processes ended with ENOENT or EEXIST."""
    path = tmp_path / "a"
    with atomic_file(path) as first:
        first.write(b"first, ")
        with atomic_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"and last")
    assert path.read_bytes() == b"first, and last" and [path] == list(tmp_path.iterdir())


def test_a_file_that_another_command_has_written_since_it_was_looked_for_is_not_overwritten(tmp_path):
    save(path := tmp_path / "config" / "a.toml", "first", replaces=False)
    with pytest.raises(SettingsError, match="a.toml exists already"):
        save(path, "second", replaces=False)
    assert path.read_text() == "first" and [path] == list(path.parent.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_folder_and_all_that_is_in_it_is_on_the_disk_before_its_name(tmp_path):
    (tmp_path / "new" / "inner").mkdir(parents=True)
    (tmp_path / "new" / "inner" / "weights").write_bytes(b"12345")
    (tmp_path / "new" / "index").write_bytes(b"123")
    os.mkfifo(tmp_path / "new" / "fifo")
    (tmp_path / "new" / "link").symlink_to("/dev/tty")
    (tmp_path / "pipeline").mkdir()
    with recorded_calls() as calls:
        replace_folder(tmp_path / "new", tmp_path / "pipeline")
    renamed = calls.index(("rename", str(tmp_path / "pipeline"), -1))
    synced = [path.removeprefix(f"{tmp_path}/") for call, path, _ in calls[:renamed] if call == "sync"]
    assert sorted(synced) == ["new", "new/index", "new/inner", "new/inner/weights"]
    assert synced.index("new/inner/weights") < synced.index("new/inner") < synced.index("new") == 3
    assert ("sync", f"{tmp_path}/new/inner/weights", 5) in calls
    assert [call[:2] for call in calls[renamed + 1 :]] == [("sync", str(tmp_path))]


@pytest.mark.skipif(sys.platform != "linux", reason="needs posix_fadvise and mincore")
def test_files_are_read_ahead_and_what_cannot_be_read_is_left_out(tmp_path):
    path, fifo = tmp_path / "weights", tmp_path / "fifo"
    path.write_bytes(os.urandom(16 << 20))
    os.mkfifo(fifo)
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_share(path) == 0
    read_ahead([fifo, tmp_path / "missing", path])
    end = time.monotonic() + PATIENCE
    while cached_share(path) < 1:
        assert time.monotonic() < end
        time.sleep(0.01)


def cached_share(path: Path) -> float:
    """Return which share of a file's pages is in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages) == 0
        del first
    return sum(page & 1 for page in pages) / len(pages)
