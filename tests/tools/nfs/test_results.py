"""Sentences and remedies from numbers: what can be shown without a second process."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from nfs_recorded import S3FS, SSHFS

from simpletuner.checkpoints.disk_usage import DiskUsage, estimate_disk_usage
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings.declared.sections import Checkpoints, Ema, Settings, Training
from simpletuner.tools.nfs import posix_semantics, visibility
from simpletuner.tools.nfs.rendezvous import Node
from simpletuner.tools.nfs.resources import bytes_present, check_space
from simpletuner.tools.nfs.results import (
    ERRNO_MESSAGES,
    Finding,
    Status,
    explain_errno,
    failed,
    parse_finding,
    passed,
    skipped,
    warned,
    worst,
)


def test_the_worst_status_is_that_of_all():
    ok, odd, bad, out = passed("a", ""), warned("b", ""), failed("c", ""), skipped("d", "")
    assert worst([ok, odd, bad, out]) == Status.FAIL
    assert worst([out, odd, ok]) == Status.WARN
    assert worst([ok, out]) == Status.PASS
    assert worst([]) == Status.PASS


def test_a_finding_is_the_same_after_its_way_through_json():
    finding = failed("lock", "held", "do this", "or that", rank=3)
    assert parse_finding(json.loads(json.dumps(finding.as_json()))) == finding


@pytest.mark.parametrize("number", sorted(ERRNO_MESSAGES))
def test_every_known_error_has_a_sentence_with_its_name_and_a_remedy(number):
    sentence, fix = explain_errno(OSError(number, os.strerror(number)), Path("/mnt/shared"))
    assert "/mnt/shared" in sentence
    assert errno.errorcode[number] in sentence
    assert fix
    assert "{" not in sentence + fix


def test_the_usual_refusals_are_told_apart():
    numbers = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
    told = {explain_errno(OSError(number, ""), Path("/x")) for number in numbers}
    assert len({sentence.partition("(")[0] for sentence, _ in told}) == len({fix for _, fix in told}) == len(numbers)


def test_an_unknown_error_keeps_its_own_words():
    sentence, fix = explain_errno(OSError(errno.EXDEV, "Invalid cross-device link"), Path("/x"))
    assert sentence.startswith("Invalid cross-device link at /x (EXDEV")
    assert fix


@pytest.mark.parametrize(
    ("fstype", "seen", "parts", "replaced", "status", "words"),
    [
        ("nfs4", {"whole": 9}, 0, 30, "pass", "never missing"),
        ("nfs4", {"whole": 9, "stale": 1}, 0, 30, "warn", "vers=4.2"),
        ("fuse.glusterfs", {"whole": 9, "stale": 1}, 0, 30, "warn", "attribute-timeout=0"),
        ("nfs4", {"missing": 1}, 0, 30, "fail", "use NFS 4"),
        ("fuse", {"whole": 213, "missing": 8}, 0, 30, "warn", "runs read such a file again"),
        ("fuse.s3fs", {"whole": 42, "half": 1}, 0, 30, "fail", "use NFS 4"),
        ("fuse.s3fs", {"whole": 42}, 24, 30, "warn", "file by file"),
        ("fuse.s3fs", {"whole": 2}, 0, 1, "warn", "--timeout"),
    ],
)
def test_what_readers_saw_decides_about_rename(fstype, seen, parts, replaced, status, words):
    found = posix_semantics.judge_rename(Counter(seen), Counter(whole=9, part=parts), replaced, fstype)
    assert found.status == status and words in " ".join([found.seen, *found.fix])
    assert "NFS 4.1" not in " ".join(found.fix) or fstype.startswith("nfs")


def test_half_a_file_is_told_from_a_whole_one(tmp_path):
    path = tmp_path / "renamed"
    assert posix_semantics.read_state(path) == "missing"
    posix_semantics.replace_with(path, 7)
    assert posix_semantics.read_state(path) == "whole"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert posix_semantics.read_state(path) == "half"
    path.write_text(text[: len(text) // 2] + text[len(text) // 2 :].replace("7", "8"))
    assert posix_semantics.read_state(path) == "half"


def test_four_times_on_two_clocks_give_the_offset_and_its_bounds():
    pong = {"received": 110.5, "replied": 111.5, "uid": 1, "gid": 2}
    told = visibility.measure(1, 100.0, 102.0, pong)
    assert told.round_trip_seconds == 2.0
    assert told.offset_seconds == ((110.5 - 100) + (111.5 - 102)) / 2
    assert told.uncertainty_seconds == (2.0 - 1.0) / 2


def test_a_late_sight_is_a_warning_with_the_mount_option():
    answers = [[visibility.Pong(1, 6.5, 0, 3, 0), visibility.Pong(2, 0.1, 0, 0, 0)]]
    late = visibility.visibility_result(Node(Path("/x"), nodes=3), answers)
    assert late.status == "warn"
    assert "6.5 s (node 1)" in late.seen
    assert "lookupcache" in late.fix[0]


@pytest.mark.parametrize(
    ("times", "status", "words"),
    [
        ([(0.1, 0.2), (0.3, 4.9)], "pass", "round trip"),
        ([(20.7, 0.1), (0.1, 21.3)], "warn", "not listed for 20.7 s and a removed one was still listed for 21.3 s"),
        ([(0.1, 0.1), (None, 0.1)], "warn", "a new file was not listed for more than 30 s"),
    ],
)
def test_a_folder_that_was_listed_before_is_judged_by_its_slowest_node(times, status, words, tmp_path):
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"{SSHFS.format(path=tmp_path)}\n")
    listings = [visibility.ListingDelay(rank, *each) for rank, each in enumerate(times, 1)]
    pongs = [[visibility.Pong(rank, 0.1, 0, 0, 0) for rank in (1, 2)]]
    found = visibility.visibility_result(Node(tmp_path, nodes=3, mountinfo=mountinfo), pongs, listings)
    assert found.status == status and words in found.seen
    assert status == "pass" or "dir_cache=no" in found.fix[0]


@pytest.mark.parametrize(("uid", "status", "words"), [(0, "warn", "root_squash"), (1000, "fail", "idmapd")])
def test_files_that_others_see_as_somebody_elses(uid, status, words):
    finding = visibility.report_foreign_owner({"uid": uid}, {1: 65534, 2: 65534}, {})
    assert (finding.status, words in finding.fix[0]) == (status, True)
    assert "nodes 1, 2 found uid 65534, not" in finding.seen


def settings(**training: int | None) -> Settings:
    return Settings(training=Training(**training), checkpoints=Checkpoints(checkpoints_total_limit=2))


def test_a_run_writes_its_checkpoints_one_of_them_unfinished_and_its_pipeline():
    found = estimate_disk_usage(settings(), TrainedWeights.of_count(1_000), "counted")
    assert (found.checkpoints, found.checkpoint_bytes) == (3, 12_000)
    assert (found.pipelines, found.pipeline_bytes) == (1, 4_000)
    assert found.total_bytes == 40_000


def test_ema_adds_a_copy_to_each_checkpoint_and_a_pipeline():
    found = estimate_disk_usage(
        settings().model_copy(update={"ema": Ema(use_ema=True)}), TrainedWeights.of_count(1_000), ""
    )
    assert found.total_bytes == 3 * 16_000 + 2 * 4_000


def test_a_short_run_writes_fewer_checkpoints():
    one = TrainedWeights.of_count(1)
    assert estimate_disk_usage(settings(max_train_steps=900), one, "").checkpoints == 2
    assert estimate_disk_usage(settings(max_train_steps=90_000), one, "").checkpoints == 3


def room(tmp_path: Path, total_bytes: int) -> Finding:
    return check_space(Node(tmp_path, disk_usage=DiskUsage(1, "counted", 1, total_bytes, 0, 0)))


def test_room_is_compared_with_what_the_run_writes(tmp_path):
    state = os.statvfs(tmp_path)
    free = state.f_bavail * state.f_frsize
    assert room(tmp_path, 2 * free).status == "fail"
    assert room(tmp_path, int(0.95 * free)).status == "warn"
    assert room(tmp_path, 1000).status == "pass"
    unknown = check_space(Node(tmp_path))
    assert unknown.status == "pass"
    assert "an unknown amount" in unknown.seen
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"{S3FS.format(path=tmp_path)}\n")  # it answers 18.4 EB, rclone 1.1 PB and no inodes
    store = check_space(Node(tmp_path, mountinfo=mountinfo, disk_usage=DiskUsage(1, "counted", 1, 1000, 0, 0)))
    assert (store.status, "s3fs does not say" in store.seen, store.values["need_bytes"]) == ("skip", True, 1000)


def test_what_is_there_already_is_not_needed_again(tmp_path):
    folder = tmp_path / "checkpoints" / "checkpoint-000100" / "model"
    folder.mkdir(parents=True)
    (folder / "w.safetensors").write_bytes(b"x" * 700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "shard").write_bytes(b"x" * 5000)
    assert bytes_present(tmp_path) == 700
    assert room(tmp_path, 1000).values["need_bytes"] == 300
