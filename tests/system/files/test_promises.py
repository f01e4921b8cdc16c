"""File systems of clusters lack locks, syncing or replacing: a run goes on, and says what it cannot promise."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import SMALL
from poor_disk import LACKS, command_line_without, file_system_without
from real_mounts import or_skipped, sshfs_views

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.atomic import flush_to_disk, replace_file, write_file
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.lease_folder import held_folder, shared_folders
from simpletuner.system.files.lease_record import Record, process_start
from simpletuner.system.files.locks import RUN_LOCK, exclusive_lock, is_locked, lock_file
from simpletuner.system.files.mounts import missing_promises
from simpletuner.system.processes.run_status import replace_status

CASES = [(what, number) for what, numbers in LACKS.items() for number in numbers]
SAID = {
    "locks": "has no file locks: a second run on another machine is found by the record in .lock",
    "syncing folders": "cannot sync: a power failure may take the newest files",
    "syncing": "cannot sync: a power failure may take the newest files",
    "replacing": "cannot replace a file at once: a kill may leave one under a name that ends with .old",
}


@pytest.mark.parametrize(("what", "number"), CASES)
def test_files_are_written_and_what_cannot_be_promised_is_named(what, number, tmp_path):
    path = tmp_path / "file"
    with file_system_without(what, number):
        found = missing_promises(tmp_path)
        for content in (b"one", b"two"):
            write_file(path, content)
            assert path.read_bytes() == content
        replace_file(path, b"three")
        assert path.read_bytes() == b"three"
        replace_status(tmp_path / "status.json", b"{}", durably=True)
        flush_to_disk(tmp_path)
        with exclusive_lock(tmp_path / "lock"), shared_folders([tmp_path / "cache"]):
            pass
        os.close(lock_file(tmp_path / "probe", exclusive=True, needed=False))
        assert (is_locked(tmp_path / "probe") is None) == (what == "locks")
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == [
        "file",
        "lock",
        "probe",
        "status.json",
    ]
    assert found == [] if what == "hard links" else SAID[what] in found[0] and f"{tmp_path}, on " in found[0]
    assert len(found) <= 1 and missing_promises(tmp_path) == []


def test_a_mount_that_keeps_locks_on_one_machine_is_named_at_the_start(tmp_path):
    with or_skipped(), sshfs_views(tmp_path, count=1) as [view]:
        (found,) = missing_promises(view)
    assert f"{view}, on " in found
    assert "keeps file locks on one machine: a second run on another machine is found by the record in .lock" in found


def test_what_is_no_lack_of_the_file_system_still_ends_a_write(tmp_path):
    with file_system_without("syncing", errno.EIO), pytest.raises(OSError, match="Input/output error"):
        write_file(tmp_path / "file", b"content")
    (tmp_path / "folder").mkdir()
    with file_system_without("replacing", errno.EEXIST), pytest.raises(FileExistsError):
        write_file(tmp_path / "folder", b"content")
    assert (tmp_path / "folder").is_dir()


def test_without_locks_a_second_run_of_this_machine_is_found_by_its_process(tmp_path):
    lock = tmp_path / RUN_LOCK
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        record = replace(Record.of_this_process(), id="other", token=1, pid=other.pid, process=other.pid)
        lock.write_bytes(replace(record, ticks=process_start(other.pid)).encode())
        with file_system_without("locks", errno.ENOSYS):
            with (
                pytest.raises(EnvironmentNotReady, match=f"another run is using .* \\(pid {other.pid}"),
                held_folder(tmp_path, Lease()),
            ):
                pass
            lock.write_bytes(record.encode())  # the pid is another process's by now
            lease = Lease()
            for token in (2, 3):
                with held_folder(tmp_path, lease):
                    assert json.loads(lock.read_text())["pid"] == os.getpid() and lease.record.token == token
        other.communicate()


@pytest.mark.parametrize("what", SAID)
def test_a_run_trains_and_resumes_there_and_says_what_it_cannot_promise(what, starter, sdxl_uncached, tmp_path):
    output = tmp_path / "run"
    flags = ["train", f"--output_dir={output}", *SMALL, *sdxl_uncached, "--train_batch_size=4"]
    for steps in (1, 2):
        run = starter.start(command_line_without, 1, what, LACKS[what][0], [*flags, f"--max_train_steps={steps}"])
        assert run.wait() == [0], run.said
        assert run.said.count(f"warning: {output}, on ") == 1 and SAID[what] in run.said
    assert (output / "pipeline").is_dir()
