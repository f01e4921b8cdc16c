from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from holders import holder
from patience import PATIENCE

from simpletuner.errors import EnvironmentNotReady, ExitCode, Stopped
from simpletuner.system.files.cache_files import IN_USE
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.lease_folder import FolderPlace, held_folder, holder_of, shared_folders
from simpletuner.system.files.lease_record import Record
from simpletuner.system.files.locks import (
    RUN_LOCK,
    exclusive_lock,
    is_locked,
    lock_file,
    sole_writer,
)
from simpletuner.system.processes.signals import StopRequest


def test_runs_share_a_folder_and_nobody_has_it_alone_until_the_last_is_killed(tmp_path):
    folder = tmp_path / "new" / "cache"
    with holder("cache", folder) as first, holder("cache", folder) as second:
        assert is_locked(folder / IN_USE)
        first.kill()
        first.wait()
        with pytest.raises(BlockingIOError):
            lock_file(folder / IN_USE, exclusive=True)
        second.kill()
        second.wait()
        assert is_locked(folder / IN_USE) is False
        os.close(lock_file(folder / IN_USE, exclusive=True))


def test_a_run_waits_while_its_folder_is_cleared_and_makes_it_again(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    clearing = lock_file(folder / IN_USE, exclusive=True)
    held = threading.Event()

    def run() -> None:
        with shared_folders([folder]):
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=run)
    thread.start()
    assert not held.wait(0.2)
    (folder / IN_USE).unlink()
    folder.rmdir()
    os.close(clearing)
    assert held.wait(PATIENCE)
    assert is_locked(folder / IN_USE), "a lock on a deleted file is none"
    thread.join()
    assert is_locked(folder / IN_USE) is False


def test_whoever_holds_a_file_holds_the_one_that_is_there_though_others_delete_it(tmp_path):
    path, end = tmp_path / IN_USE, time.monotonic() + 0.5
    lost: list[str] = []

    def lock_and_delete() -> None:
        while time.monotonic() < end:
            try:
                descriptor = lock_file(path, exclusive=True)
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
            exclusive_lock(path, timeout_seconds=0.1),
        ):
            pass
        threading.Timer(0.2, process.kill).start()
        with exclusive_lock(path):
            assert is_locked(path)


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EnvironmentNotReady, match="cannot write to the cache"),
        shared_folders([tmp_path / "file" / "cache"]),
    ):
        pass


@pytest.fixture
def read_only(tmpfs) -> Path:
    """Return a folder of a file system that cannot be written."""
    return tmpfs("ro")


def test_a_folder_that_can_only_be_read_is_used_without_a_hold(read_only):
    began = time.monotonic()
    with shared_folders([read_only]):
        assert list(read_only.iterdir()) == []
    assert time.monotonic() - began < 5


HOLD = """
import sys
from pathlib import Path
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.lease_folder import held_folder
with held_folder(Path(sys.argv[1]), Lease()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_that_the_folder_is_in_use_until_the_first_ends(tmp_path):
    output = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentNotReady) as caught, held_folder(output, Lease()):
            raise AssertionError("entered a folder in use")
        assert caught.value.message == f"another run is using {output} (pid {first.pid} on {socket.gethostname()})"
        assert "--output_dir" in caught.value.hint
        assert caught.value.exit_code == ExitCode.ENVIRONMENT

        # its launcher has died, so it may be about to end: that is waited for, unless a signal comes
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            pass
        (output / ".lock").write_text(f"{socket.gethostname()} {dead.pid}\n")
        request, said = StopRequest(), []
        request.signal_number = int(signal.SIGTERM)
        with pytest.raises(Stopped), held_folder(output, Lease(), request.check, said.append):
            raise AssertionError("entered a folder in use")
        threading.Timer(0.5, first.kill).start()
        with held_folder(output, Lease(), say=said.append):
            assert output.is_dir()
        assert said == [f"waiting up to 30 s for an earlier run to release {output}"]


def test_who_holds_a_folder_is_written_over_a_longer_name(tmp_path):
    (tmp_path / ".lock").write_text(f"a-host-with-a-very-long-name.{'x' * 600}.example 4194304\n")
    with held_folder(tmp_path, Lease()):
        record, _ = holder_of(tmp_path / ".lock")
        assert (record.host, record.pid) == (socket.gethostname(), os.getpid())


def test_a_folder_can_be_used_again_after_a_failure(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), held_folder(tmp_path / "run", Lease()):
            raise RuntimeError
        assert not (tmp_path / "run").exists(), "a start that was refused leaves no folder"
    with held_folder(tmp_path / "run", Lease()):
        (tmp_path / "run" / "log.txt").touch()
    with pytest.raises(RuntimeError), held_folder(tmp_path / "run", Lease()):
        raise RuntimeError
    assert (tmp_path / "run" / "log.txt").exists()


def test_who_holds_a_folder_runs_here_only_if_the_machine_is_this_one_whoever_owns_it(monkeypatch):
    here, alive = socket.gethostname(), os.getpid()
    assert Record(host=here, pid=alive).is_launcher_alive and Record.of_this_process().is_launcher_alive
    assert not Record(host="elsewhere", pid=alive).is_launcher_alive, "its pid means nothing here"
    assert not replace(Record.of_this_process(), boot="other").is_launcher_alive, "nor that of a machine of this name"
    assert not Record(host=here, pid=1).is_launcher_alive and not Record().is_launcher_alive

    def refused(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refused)
    assert Record(host=here, pid=alive).is_launcher_alive, "another user's process cannot be signalled, and is there"


class RemovedFolder(Lease):
    """Another start removes the folder that it had made, once, between its making here and its lock."""

    is_removed = False

    def acquire(self, place: FolderPlace, *others: object, **more: object) -> None:
        if not self.is_removed:
            self.is_removed = True
            place.folder.rmdir()
        super().acquire(place, *others, **more)


def test_a_run_makes_its_folder_again_where_a_start_that_was_refused_has_just_removed_it(tmp_path):
    with held_folder(tmp_path / "run", lease := RemovedFolder()):
        assert lease.is_removed and is_locked(tmp_path / "run" / RUN_LOCK)


def test_of_two_commands_that_write_one_folder_the_second_is_refused_and_nothing_is_left(tmp_path):
    target = tmp_path / "merged"
    refused = pytest.raises(EnvironmentNotReady, match="another command is writing")
    with sole_writer(target), refused, sole_writer(target):
        raise AssertionError("both write")
    with sole_writer(target):
        pass
    assert not [*tmp_path.iterdir()]
