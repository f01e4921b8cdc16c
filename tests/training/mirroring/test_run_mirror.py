"""What a run's mirror leaves in a bucket, whatever happens to the bucket meanwhile, and what a start makes of it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest
from buckets_here import bucket_server
from checkpoint_states import save_checkpoint
from obstore.exceptions import InvalidPathError
from patience import PATIENCE
from s3_server import BUCKET, Fault, Proxy, put

from simpletuner.checkpoints.export import FINISHED
from simpletuner.checkpoints.layout import list_checkpoints, load_checkpoint, parse_step, prune_checkpoints
from simpletuner.data.config.places import mirror_place
from simpletuner.data.storage.object_storage import ObjectStorage, open_bucket
from simpletuner.errors import EnvironmentNotReady, Stopped
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Checkpoints, Launch, Settings, Training
from simpletuner.system.files.checksums import file_checksum, with_checksum
from simpletuner.system.files.lease import Lease, read_record, take
from simpletuner.system.files.lease_record import LeaseLost, Record
from simpletuner.system.processes.run_status import Activity, StatusWriter
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.metrics.speed import UPLOADING, Durations
from simpletuner.training.mirroring import run_mirror
from simpletuner.training.mirroring.bucket_records import LEASE, BucketRecords
from simpletuner.training.mirroring.remote_run import RemoteRun
from simpletuner.training.mirroring.run_files import FOLDERS, NAMES, WholeFolder
from simpletuner.training.mirroring.run_mirror import RunMirror

ADDRESS = f"s3://{BUCKET}/run"
LARGE = 9 << 20
"""Bytes of weights, sent in parts."""


def test_the_files_that_are_mirrored_are_those_of_the_docs():
    page = (Path(__file__).parents[3] / "docs" / "many-machines.md").read_text(encoding="utf-8")
    listed = set(re.findall("`(.+?)`", page.partition("**These files, and no others.**")[2].partition("\n- **")[0]))
    assert {name for name in NAMES if not name.endswith(".safetensors")} | {f"{name}/" for name in FOLDERS} <= listed
    files = {
        name for name in listed if name[-1] != "/" and name != FINISHED and name not in (".", "runs export", "-ema")
    }
    assert files <= NAMES


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Proxy]:
    with bucket_server(tmp_path_factory.mktemp("bucket")) as (proxy, _):
        yield proxy


@pytest.fixture
def proxy(server, monkeypatch) -> Proxy:
    monkeypatch.setattr(run_mirror, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(run_mirror, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_mirror, "RETRY_SECONDS", 0.2)
    server.faults = []
    bucket().remove([*bucket().all_sizes()])
    return server


def bucket() -> ObjectStorage:
    return open_bucket(mirror_place(ADDRESS))


def whole_in_bucket() -> list[int]:
    """Return the steps of the checkpoints that have a manifest, after comparing all their files with it."""
    storage, found = bucket(), []
    for name in storage.all_sizes():
        parts = name.split("/")
        if parts[0] == "checkpoints" and len(parts) == 3 and parts[2] == "state.json":
            try:
                state = json.loads(storage.read(name, 1 << 20))
            except FileNotFoundError:  # pruned since the listing
                continue
            sizes = storage.all_sizes(name.rpartition("/")[0])
            if name not in sizes:
                continue
            assert {each.split("/", 2)[2]: size for each, size in sizes.items() if each != name} == state["files"]
            found.append(state["step"])
    return sorted(found)


@pytest.fixture
def mirrored(proxy, tmp_path) -> Iterator[Callable[..., RunMirror]]:
    made: list[RunMirror] = []

    def opened(name: str, **wanted: object) -> RunMirror:
        output = tmp_path / name
        output.mkdir(exist_ok=True)
        checkpoints = Checkpoints(mirror_output=ADDRESS, **{"checkpoints_total_limit": 2, **wanted})
        launch = Launch(preemption_grace_seconds=0.2)
        settings = Settings(training=Training(output_dir=output), checkpoints=checkpoints, launch=launch)
        world = SimpleNamespace(activity=Activity(), is_first=True)
        status = StatusWriter()
        status.begin(output, "")
        session = SimpleNamespace(settings=settings, report=Report(), status=status, stop=StopRequest(), world=world)
        made.append(RunMirror(session))
        made[-1].lease.own = replace(Record.of_this_process(), seconds=0.2)
        return made[-1]

    yield opened
    for mirror in made:  # of a test that failed
        mirror.lease.release()


def save(output: Path, step: int, size: int = 1000, keep: int = 2) -> Path:
    """Write a checkpoint as a run does, and remove the oldest."""
    folder = save_checkpoint(output, step, size)
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    prune_checkpoints(output / "checkpoints", keep)
    return folder


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_checkpoints_are_uploaded_while_others_are_pruned_and_come_back_as_they_were(proxy, mirrored, tmp_path):
    mirror = mirrored("first")
    mirror.begin()
    mirror.resuming({})
    durations = Durations()
    mirror.started(0, durations)
    for step in range(1, 5):
        save(mirror.output, step, LARGE, keep=1)
        time.sleep(0.1)
    wait_for(lambda: 4 in whole_in_bucket())
    assert durations.mean(UPLOADING) > 0
    mirror.finish(None)
    assert whole_in_bucket()[-1] == 4 and len(whole_in_bucket()) <= 2
    assert mirror.status.status.mirror == f"{ADDRESS} has checkpoints/checkpoint-000004"
    assert read_record(BucketRecords(bucket()), LEASE).released, "the next start need not wait"
    assert not (mirror.output / ".mirror.unfinished").exists()

    second = mirrored("second")
    second.begin()
    assert (second.output / "metrics.jsonl").read_text() == (mirror.output / "metrics.jsonl").read_text()
    second.resuming({})
    found = load_checkpoint(second.output / "checkpoints" / "checkpoint-000004")
    assert {name: file_checksum(found.folder / name) for name in found.state["files"]} == found.state["checksums"]
    proxy.requests.clear()
    second.started(4, durations)
    second.finish(None)
    assert not [path for path, _ in proxy.requests if "w.safetensors" in path], "nothing is uploaded twice"


def test_the_best_step_stays_in_the_bucket_and_comes_back_where_it_is_to_be_exported(proxy, mirrored):
    mirror = mirrored("first", checkpoints_total_limit=1)
    for step, loss in ((1, 0.5), (2, 0.2), (3, 0.4)):
        save(mirror.output, step, keep=3)
        with (mirror.output / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")
    mirror.begin()
    mirror.started(0, Durations())
    mirror.finish(None)
    assert whole_in_bucket() == [2, 3]
    for name, wanted in (("second", [3]), ("third", [2, 3])):
        again = mirrored(name, export_best=name == "third")
        again.begin()
        again.resuming({})
        assert sorted(map(parse_step, list_checkpoints(again.output / "checkpoints"))) == wanted
        again.lease.release()


def test_what_is_incomplete_or_damaged_in_the_bucket_is_not_resumed_from(proxy, mirrored, capsys):
    mirror = mirrored("first", checkpoints_total_limit=4)
    for step in range(1, 5):
        save(mirror.output, step, keep=4)
    mirror.begin()
    mirror.finish(None)
    storage = bucket()
    storage.remove(["checkpoints/checkpoint-000004/state.json"])
    content = storage.read("checkpoints/checkpoint-000003/model/w.safetensors", 1 << 20)
    storage.write("checkpoints/checkpoint-000003/model/w.safetensors", content[:-1] + b"x")
    storage.remove(["checkpoints/checkpoint-000002/model/w.safetensors"])
    second = mirrored("second")
    second.begin()
    second.resuming({})
    assert [path.name for path in (second.output / "checkpoints").iterdir()] == ["checkpoint-000001"]
    said = capsys.readouterr().err
    assert "checkpoint-000003/model/w.safetensors is damaged: its checksum does not match" in said
    assert "checkpoint-000002/model/w.safetensors is damaged: it has 0 of 1000 bytes" in said
    second.finish(None)

    storage.write("checkpoints/checkpoint-000001/state.json", b"{}")
    third = mirrored("third")
    third.begin()
    with pytest.raises(EnvironmentNotReady) as caught:
        third.resuming({})
    assert "no checkpoint in s3://pictures/run/checkpoints can be resumed" in caught.value.message
    third.lease.release()


def test_a_damaged_checkpoint_on_disk_does_not_replace_a_whole_one(proxy, mirrored, capsys):
    mirror = mirrored("first")
    save(mirror.output, 1)
    damaged = save(mirror.output, 2) / "model" / "w.safetensors"
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    mirror.begin()
    mirror.finish(None)
    assert whole_in_bucket() == [1]
    said = (
        "checkpoints/checkpoint-000002/model/w.safetensors is damaged: its checksum does not match; it is not uploaded"
    )
    assert said in capsys.readouterr().err


def test_an_outage_is_told_once_and_made_up_for(proxy, mirrored, capsys):
    mirror = mirrored("first")
    mirror.begin()
    mirror.started(0, Durations())
    save(mirror.output, 1)
    wait_for(lambda: whole_in_bucket() == [1])
    proxy.faults = [Fault("", 403, "AccessDenied")]
    for step in (2, 3):
        answered = proxy.faults[0].times
        save(mirror.output, step)
        wait_for(lambda answered=answered: proxy.faults[0].times < answered)
    wait_for(lambda: "access is denied" in (mirror.status.status.mirror or ""))
    proxy.faults = []
    mirror.patience_seconds = PATIENCE
    mirror.finish(None)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("warning: mirror_output: bucket") == 1 and "access is denied" in said
    assert f"{ADDRESS} answers again, and has what was missing" in said and "hidden7" not in said
    assert whole_in_bucket() == [2, 3]


def test_a_bucket_that_removes_nothing_takes_all_new_checkpoints(proxy, mirrored, capsys):
    """As by a policy without s3:DeleteObject: a run that goes back hides the later ones by what it may do."""
    proxy.faults = [Fault("/checkpoints/", 403, "AccessDenied", method="DELETE")]
    mirror = mirrored("first")
    mirror.begin()
    mirror.started(0, Durations())
    for step in range(1, 5):
        save(mirror.output, step)
        wait_for(lambda step=step: step in whole_in_bucket())
    proxy.requests.clear()
    mirror.finish(None)
    assert whole_in_bucket() == [1, 2, 3, 4]
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("it removes nothing: access is denied (AccessDenied)") == 1
    assert "these credentials need s3:DeleteObject; until then old checkpoints stay in" in said
    assert mirror.status.status.mirror == f"{ADDRESS} has checkpoints/checkpoint-000004"

    back = mirrored("second", resume_from_checkpoint="checkpoint-000003")
    back.begin()
    back.resuming({})
    back.started(3, Durations())
    back.finish(None)
    assert bucket().all_sizes()["checkpoints/checkpoint-000004/state.json"] == 0
    third = mirrored("third")
    third.begin()
    third.resuming({})
    assert [path.name for path in (third.output / "checkpoints").iterdir()] == ["checkpoint-000003"]
    third.finish(None)


def test_what_could_not_be_uploaded_ends_the_run_with_a_sentence_and_the_next_one_makes_up_for_it(
    proxy, mirrored, capsys
):
    mirror = mirrored("first")
    mirror.begin()
    mirror.started(0, Durations())
    save(mirror.output, 1)
    proxy.faults = [Fault("checkpoints/", 403, "AccessDenied")]
    with pytest.raises(EnvironmentNotReady) as caught:
        mirror.finish(None)
    assert "checkpoints/checkpoint-000001" in caught.value.message and "could not be uploaded" in caught.value.message
    assert "the same command uploads it" in caught.value.hint

    with pytest.raises(EnvironmentNotReady, match="access is denied"):
        proxy.faults = [Fault("", 403, "AccessDenied")]
        mirrored("nothing here").begin()
    again = mirrored("first")
    again.begin()  # goes on from what is here
    with pytest.raises(Stopped), again:
        raise Stopped(15, "stopped by SIGTERM")
    assert "could not be uploaded" in capsys.readouterr().err
    proxy.faults = []
    last = mirrored("first")
    last.begin()
    last.finish(None)
    assert whole_in_bucket() == [1]


def test_a_run_that_went_back_sets_later_checkpoints_aside_in_the_bucket(proxy, mirrored, capsys):
    mirror = mirrored("first")
    for step in (1, 2):
        save(mirror.output, step, LARGE)
    mirror.begin()
    mirror.finish(None)
    back = mirrored("second", resume_from_checkpoint="checkpoint-000001")
    back.begin()
    back.resuming({})
    assert [path.name for path in (back.output / "checkpoints").iterdir()] == ["checkpoint-000001"]
    back.started(1, Durations())
    wait_for(lambda: whole_in_bucket() == [1])
    back.finish(None)
    sizes = bucket().all_sizes("checkpoints/set-aside/checkpoint-000002")
    assert len(sizes) == 3 and max(sizes.values()) == LARGE
    assert f"later checkpoints are set aside in {ADDRESS}" in capsys.readouterr().err


def of_another_machine(**values: object) -> Record:
    own = replace(Record.of_this_process(), boot="another", host="elsewhere", pid=7, seconds=0.2, id="other")
    return replace(own, **values)


def test_two_runs_do_not_write_to_one_folder(proxy, mirrored, tmp_path, capsys):
    first, second = Lease(), Lease(of_another_machine())
    first.acquire(BucketRecords(bucket()))
    with pytest.raises(LeaseLost) as caught:
        Lease().acquire(BucketRecords(bucket()), way_on="give this one another mirror_output")
    assert (
        f"another run is using {ADDRESS} (pid" in caught.value.message and "another mirror_output" in caught.value.hint
    )
    first.release()
    second.acquire(BucketRecords(bucket()))
    assert second.record.token == 2 and BucketRecords(bucket()).read(f"{LEASE}.1") is None
    second.release()

    mirror = mirrored("first")
    mirror.lease.own = replace(Record.of_this_process(), seconds=1000.0)  # it stands still
    mirror.begin()
    mirror.started(0, Durations())
    save(mirror.output, 1)
    wait_for(lambda: whole_in_bucket() == [1])
    other = of_another_machine(token=mirror.lease.record.token + 1)
    bucket().write(LEASE, other.encode())
    folder = save_checkpoint(tmp_path / "elsewhere", 9)
    late = WholeFolder("checkpoints/checkpoint-000009", "state.json")
    with pytest.raises(LeaseLost):  # while it uploads: the checkpoint stays invisible
        # Not by `mirror.remote`: its thread may still prune what is not whole.
        RemoteRun(bucket(), lease=mirror.lease).upload(late, folder, (folder / "state.json").read_bytes())
    assert whole_in_bucket() == [1]
    save(mirror.output, 2)
    with pytest.raises(EnvironmentNotReady, match="another run .pid 7 on elsewhere. has taken over"):
        mirror.finish(None)
    assert whole_in_bucket() == [1] and "this run uploads nothing any more" in capsys.readouterr().err
    assert read_record(BucketRecords(bucket()), LEASE) == other


@pytest.mark.parametrize("removed", [False, True])
def test_a_run_that_woke_up_after_another_has_finished_there_changes_nothing(removed, proxy, mirrored, monkeypatch):
    """R103: the lease of the one that took over was given back by then, or by an earlier version, removed."""
    mirror = mirrored("first")
    mirror.lease.own = replace(Record.of_this_process(), seconds=1000.0)  # it stands still
    mirror.begin()
    (mirror.output / "pipeline").mkdir()
    marker = with_checksum({"steps": 2, "files": {"weights": 3}, "checksums": {}})
    (mirror.output / "pipeline" / "simpletuner.json").write_text(json.dumps(marker))
    (mirror.output / "pipeline" / "weights").write_bytes(b"old")
    for name in ("pipeline/weights", "pipeline/simpletuner.json", "status.json"):
        bucket().write(name, b"of the other run")
    if removed:
        bucket().remove([LEASE])
    else:
        bucket().write(LEASE, of_another_machine(token=2, released=True).encode())
    mirror.remote.refresh()
    with pytest.raises(EnvironmentNotReady, match="has taken over"):
        mirror.finish(None)
    for name in ("pipeline/weights", "pipeline/simpletuner.json", "status.json"):
        assert bucket().read(name, 100) == b"of the other run", name


def test_a_dead_run_on_another_machine_is_waited_for_and_one_of_this_machine_is_not(proxy, mirrored, capsys):
    bucket().write(LEASE, of_another_machine(token=5, seconds=0.4).encode())
    mirror = mirrored("first")
    began = time.monotonic()
    mirror.begin()
    assert time.monotonic() - began >= 1.2 and mirror.lease.record.token == 6
    assert "for an earlier run (pid 7 on elsewhere) that may write to" in " ".join(capsys.readouterr().err.split())
    mirror.finish(None)
    dead = replace(Record.of_this_process(), id="dead", ticks="1", token=7)
    bucket().write(LEASE, dead.encode())
    mirror = mirrored("first")
    mirror.begin()
    assert "waiting" not in capsys.readouterr().err
    mirror.finish(None)


@pytest.mark.parametrize("refuses", [True, False])
def test_where_a_store_creates_what_is_there_the_one_has_it_that_still_reads_its_own(refuses, proxy, monkeypatch):
    """s3rver, rclone and JuiceFS's gateway answer as if they had created it."""
    monkeypatch.setattr("simpletuner.system.files.lease.SETTLE_SECONDS", 0.5)
    places, found = [BucketRecords(bucket()) for _ in range(4)], list[tuple[BucketRecords, Record | None]]()
    if not refuses:
        proxy.drops_conditions = True
    barrier = threading.Barrier(len(places))

    def attempt(place: BucketRecords) -> None:
        own = replace(Record.of_this_process(), id=f"{id(place)}")
        barrier.wait()
        found.append((place, take(place, own, None)))

    threads = [threading.Thread(target=attempt, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.drops_conditions = False
    [(winner, record)] = [(place, record) for place, record in found if record is not None]
    assert read_record(places[0], LEASE) == record
    assert winner.system.creates_exclusively == refuses


def test_a_pipeline_comes_after_its_average_without_which_a_run_is_not_done(proxy, mirrored):
    mirror = mirrored("first")
    for name in ("pipeline", "pipeline-ema"):
        (mirror.output / name).mkdir()
        marker = with_checksum({"steps": 2, "files": {}, "checksums": {}})
        (mirror.output / name / "simpletuner.json").write_text(json.dumps(marker))
    save(mirror.output, 1)
    save(mirror.output, 2)
    mirror.begin()
    proxy.requests.clear()
    mirror.finish(None)
    paths = [path.removeprefix(f"/{BUCKET}/run/") for path, _ in proxy.requests]
    manifests = list(dict.fromkeys(path for path in paths if path.endswith(("state.json", "simpletuner.json"))))
    wanted = ["checkpoints/checkpoint-000002/state.json", "checkpoints/checkpoint-000001/state.json"]
    assert manifests == [*wanted, "pipeline-ema/simpletuner.json", "pipeline/simpletuner.json"]
    assert [each.name for each in mirror.remote.whole()][2:] == ["pipeline-ema", "pipeline"]
    assert paths.index("metrics.jsonl") < paths.index(wanted[0]), "who resumes from it needs its metrics"


def test_a_signal_while_the_end_is_uploaded_waits_as_long_as_a_machine_may_live(proxy, mirrored, capsys):
    mirror = mirrored("first")
    mirror.begin()
    save(mirror.output, 1)
    proxy.latency_seconds = 0.3
    threading.Timer(0.1, mirror.session.stop.receive, (signal.SIGTERM,)).start()
    with pytest.raises(Stopped, match="stopped by SIGTERM while it uploaded its results"):
        mirror.finish(None)
    proxy.latency_seconds = 0
    said = " ".join(capsys.readouterr().err.split())
    assert "could not be uploaded" in said and "the upload was interrupted" in said
    mirror.thread.join(PATIENCE)


def test_what_is_no_file_is_left_out(proxy, mirrored, capsys):
    mirror = mirrored("first")
    mirror.begin()
    mirror.patience_seconds = PATIENCE
    (mirror.output / "validation").mkdir()
    os.mkfifo(mirror.output / "validation" / "a.png")  # no file: left out
    save(mirror.output, 1)
    mirror.finish(None)
    assert "validation/a.png" not in bucket().all_sizes() and whole_in_bucket() == [1]


def test_a_start_removes_what_a_killed_one_had_no_time_to(proxy, mirrored):
    mirror = mirrored("first", checkpoints_total_limit=4)
    for step in (1, 2, 3):
        save(mirror.output, step, keep=4)
    mirror.begin()
    mirror.finish(None)
    bucket().write("checkpoints/checkpoint-000004/model/w.safetensors", b"half")
    again = mirrored("second")
    again.begin()
    again.resuming({})
    again.started(3, Durations())
    again.finish(None)
    assert whole_in_bucket() == [2, 3] and not bucket().all_sizes("checkpoints/checkpoint-000004")


@pytest.mark.parametrize("refused", ["checkpoints/", "state.json"])
def test_a_log_that_grows_does_not_keep_a_run_whose_checkpoints_are_refused(proxy, mirrored, refused):
    mirror = mirrored("first")
    save(mirror.output, 1)
    (mirror.output / "log.txt").write_text("begins\n")
    mirror.begin()
    proxy.faults = [Fault(refused, 403, "AccessDenied")]
    ended = threading.Event()

    def log() -> None:
        while not ended.wait(0.1):  # as the line each minute does, faster than patience ends
            with (mirror.output / "log.txt").open("a") as file:
                file.write("uploading\n")

    threading.Thread(target=log, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(EnvironmentNotReady, match=r"checkpoints/checkpoint-000001.* could not be uploaded.*denied"):
        mirror.finish(None)
    ended.set()
    assert "log.txt" in bucket().all_sizes() and time.monotonic() - began < PATIENCE / 4


def test_what_is_the_users_is_neither_uploaded_nor_replaced(proxy, mirrored):
    """dataset.json and the like beside the files of a run, also where an earlier version has uploaded them."""
    own = (
        "dataset.json",
        "notes.jsonl",
        "page.html",
        "mine.safetensors",
        "validation/list.txt",
        "validation/mine.json",
    )
    first, second = mirrored("first"), mirrored("second")
    for mirror, text in ((first, "1"), (second, "2")):
        (mirror.output / "validation" / "step-000001").mkdir(parents=True)
        for name in own:
            (mirror.output / name).write_text(text)
    names = ("metrics.jsonl", "settings.json", "validation/step-000001/trained-00.png", "pipeline.safetensors")
    for name in names:
        (first.output / name).write_text("of the run")
    save(first.output, 1)
    first.begin()
    first.finish(None)
    assert not {*own} & bucket().all_sizes().keys() and {*names} <= bucket().all_sizes().keys()
    for name in own:
        bucket().write(name, b"of an earlier version")
    second.begin()
    assert [(second.output / name).read_text() for name in own] == ["2"] * len(own)
    assert (second.output / names[2]).read_text() == (second.output / "settings.json").read_text() == "of the run"
    second.lease.release()


def test_a_mirror_knows_the_names_that_a_run_writes():
    from simpletuner.checkpoints.layout import EXPORTS, PAGE
    from simpletuner.preparation.prepare import HUB_RECORD, UNCAPTIONED
    from simpletuner.runs.settings_record import HISTORY, SETTINGS
    from simpletuner.settings.values.parsed import TRACKERS
    from simpletuner.training.metrics.tracker_process import state_file

    exported = {f"{name}{average}.safetensors" for name in EXPORTS.values() for average in ("", "-ema")}
    named = {HUB_RECORD, UNCAPTIONED, PAGE, HISTORY, SETTINGS} | {
        state_file(Path(), library).name for library in TRACKERS.keys() - {"tensorboard"}
    }
    assert named | exported <= NAMES


def test_keys_that_are_no_files_of_a_run_are_passed_over(proxy, mirrored, capsys):
    first = mirrored("first")
    save(first.output, 1)
    (first.output / "logs").mkdir()
    (first.output / "logs" / "a").write_text("1")
    first.begin()
    first.finish(None)
    storage = bucket()
    for name in ("x/y", "validation/x", "validation/x/y", f"logs/{'n' * 300}", "logs/a/below", "n" * 300):
        storage.write(name, b"1")
    put(f"{proxy.server}/{BUCKET}/run/x//y", b"1")
    put(f"{proxy.server}/{BUCKET}/run/validation//y", b"1")
    with pytest.raises(InvalidPathError):
        list(obstore.list(storage.store))
    second = mirrored("second")
    second.begin()
    second.resuming({})
    assert [path.name for path in (second.output / "checkpoints").iterdir()] == ["checkpoint-000001"]
    assert (second.output / "metrics.jsonl").is_file()
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("is passed over: a file cannot have that name here") == 2
    second.lease.release()


@pytest.mark.parametrize("content", [b"[" * 60_000, b'{"id": ' * 5_000, b"[]", b"\xff", b'{"id": ["' + b"9" * 5000])
def test_a_lease_that_cannot_be_read_counts_as_held(proxy, mirrored, content):
    bucket().write(LEASE, content)
    with pytest.raises(LeaseLost, match="is damaged: who holds it cannot be read, so it counts as held"):
        mirrored("first").begin()
