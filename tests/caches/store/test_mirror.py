"""A cache in a bucket holds what a local one would, whoever filled it, killed or not, and whatever the network does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import obstore
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from real_mounts import or_skipped, sshfs_views
from s3_server import BUCKET, Fault, Proxy, s3_proxy, s3_server

from simpletuner.caches.fill import fill_cache, open_write_through
from simpletuner.caches.sources import open_mirror
from simpletuner.caches.store import mirror as mirrors
from simpletuner.caches.store.mirror import Mirror
from simpletuner.caches.store.shard_index import list_sources
from simpletuner.caches.store.shards import ShardReader
from simpletuner.caches.workers import CacheJob, CacheRequest, Made
from simpletuner.data.config.embeds import S3TextEmbeds
from simpletuner.errors import DataError, EnvironmentNotReady
from simpletuner.parallel.world import World
from simpletuner.report import Report

PARTS = {"file": "1"}
COUNT, NUMBERS = 24, 50_000
"""Of records, each of 200 KB: some shards of 1 MiB."""


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(mirrors, "SHARD_BYTES", 1 << 20)
    with s3_proxy(server) as proxy:
        yield proxy


def mirror_at(proxy: Proxy, folder: Path, prefix: str, limit_gb: float = 1, bucket: str = BUCKET) -> Mirror:
    keys = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "hidden", "aws_endpoint_url": proxy.address}
    place = {"aws_bucket_name": bucket, "aws_data_prefix": prefix, "cache_size_limit_gb": limit_gb, **keys}
    mirror = open_mirror(S3TextEmbeds(id="t", type="aws", dataset_type="text_embeds", **place), folder)
    assert mirror is not None
    return mirror


def fill(mirror: Mirror, rank: int = 0, compress: bool = False) -> None:
    with mirror.writer(rank, compress) as writer:
        for number in range(rank * COUNT, (rank + 1) * COUNT):
            writer.write(str(number), PARTS, {"t": torch.full((NUMBERS,), float(number))})
        writer.write_broken(f"broken by {rank}", PARTS, "no image")


def opened(mirror: Mirror) -> ShardReader:
    mirror.synchronize(lambda: None)
    return ShardReader(mirror.folder, mirror)


def values(reader: ShardReader, count: int = COUNT) -> list[float]:
    """Read all records whole, in an order that goes from shard to shard."""
    found = {number: reader.find(str(number), PARTS) for number in sorted(range(count), key=lambda n: n % 5)}
    read = {number: reader.read(place)["t"] for number, place in found.items() if place}
    return [float(read[number][0]) for number in sorted(read) if (read[number] == read[number][0]).all()]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.shard"))


def test_what_two_ranks_filled_another_machine_reads_record_by_record_and_keeps(proxy, tmp_path):
    here = mirror_at(proxy, tmp_path / "here", "shared")
    proxy.faults = [Fault("shared/rank", 503, "SlowDown", times=3), Fault("shared/rank", 500, "InternalError", times=2)]
    for rank in range(2):
        fill(here, rank, compress=rank > 0)
    there = mirror_at(proxy, tmp_path / "there", "/shared/")
    proxy.faults = [Fault(".jsonl", cut=0.5, times=2), Fault("list-type", 503, "SlowDown", times=1)]
    reader = opened(there)
    assert len([*there.folder.glob("*.shard")]) >= 6 and on_disk(there.folder) == 0
    assert reader.find("broken by 1", PARTS).broken == "no image"
    proxy.requests.clear()
    proxy.faults = [Fault(".shard", cut=0.5, times=2), Fault(".shard", 503, "SlowDown", times=2)]
    assert values(reader, 2 * COUNT) == [*range(2 * COUNT)]
    ranges = [requested for path, requested in proxy.requests if ".shard" in path]
    assert len(ranges) >= 2 * COUNT and all(ranges) and not proxy.faults[0].times
    proxy.requests.clear()
    assert values(reader, 2 * COUNT) == values(opened(here), 2 * COUNT) == [*range(2 * COUNT)]
    assert not [path for path, _ in proxy.requests if "list-type" not in path], "all is there by now"


def test_shards_that_ranks_have_named_are_not_fetched_although_they_are_listed_late(proxy, tmp_path):
    with or_skipped(), sshfs_views(tmp_path) as (here, there):
        there_first = mirror_at(proxy, there / "cache", "late")
        there_first.synchronize(lambda: None)
        assert not [*there_first.folder.iterdir()]
        writing = mirror_at(proxy, here / "cache", "late")
        with writing.writer(1, compress=False) as writer:
            for number in range(COUNT):
                writer.write(str(number), PARTS, {"t": torch.full((NUMBERS,), float(number))})
        assert not [*there_first.folder.iterdir()], "listed at once: nothing is shown by this test"
        proxy.requests.clear()
        there_first.synchronize(lambda: None, writer.written)
        assert len(writer.written) >= 6
        assert [path for path, _ in proxy.requests if "list-type" not in path] == []
        reader = ShardReader(there_first.folder, there_first, list_sources(there_first.folder, writer.written))
        assert values(reader) == [*range(COUNT)]


def test_a_shard_that_is_uploaded_in_parts_is_whole_elsewhere_and_no_object_before_its_last_part(
    proxy, tmp_path, monkeypatch
):
    monkeypatch.setattr(mirrors, "SHARD_BYTES", 12 << 20)  # obstore's parts have 5 MiB
    values_of = {str(number): torch.arange(700_000.0) + number for number in range(6)}
    here = mirror_at(proxy, tmp_path / "here", "parts")

    def fill_large() -> None:
        with here.writer(0, compress=False) as writer:
            for name, tensor in values_of.items():
                writer.write(name, PARTS, {"t": tensor})

    proxy.faults = [Fault("partNumber=2", 403, "AccessDenied")]
    with pytest.raises(EnvironmentNotReady, match="access is denied"):
        fill_large()
    assert not here.storage.sizes(), "an upload without its second part is no object"
    proxy.requests.clear()
    proxy.faults = [Fault("partNumber=2", 503, "SlowDown", times=2)]
    fill_large()
    assert {f"partNumber={number}" for number in (1, 2, 3)} <= {
        part for path, _ in proxy.requests for part in path.replace("?", "&").split("&")
    }
    reader = opened(mirror_at(proxy, tmp_path / "there", "parts"))
    for name, tensor in values_of.items():
        place = reader.find(name, PARTS)
        assert place and torch.equal(reader.read(place)["t"], tensor)


def full_job(mirror: Mirror, make: Callable[[CacheRequest], None]) -> CacheJob[CacheRequest, CacheRequest]:
    """Return a job for COUNT records; `make` is called for each that is made."""

    def same(item: CacheRequest) -> CacheRequest:
        return item

    def make_all(items: Sequence[CacheRequest]) -> list[Made]:
        for item in items:
            make(item)
        return [{"t": torch.full((NUMBERS,), float(item.name))} for item in items]

    requests = [CacheRequest(str(number), PARTS) for number in range(COUNT)]
    return CacheJob("latents", mirror.folder, lambda: "d", 4, lambda: requests, same, same, make_all, mirror=mirror)


def alone() -> World:
    return World(0, 1, 0, torch.device("cpu"), dist.HashStore())


def test_a_cache_that_grows_while_training_is_in_the_bucket_at_the_end_and_its_local_copy_bounded(proxy, tmp_path):
    mirror, made = mirror_at(proxy, tmp_path / "here", "growing", limit_gb=0.002), list[str]()
    job = full_job(mirror, lambda item: made.append(item.name))
    with ExitStack() as writers:
        cache, _ = open_write_through(job, alone(), lambda: None, writers, lambda: None)
        for _ in range(2):
            read = [cache.read(item) for item in job.items()]
            assert [float(each["t"].mean()) for each in read if not isinstance(each, str)] == [*range(COUNT)]
    assert made == [item.name for item in job.items()] and on_disk(mirror.folder) <= 3.2e6
    assert values(opened(mirror_at(proxy, tmp_path / "there", "growing"))) == [*range(COUNT)]


def test_two_runs_that_fill_one_bucket_at_once_both_end_with_all_records_and_so_does_a_third(proxy, tmp_path):
    both_make = threading.Barrier(2)
    made: dict[str, list[str]] = {"one": [], "two": [], "three": []}

    def fill_as(run: str) -> ShardReader:
        mirror = mirror_at(proxy, tmp_path / run, "at once")

        def make(item: CacheRequest) -> None:
            if not made[run]:
                both_make.wait(PATIENCE)
            made[run].append(item.name)

        return fill_cache(full_job(mirror, make), alone(), Report(quiet=True), lambda: None)[0]

    with ThreadPoolExecutor(2) as pool:
        readers = [*pool.map(fill_as, ("one", "two")), fill_as("three")]
    assert [values(reader) for reader in readers] == [[*range(COUNT)]] * 3
    assert [len(names) for names in made.values()] == [COUNT, COUNT, 0]


def test_a_shard_that_a_run_has_just_begun_is_not_removed_by_one_that_starts_in_the_same_folder(proxy, tmp_path):
    """Without a record yet it was taken for one that a killed run has left; the run that wrote it ended, too."""
    first, second = (mirror_at(proxy, tmp_path / "shared", "begun") for _ in range(2))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / ".merged.index.0123abcd.unfinished").symlink_to("renamed by now")
    with first.writer(0, False) as writer:
        writer._files_with_room(0)
        second.synchronize(lambda: None)
        writer.write("0", PARTS, {"t": torch.ones(NUMBERS)})
    assert values(opened(mirror_at(proxy, tmp_path / "elsewhere", "begun")), 1) == [1]


def test_the_local_copy_stays_within_its_limit_while_it_is_written_and_read(proxy, tmp_path):
    mirror = mirror_at(proxy, tmp_path / "here", "bounded", limit_gb=0.002)
    fill(mirror)
    assert on_disk(mirror.folder) <= 3.2e6 < COUNT * 4 * NUMBERS
    reader = opened(mirror)
    for _ in range(2):
        assert values(reader) == [*range(COUNT)]
        assert on_disk(mirror.folder) <= 3.2e6


def test_an_interrupted_upload_is_repeated_and_what_the_bucket_lost_is_made_again(proxy, tmp_path):
    mirror = mirror_at(proxy, tmp_path / "here", "cut")
    proxy.faults = [Fault(".jsonl", 403, "AccessDenied")]
    with pytest.raises(EnvironmentNotReady, match="access is denied") as caught:
        fill(mirror)
    assert "s3:PutObject" in caught.value.hint
    assert not opened(mirror_at(proxy, tmp_path / "before", "cut")).index.sources, "no index without its shard"
    proxy.faults = []
    made = len(values(opened(mirror)))
    assert made > 5
    there = mirror_at(proxy, tmp_path / "there", "cut")
    assert len(values(opened(there), 3)) == min(made, 3)
    assert len(values(opened(mirror_at(proxy, tmp_path / "also", "cut")))) == made

    obstore.delete(mirror.storage.store, [*mirror.storage.sizes()])
    assert values(opened(there), 1) == []


def test_a_store_without_ranges_sends_each_shard_once(proxy, tmp_path):
    fill(mirror_at(proxy, tmp_path / "here", "whole"))
    there = mirror_at(proxy, tmp_path / "there", "whole")
    reader = opened(there)
    proxy.has_ranges = False
    proxy.requests.clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: values(reader), range(4))) == [[float(number) for number in range(COUNT)]] * 4
    shards = [path.name for path in there.folder.glob("*.shard")]
    asked = [path.rpartition("/")[2] for path, _ in proxy.requests]
    # Before the first answer each thread may ask for a part and then for the whole of one shard.
    assert len(shards) > 3 and len(asked) <= len(shards) + 8, asked
    proxy.has_ranges = True


def test_a_record_that_is_damaged_in_the_bucket_is_retracted_for_all(proxy, tmp_path):
    fill(mirror_at(proxy, tmp_path / "here", "damaged"))
    there = mirror_at(proxy, tmp_path / "there", "damaged")
    reader = opened(there)
    place = reader.find("3", PARTS)
    size = place.shard.stat().st_size
    (tmp_path / "zeros").write_bytes(bytes(size))
    there.storage.upload(place.shard.name, tmp_path / "zeros")
    with pytest.raises(EnvironmentNotReady, match="its checksum does not match in s3://.* either") as caught:
        reader.read(place)
    assert "run the same command again" in caught.value.hint
    assert opened(there).find("3", PARTS) is None
    assert opened(mirror_at(proxy, tmp_path / "third", "damaged")).find("3", PARTS) is None


def test_a_bucket_that_vanishes_and_expired_credentials_are_one_sentence(proxy, tmp_path):
    fill(mirror_at(proxy, tmp_path / "here", "gone"))
    there = mirror_at(proxy, tmp_path / "there", "gone")
    reader = opened(there)
    for status, code, kind, said in (
        (404, "NoSuchBucket", DataError, "does not exist"),
        (400, "ExpiredToken", EnvironmentNotReady, "its credentials have expired"),
    ):
        proxy.faults = [Fault("", status, code)]
        for act in (lambda: values(reader), lambda: there.synchronize(lambda: None), lambda: fill(there)):
            with pytest.raises(kind, match=f"^dataset `t`: bucket `{BUCKET}` at .*{said}$"):
                act()
    proxy.faults = []
    assert values(opened(there)) == [*range(COUNT)]
