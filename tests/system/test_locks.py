from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from holders import holder

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import IN_USE
from simpletuner.system.locks import exclusive_lock, is_held, locked, shared_lock


def test_runs_share_a_folder_and_nobody_has_it_alone_until_the_last_is_killed(tmp_path):
    folder = tmp_path / "new" / "cache"
    with holder("cache", folder) as first, holder("cache", folder) as second:
        assert is_held(folder / IN_USE)
        first.kill()
        first.wait()
        with pytest.raises(BlockingIOError):
            locked(folder / IN_USE, exclusive=True)
        second.kill()
        second.wait()
        assert is_held(folder / IN_USE) is False
        os.close(locked(folder / IN_USE, exclusive=True))


def test_a_run_waits_while_its_folder_is_cleared_and_makes_it_again(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    clearing = locked(folder / IN_USE, exclusive=True)
    held = threading.Event()

    def run() -> None:
        with shared_lock([folder]):
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=run)
    thread.start()
    assert not held.wait(0.2)
    (folder / IN_USE).unlink()
    folder.rmdir()
    os.close(clearing)
    assert held.wait(5)
    assert is_held(folder / IN_USE), "a lock on a deleted file is none"
    thread.join()
    assert is_held(folder / IN_USE) is False


def test_whoever_holds_a_file_holds_the_one_that_is_there_though_others_delete_it(tmp_path):
    path, end = tmp_path / IN_USE, time.monotonic() + 0.5
    lost: list[str] = []

    def lock_and_delete() -> None:
        while time.monotonic() < end:
            try:
                descriptor = locked(path, exclusive=True)
            except BlockingIOError:
                continue
            try:
                path.unlink()
            except FileNotFoundError:
                lost.append("somebody else deleted it")
            os.close(descriptor)

    threads = [threading.Thread(target=lock_and_delete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []


def test_a_file_that_another_process_holds_is_waited_for_and_then_given_up(tmp_path):
    path = tmp_path / "blocks.lock"
    with holder("file", path) as process:
        with (
            pytest.raises(EnvironmentNotReady, match=r"another process holds .*blocks\.lock: waited 0 s"),
            exclusive_lock(path, patience_seconds=0.1),
        ):
            pass
        threading.Timer(0.2, process.kill).start()
        with exclusive_lock(path):
            assert is_held(path)


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EnvironmentNotReady, match="cannot write to the cache"),
        shared_lock([tmp_path / "file" / "cache"]),
    ):
        pass


@pytest.fixture
def read_only(tmp_path) -> Path:
    """Return a folder of a file system that cannot be written."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_folder_that_can_only_be_read_is_used_without_a_hold(read_only):
    began = time.monotonic()
    with shared_lock([read_only]):
        assert list(read_only.iterdir()) == []
    assert time.monotonic() - began < 5
