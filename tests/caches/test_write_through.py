"""A cache that grows while training: each record is made once, found by all ranks and later runs, killed or not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE

from simpletuner.caches import workers as recent
from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill import CacheMode, RecordSource, WriteThroughCache, fill_cache, open_write_through
from simpletuner.caches.store.shards import ShardReader, ShardWriter
from simpletuner.caches.workers import CacheJob, CacheRequest, Made
from simpletuner.errors import DataError
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.system.files.cache_files import index_of
from simpletuner.system.processes.signals import StopRequest

GO_ON = StopRequest().check
COUNT = 40
Cache = WriteThroughCache[CacheRequest, CacheRequest]


def alone() -> World:
    return World(0, 1, 0, torch.device("cpu"), dist.HashStore())


def wanted() -> list[CacheRequest]:
    return [CacheRequest(f"r{number}", {"file": "1"}) for number in range(COUNT)]


class Maker:
    """Makes records that hold their number; the one named `broken` cannot be made."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.made, self.loaded = broken, list[str](), 0

    def job(self, folder: Path) -> CacheJob[CacheRequest, CacheRequest]:
        items = wanted()
        return CacheJob(
            "latents", folder, lambda: "digest", 2, lambda: items, lambda item: item, lambda item: item, self.make
        )

    def make(self, items: Sequence[CacheRequest]) -> list[Made]:
        self.made += [item.name for item in items]
        return [self.value(item) for item in items]

    def value(self, item: CacheRequest) -> Made:
        return "no image" if item.name == self.broken else {"t": torch.full((9,), float(item.name[1:]))}

    def load(self) -> None:
        self.loaded += 1


def grown(folder: Path, maker: Maker, writers: ExitStack) -> tuple[Cache, dict[str, str]]:
    return open_write_through(maker.job(folder), alone(), GO_ON, writers, maker.load)


def numbers(cache: Cache, items: Sequence[CacheRequest]) -> list[float]:
    made = [cache.read(item) for item in items]
    return [float(each["t"][0]) for each in made if not isinstance(each, str)]


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(recent, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(recent, "MERGED_AT", 3)


def test_many_threads_make_each_record_once_and_a_second_rank_reads_what_the_first_one_makes(tmp_path, at_once):
    first, second, items = Maker(), Maker(), wanted()
    with ExitStack() as writers, ThreadPoolExecutor(8) as pool:
        cache, other = (grown(tmp_path, maker, writers)[0] for maker in (first, second))
        assert first.loaded == 1
        both = threading.Barrier(8)

        def read_all(number: int) -> list[float]:
            both.wait(PATIENCE)
            return numbers(cache, items[: COUNT // 2])

        assert [*pool.map(read_all, range(8))] == [[*range(COUNT // 2)]] * 8
        assert sorted(first.made) == sorted(item.name for item in items[: COUNT // 2])
        assert numbers(other, items) == numbers(cache, items) == [*range(COUNT)]
        assert second.made == [item.name for item in items[COUNT // 2 :]] and len(first.made) == COUNT // 2
        assert len(cache.recent.merged.rows) >= COUNT // 2, "few locations are held one by one"
    assert len([*ShardReader(tmp_path).records()]) == COUNT


def test_a_killed_run_leaves_all_that_it_has_made_to_the_next_one_and_to_one_that_fills(tmp_path):
    maker, items = Maker(), wanted()
    writer = ShardWriter(tmp_path, 0)  # never closed
    cache = WriteThroughCache(maker.job(tmp_path), ShardReader(tmp_path), writer)
    assert numbers(cache, items[:5]) == [0, 1, 2, 3, 4]
    index = index_of(next(tmp_path.glob("*.shard")))
    index.write_bytes(index.read_bytes()[:-9])
    after = Maker()
    with ExitStack() as writers:
        assert numbers(grown(tmp_path, after, writers)[0], items[:10]) == [*range(10)]
    assert after.made == [f"r{number}" for number in range(4, 10)], "the torn line's record, and new ones"
    filling = Maker()
    reader, _ = fill_cache(filling.job(tmp_path), alone(), Report(quiet=True), GO_ON)
    assert {*filling.made} == {f"r{number}" for number in range(10, COUNT)} and len([*reader.records()]) == COUNT
    writer.close()


def test_what_cannot_be_made_is_known_at_the_next_start_and_a_complete_cache_needs_no_model(tmp_path):
    maker, items = Maker(broken="r7"), wanted()
    with ExitStack() as writers:
        cache, broken = grown(tmp_path, maker, writers)
        assert not broken and cache.read(items[7]) == "no image" == cache.read(items[7])
        assert maker.made == ["r7"]
    with ExitStack() as writers:
        again, broken = grown(tmp_path, maker, writers)
        assert broken == {"r7": "no image"} and again.read(items[7]) == "no image" and maker.loaded == 2
    fill_cache(maker.job(tmp_path), alone(), Report(quiet=True), GO_ON)
    made = len(maker.made)
    with ExitStack() as writers:
        complete, broken = grown(tmp_path, maker, writers)
        assert broken == {"r7": "no image"} and maker.loaded == 2
        assert numbers(complete, items) == [*range(7), *range(8, COUNT)] and len(maker.made) == made


def test_records_are_equal_however_they_are_made_and_what_cannot_be_made_is_an_error_with_a_way_on(tmp_path):
    modes: tuple[CacheMode, ...] = ("precomputed", "write-through", "uncached")
    for mode in modes:
        maker, items = Maker(broken="r7"), wanted()
        encoder, folder = Encoder(lambda: None, torch.device("cpu")), tmp_path / mode
        with ExitStack() as writers:
            source = RecordSource(maker.job(folder), mode, encoder, alone(), writers)
            assert source.fill(Report(quiet=True), GO_ON) == ({"r7": "no image"} if mode == "precomputed" else {})
            assert len(maker.made) == (COUNT if mode == "precomputed" else 0)
            read = [float(source.record(item)["t"][0]) for item in items if item.name != "r7" for _ in range(2)]
            assert read == [number for number in range(COUNT) if number != 7 for _ in range(2)]
            assert len(maker.made) == (COUNT if mode == "precomputed" else COUNT - 1), "a second reading makes nothing"
            if mode != "precomputed":
                with pytest.raises(DataError, match="r7 cannot be decoded: no image") as raised:
                    source.record(items[7])
                assert ("leave out vae_cache_disable" in str(raised.value.hint)) == (mode == "uncached")
        assert folder.exists() == (mode != "uncached")
