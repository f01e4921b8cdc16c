"""Leases on real files, held by several processes: two views of one folder, each of which locks for itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lease_holders import ForeignHolder, ForeignMount, of_machine
from patience import PATIENCE

from simpletuner.errors import ExitCode
from simpletuner.system.files.lease import Holding, Lease, asked, current_record, judge, take
from simpletuner.system.files.lease_folder import FolderPlace, held_folder, holder_of, is_used, shared_folders
from simpletuner.system.files.lease_record import RECORD_BYTES, LeaseLost, Record, parse_record
from simpletuner.system.files.locks import RUN_LOCK
from simpletuner.system.files.mounts import FileSystem, file_system_of, parse_mountinfo
from simpletuner.tools.cache.clearing import clear
from simpletuner.tools.cache.contents import CacheItem, CacheKind

SLOW = FileSystem("sshfs", late_seconds=0.2)


def wait_for(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_machine_is_refused_and_one_that_wakes_up_after_it_was_replaced_writes_nothing(tmp_path):
    with ForeignHolder(tmp_path, "a") as first, ForeignHolder(tmp_path, "b") as second:
        holders = {"a": first, "b": second}
        said = {name: each.says() for name, each in holders.items()}
        winner, loser = sorted(said, key=lambda name: not said[name].startswith("held"))
        assert said[winner] == "held 1" and holders[winner].says() == "wrote"
        refusal = said[loser]
        while refusal.startswith("says waiting up to "):
            refusal = holders[loser].says()
        assert refusal.startswith(f"LeaseLost: another run is using {tmp_path} (pid {holders[winner].pid} on ")
        assert "it has renewed its record within 0 s / wait for it, stop it on that machine, or give this" in refusal
        assert holders[loser].wait(PATIENCE) == ExitCode.ENVIRONMENT

        os.kill(holders[winner].pid, signal.SIGSTOP)
        with ForeignHolder(tmp_path, "c") as third:  # its process has the pid of none, and is not asked for one
            assert third.says().startswith("says waiting up to 0:00:0")
            assert third.says() == "held 2" and third.says() == "wrote"
            os.kill(holders[winner].pid, signal.SIGCONT)
            assert holders[winner].says().startswith(f"LeaseLost: another run (pid {third.pid} on ")
            assert holders[winner].wait(PATIENCE) == ExitCode.ENVIRONMENT
            third.kill()
    machines = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert machines == sorted(machines, key=[winner, "c"].index), "the first one wrote after the second had begun"


def test_of_two_that_take_a_folder_at_once_one_has_it_each_time(tmp_path):
    """Both have judged the holder dead at the same moment, and one may have slept since."""
    judged: Record | None = None
    places = [ForeignMount(tmp_path, name, 0.0) for name in "ab"]
    for token in range(1, 201):
        found: list[Record | None] = [None, None]
        barrier = threading.Barrier(2)

        def attempt(number: int, judged=judged, found=found, barrier=barrier) -> None:
            own = replace(of_machine("ab"[number], 0.1), id=f"{number}")
            barrier.wait()
            found[number] = take(places[number], own, judged)

        threads = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [each for each in found if each is not None]
        assert len(winners) == 1 and winners[0].token == token
        assert take(places[0], replace(of_machine("c", 0.1), id="c"), judged) is None, "it slept since it looked"
        judged = current_record(places[0])
        assert judged == winners[0]
        places[0].write(RUN_LOCK, (judged := replace(judged, released=True)).encode())


def test_where_two_may_create_one_file_the_one_has_it_that_still_reads_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("simpletuner.system.files.lease.SETTLE_SECONDS", 0.3)

    class Mounted(ForeignMount):
        """s3fs: both create the file, the last write stays."""

        def create(self, name: str, content: bytes) -> bool:
            self.write(name, content)
            return True

        @property
        def system(self) -> FileSystem:
            return FileSystem("s3fs", creates_exclusively=False, late_seconds=0.0)

    assert FolderPlace(tmp_path, system=Mounted(tmp_path, "a", 0.0).system).lock(exclusive=True) is None, (
        "s3fs and rclone mount do not read again what is held open"
    )
    found: list[Record | None] = [None, None]

    def attempt(number: int) -> None:
        own = replace(of_machine("ab"[number], 0.1), id=f"{number}")
        found[number] = take(Mounted(tmp_path, "ab"[number], 0.0), own, None)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([each for each in found if each is not None]) == 1


def test_on_the_machine_of_the_record_its_process_is_looked_for(tmp_path):
    place = FolderPlace(tmp_path, system=SLOW)
    alive = replace(Record.of_this_process(), id="x", token=1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        other = replace(alive, process=process.pid, ticks=Path(f"/proc/{process.pid}/stat").read_text().split()[21])
        assert judge(other, False, place) is Holding.HELD, "two mounts of one machine may lock for themselves"
        process.kill()
        wait_for(lambda: " Z " in Path(f"/proc/{process.pid}/stat").read_text())
        assert judge(other, False, place) is Holding.FREE, "a killed run is started again at once"
        process.communicate()
    assert judge(other, False, place) is Holding.FREE
    assert judge(replace(alive, ticks="1"), False, place) is Holding.FREE, "the pid is another process's by now"
    for elsewhere in (replace(alive, boot="other"), replace(alive, namespace="pid:[1]"), replace(alive, boot="")):
        assert judge(elsewhere, False, place) is Holding.UNSURE, "the same host name and pid say nothing"
        assert judge(elsewhere, True, place) is Holding.HELD
        assert judge(replace(elsewhere, released=True), False, place) is Holding.FREE
    disk, nfs = FolderPlace(tmp_path, system=FileSystem("ext4", is_local=True)), FolderPlace(tmp_path)
    nfs.known_system = FileSystem("nfs4", has_shared_locks=True)
    container, rebooted = replace(alive, namespace="pid:[1]"), replace(alive, boot="before")
    assert judge(container, False, disk) is judge(container, False, nfs) is judge(rebooted, False, disk) is Holding.FREE
    assert judge(rebooted, False, nfs) is Holding.UNSURE, "nowhere is a free lock evidence of death"
    assert judge(replace(rebooted, host="elsewhere"), False, disk) is Holding.UNSURE, "a client of this file server"


@pytest.mark.parametrize("hours", [-1, 1])
def test_clocks_decide_nothing(tmp_path, hours):
    """The record's times are an hour off in either direction: what counts is that it is renewed."""
    first = Lease(replace(of_machine("a", 0.1), since=f"2026-01-01T0{5 + hours}:00:00"))
    first.acquire(ForeignMount(tmp_path, "a", 0.5))
    shifted = time.time() + 3600 * hours
    stop = threading.Event()

    def shift() -> None:
        while not stop.wait(0.005):
            os.utime(tmp_path / RUN_LOCK, (shifted, shifted))

    thread = threading.Thread(target=shift)
    thread.start()
    try:
        with pytest.raises(LeaseLost, match="another run is using"):
            Lease(of_machine("b", 0.1)).acquire(ForeignMount(tmp_path, "b", 0.5))
        first.check()
    finally:
        stop.set()
        thread.join()
        first.release()
    second = Lease(of_machine("b", 0.1))
    second.acquire(ForeignMount(tmp_path, "b", 0.5), say=pytest.fail)  # it was released: nothing to wait for
    assert second.record.token == 2
    second.release()


def test_beats_that_fail_for_less_than_the_limit_lose_nothing(tmp_path):
    class Cut(ForeignMount):
        is_cut = False

        def read(self, name: str) -> bytes | None:
            if self.is_cut:
                raise OSError(5, "Input/output error")
            return super().read(name)

    place, lease = Cut(tmp_path, "a", 30.0), Lease(of_machine("a", 0.05))
    lease.acquire(place)
    place.is_cut, beat = True, lease.record.beat
    with pytest.raises(OSError, match="Input/output"):
        lease.check()
    time.sleep(0.2)
    place.is_cut = False
    wait_for(lambda: lease.record.beat > beat + 1)
    lease.check()
    lease.release()


def test_a_lower_token_that_was_written_late_is_replaced_and_does_not_hold(tmp_path):
    """One that was stopped between its check and its write wakes up."""
    first, second = Lease(of_machine("a", 1000.0)), Lease(of_machine("b", 1000.0))
    first.acquire(place := ForeignMount(tmp_path, "a", 0.0))
    late = first.record.renewed().encode()
    judged = current_record(place)
    own = take(ForeignMount(tmp_path, "b", 0.0), replace(of_machine("b", 1000.0), id="second"), judged)
    assert own is not None and own.token == 2
    second._begin(ForeignMount(tmp_path, "b", 0.0), own)
    place.write(RUN_LOCK, late)
    with pytest.raises(LeaseLost):
        first.check()  # though the record is its own
    second.check()
    assert current_record(place) == own
    first.release()
    assert current_record(place) == own, "who has lost it gives nothing back"
    second.release()
    record = current_record(place)
    assert (
        record is not None
        and record.released
        and sorted(each.name for each in tmp_path.iterdir())
        == [
            RUN_LOCK,
            "locks-of-a",
        ]
    )


def test_a_record_that_was_removed_is_a_lost_one(tmp_path):
    lease = Lease(of_machine("a", 1000.0))
    lease.acquire(ForeignMount(tmp_path, "a", 0.0))
    (tmp_path / RUN_LOCK).unlink()
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    lease.release()


def test_a_record_that_is_missing_while_it_is_written_over_is_read_again(tmp_path):
    """As of s3rver 3.7.1: two living writers of one bucket counted as replaced."""

    class Overwriting(ForeignMount):
        missing = 0

        def read(self, name: str) -> bytes | None:
            if name == RUN_LOCK and self.missing:
                self.missing -= 1
                return None
            return super().read(name)

    lease, place = Lease(of_machine("a", 1000.0)), Overwriting(tmp_path, "a", 0.0)
    lease.acquire(place)
    place.missing = 2
    lease.check()
    assert not place.missing and lease.lost is None
    lease.release()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"id": "x", "version": 2}', "of a newer simpletuner (version 2 of its records)"),
        (b'{"id": "x", "token": "1"}', "is damaged"),
        (b'{"id": "x", "seconds": NaN}', "is damaged"),
        (b"[" * 3000, "is damaged"),
        (b"\xff\xfe", "is damaged"),
    ],
)
def test_a_record_that_cannot_be_read_counts_as_held_and_says_how_to_go_on(content, sentence, tmp_path):
    (tmp_path / RUN_LOCK).write_bytes(content)
    with pytest.raises(LeaseLost) as caught:
        Lease().acquire(ForeignMount(tmp_path, "a", 0.0))
    assert sentence in caught.value.message and "counts as held" in caught.value.message
    assert "if no run uses it on any machine, remove it, or give this one another --output_dir" in caught.value.hint
    with held_folder(tmp_path, Lease()):  # the lock of a local disk knows more
        pass


def test_records_of_earlier_versions_and_empty_ones_are_read(tmp_path):
    bucket = {"id": "ab", "host": "node", "pid": 5, "renewed": 7}
    record = parse_record(json.dumps(bucket).encode(), "")
    assert record is not None and (record.beat, record.token, record.pid, record.damaged) == (7, 0, 5, "")
    for content in (b"node 12\n", b"", b"\0" * 512):
        (tmp_path / RUN_LOCK).write_bytes(content)
        assert asked(FolderPlace(tmp_path, system=SLOW), False)[1] is Holding.FREE
    assert parse_record(b"node 12\n", "") == Record(host="node", pid=12)
    lease = Lease()
    with held_folder(tmp_path, lease):
        assert (tmp_path / RUN_LOCK).stat().st_size == RECORD_BYTES
        assert holder_of(tmp_path / RUN_LOCK) == (lease.record, Holding.HELD)
    assert holder_of(tmp_path / RUN_LOCK)[1] is Holding.FREE


def test_users_of_a_cache_are_found_by_their_beats_where_locks_do_not_cross(tmp_path):
    place = FolderPlace(tmp_path, ".in-use", SLOW)
    user = Lease(of_machine("a", 0.1))
    user.share(place)
    assert asked(place, False)[1] is Holding.UNSURE
    with pytest.raises(LeaseLost, match="is using") as caught:
        Lease(of_machine("b", 0.1)).acquire(FolderPlace(tmp_path, ".in-use", SLOW), way_on="")
    assert caught.value.hint == "wait for it, or stop it on that machine"
    wait_for(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - user.alone_since > 1.0)
    user.release()
    assert asked(place, False)[1] is Holding.FREE, "another user would have renewed the record meanwhile"
    user.share(place)
    user.release()
    assert asked(place, False)[1] is Holding.UNSURE, "nobody knows yet whether it was the only one"
    Lease(of_machine("b", 0.1)).acquire(FolderPlace(tmp_path, ".in-use", SLOW))  # which watching tells
    with shared_folders([tmp_path / "local"]):
        assert is_used(tmp_path / "local") and (tmp_path / "local" / ".in-use").read_bytes() == b""
    assert is_used(tmp_path / "local") is False


def test_a_cache_that_another_machine_clears_is_not_used_and_one_that_it_uses_is_not_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr("simpletuner.system.files.lease_folder.file_system_at", lambda folder: SLOW)
    folder = tmp_path / "latents"
    folder.mkdir()
    shard, there = folder / "rank000-00000.shard", ForeignMount(folder, "a", 0.2)
    there.name = ".in-use"
    shard.write_bytes(b"x")
    item, foreign = CacheItem(CacheKind.LATENTS, folder, 1, 1), Lease(of_machine("a", 0.1))
    foreign.acquire(there)
    with pytest.raises(LeaseLost, match="another run is using"), shared_folders([folder]):
        pass
    foreign.release()
    with shared_folders([folder]):
        foreign.share(there)
    with pytest.raises(LeaseLost, match="another run is using"):
        clear([item])
    assert shard.exists()
    foreign.release()
    there.own_lock.unlink()
    said: list[str] = []
    other = CacheItem(CacheKind.TEXT, tmp_path / "text", 1, 1)
    other.path.mkdir()
    (other.path / shard.name).write_bytes(b"x")
    assert clear([item, other], said.append) > 0
    assert len(said) == 1 and "did not say that it ended" in said[0]
    assert not folder.exists() and not other.path.exists(), "their records go, too"


def test_a_run_goes_on_with_what_is_left_where_clearing_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("simpletuner.system.files.lease_folder.file_system_at", lambda folder: SLOW)
    there, killed, said = ForeignMount(tmp_path, "a", 0.2), Lease(of_machine("a", 0.1)), list[str]()
    there.name = ".in-use"
    killed.acquire(there)
    killed.closing.set()
    (tmp_path / "rank000-00001.shard").write_bytes(b"x")
    with shared_folders([tmp_path], say=said.append):
        assert (tmp_path / "rank000-00001.shard").exists() and is_used(tmp_path)
    assert len(said) == 1 and "did not say that it ended" in said[0]


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        ("ext4 /dev/sda rw", FileSystem("ext4", is_local=True, late_seconds=0.0)),
        ("nfs4 server:/ rw", FileSystem("nfs4", has_shared_locks=True)),
        ("nfs server:/ rw,nolock", FileSystem("nfs")),
        ("lustre a@tcp:/ rw,flock", FileSystem("lustre", has_shared_locks=True)),
        ("lustre a@tcp:/ rw", FileSystem("lustre")),
        ("lustre a@tcp:/ rw,localflock", FileSystem("lustre")),
        ("fuse.sshfs host:/ rw", FileSystem("sshfs", late_seconds=20.0)),
        ("fuse.s3fs s3fs rw", FileSystem("s3fs", creates_exclusively=False, late_seconds=120.0)),
        ("fuse.rclone x: rw", FileSystem("rclone", creates_exclusively=False, late_seconds=330.0)),
        ("fuse.bindfs /x rw", FileSystem("unknown")),
    ],
)
def test_what_kinds_of_file_systems_decide(mount, expected):
    [found] = parse_mountinfo(f"36 35 98:0 / /mnt rw - {mount}\n")
    assert file_system_of(found) == expected
    assert expected.shows_locks == (expected.name in ("ext4", "nfs4") or "rw,flock" in mount)
