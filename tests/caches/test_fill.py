from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE

from simpletuner.caches.fill import fill_cache, folder_before_renaming
from simpletuner.caches.store.records import short_hash
from simpletuner.caches.store.shards import ShardReader, ShardWriter, read_note
from simpletuner.caches.workers import CacheJob, CacheRequest, load_ahead, split_into_chunks
from simpletuner.errors import EnvironmentNotReady, Stopped
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.system.files.cache_files import COMPLETE
from simpletuner.system.processes.signals import StopRequest

GO_ON = StopRequest().check


def alone() -> World:
    return World(0, 1, 0, torch.device("cpu"), dist.HashStore())


def wanted(count: int, vae: str = "a") -> list[CacheRequest]:
    return [CacheRequest(f"r{number}", {"file": "1", "VAE": vae}, f"{number % 2}") for number in range(count)]


def job(
    folder: Path, made: list[str], items: list[CacheRequest], chunk: int = 2
) -> CacheJob[CacheRequest, CacheRequest]:
    def make(items: Sequence[CacheRequest]) -> list[Mapping[str, torch.Tensor]]:
        made.extend(item.name for item in items)
        return [{"t": torch.tensor([float(item.name[1:]), len(items)])} for item in items]

    digest = short_hash([[item.name, item.parts] for item in items])
    return CacheJob("images", folder, lambda: digest, chunk, lambda: items, lambda item: item, lambda item: item, make)


def filled(*given, world: World | None = None, report: Report | None = None, stop=GO_ON, **more) -> ShardReader:
    reader, broken = fill_cache(job(*given, **more), world or alone(), report or Report(quiet=True), stop)
    assert not broken
    return reader


def names_in(reader: ShardReader) -> set[str]:
    return {each.name for each in reader.records()}


def test_chunks_hold_records_of_one_group_only():
    chunks = ["".join("abcdefg"[place] for place in chunk) for chunk in split_into_chunks("xyxxyxx", 2)]
    assert chunks == ["ac", "df", "g", "be"]
    assert list(split_into_chunks("", 2)) == []


def test_only_what_is_missing_is_made_and_told(tmp_path, capsys):
    made: list[str] = []
    reader = filled(tmp_path, made, wanted(3), report=Report())
    assert sorted(made) == ["r0", "r1", "r2"]
    assert names_in(reader) == set(made)
    assert "encoding 3 images" in capsys.readouterr().err
    made.clear()
    reader = filled(tmp_path, made, wanted(5), report=Report())
    assert sorted(made) == ["r1", "r3", "r4"], "r1 and r3 are one batch"
    assert len(names_in(reader)) == 5
    assert "encoding 2 of 5 images" in capsys.readouterr().err
    made.clear()
    filled(tmp_path, made, wanted(5), report=Report())
    assert made == []
    assert capsys.readouterr().err == ""


def test_what_changed_is_told_before_it_is_made_again(tmp_path, capsys):
    filled(tmp_path, [], wanted(3), report=Report())
    capsys.readouterr()
    filled(tmp_path, [], wanted(4, vae="b"), report=Report())
    assert "encoding 4 images (VAE changed for 3)" in capsys.readouterr().err


def test_a_folder_of_images_that_was_renamed_is_why_all_is_made_again(tmp_path, capsys):
    for dataset, names in {"cats": ("0.png", "1.png"), "dogs": ("2.png", "3.png")}.items():
        with ShardWriter(tmp_path / dataset, 0) as writer:
            for name in names:
                writer.write_broken(f"{dataset}/{name}", {}, "unreadable")
    new = {"tabbies/0.png", "tabbies/1.png", "tabbies/4.png"}
    assert folder_before_renaming(tmp_path / "tabbies", new) == "cats"
    assert folder_before_renaming(tmp_path / "dogs", {"dogs/4.png"}) == ""
    filled(tmp_path / "numbers", [], wanted(3), report=Report())
    assert "encoding 3 images\n" in capsys.readouterr().err


def test_several_ranks_share_the_work_and_all_see_all_of_it(tmp_path):
    store, made = dist.HashStore(), []
    worlds = [World(rank, 3, rank, torch.device("cpu"), store) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        fills = [pool.submit(filled, tmp_path, made, wanted(40), world=world) for world in worlds]
        readers = [each.result(timeout=PATIENCE) for each in fills]
    assert sorted(made) == sorted(item.name for item in wanted(40)), "each record is made once"
    for reader in readers:
        assert names_in(reader) == set(made)


def test_a_request_to_stop_ends_filling_between_chunks_and_keeps_what_is_made(tmp_path):
    request, made = StopRequest(), []

    def stop_after_two_chunks() -> None:
        if len(made) >= 4:
            request.signal_number = 15
        request.check()

    with pytest.raises(Stopped):
        filled(tmp_path, made, wanted(10), stop=stop_after_two_chunks)
    assert len(made) == 4
    assert names_in(ShardReader(tmp_path)) == set(made)


def test_an_interrupted_batch_is_computed_whole_so_that_its_records_are_those_of_an_undisturbed_run(tmp_path):
    whole = filled(tmp_path / "whole", [], wanted(12), chunk=3)
    filled(tmp_path / "parts", [], wanted(12), chunk=3)
    index = next((tmp_path / "parts").glob("*.index.jsonl"))
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:2] + lines[4:7]))
    parts = filled(tmp_path / "parts", [], wanted(12), chunk=3)
    for item in wanted(12):
        places = [reader.find(item.name, item.parts) for reader in (whole, parts)]
        assert torch.equal(whole.read(places[0])["t"], parts.read(places[1])["t"]), item.name


def test_two_caches_may_lie_in_one_folder(tmp_path):
    world = alone()
    filled(tmp_path, [], wanted(4), world=world)
    others = [CacheRequest(f"r{number}", {"file": "1"}) for number in range(10, 14)]
    reader = filled(tmp_path, [], others, world=world)
    assert {item.name for item in others} <= names_in(reader)


def test_items_are_loaded_while_earlier_ones_are_encoded_and_no_rank_takes_more_than_its_share(tmp_path):
    items, loaded = wanted(24), {item.name: threading.Event() for item in wanted(24)}
    made: list[str] = []

    def load(item: CacheRequest) -> CacheRequest:
        loaded[item.name].set()
        return item

    def make(chunk: Sequence[CacheRequest]) -> list[Mapping[str, torch.Tensor]]:
        ahead = [item.name for item in items if item.name not in {*made, *(each.name for each in chunk)}]
        made.extend(item.name for item in chunk)
        assert all(loaded[name].wait(PATIENCE) for name in ahead[: 2 * 3 - len(chunk)]), "nothing is loaded meanwhile"
        return [{"t": torch.zeros(1)} for _ in chunk]

    one_group = [replace(item, group="") for item in items]
    ahead = CacheJob("latents", tmp_path, lambda: "d", 2, lambda: one_group, lambda item: item, load, make, threads=4)
    reader, _ = fill_cache(ahead, alone(), Report(quiet=True), GO_ON)
    assert names_in(reader) == set(made) and len(made) == 24
    two = World(0, 2, 0, torch.device("cpu"), dist.HashStore())
    short = load_ahead(ahead, [np.arange(2)], "short", two, GO_ON)
    next(short)
    assert two.next_chunk("short") == 1, "of a queue of one chunk nothing is taken ahead"
    with pytest.raises(StopIteration):
        next(short)


def test_a_rank_that_fails_leaves_what_all_have_made_and_the_next_start_makes_the_rest(tmp_path):
    store, made, failed = dist.HashStore(), [], threading.Event()
    worlds = [World(rank, 2, rank, torch.device("cpu"), store) for rank in range(2)]

    def stop() -> None:  # as a launcher does once another rank has failed
        if failed.is_set() and len(made) >= 6:
            raise Stopped(15, "stopped")

    def fail(items: Sequence[CacheRequest]) -> list[Mapping[str, torch.Tensor]]:
        failed.set()
        raise EnvironmentNotReady("out of memory", "a smaller batch")

    failing = replace(job(tmp_path, [], wanted(40)), make=fail, threads=8)

    def go_on(items: Sequence[CacheRequest]) -> list[Mapping[str, torch.Tensor]]:
        assert failed.wait(PATIENCE)
        made.extend(item.name for item in items)
        return [{"t": torch.zeros(1)} for _ in items]

    going_on = replace(job(tmp_path, [], wanted(40)), make=go_on, threads=8)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(fill_cache, failing, worlds[0], Report(quiet=True), stop)
        other = pool.submit(fill_cache, going_on, worlds[1], Report(quiet=True), stop)
        with pytest.raises(EnvironmentNotReady):
            one.result(timeout=PATIENCE)
        with pytest.raises(Stopped):
            other.result(timeout=PATIENCE)
    kept = names_in(ShardReader(tmp_path))
    assert kept == set(made) and len(kept) >= 6
    again: list[str] = []
    assert len(names_in(filled(tmp_path, again, wanted(40)))) == 40
    assert not kept & set(again)


def test_a_warm_start_looks_up_no_record_until_a_shard_or_the_note_is_another(tmp_path):
    def never(item: CacheRequest) -> CacheRequest:
        raise AssertionError("it was known that nothing is missing")

    items = wanted(6)
    broken = replace(job(tmp_path, [], items), make=lambda chunk: ["cut short" for _ in chunk])
    assert set(fill_cache(broken, alone(), Report(quiet=True), GO_ON)[1].values()) == {"cut short"}
    made: list[str] = []
    filled(tmp_path, made, wanted(4, vae="b"))
    known = replace(job(tmp_path, made, items), request=never)
    other = replace(job(tmp_path, made, wanted(4, vae="b")), request=never)
    fill_cache(other, alone(), Report(quiet=True), GO_ON)
    with pytest.raises(AssertionError):  # since then there are more shards
        fill_cache(known, alone(), Report(quiet=True), GO_ON)
    fill_cache(job(tmp_path, made, items), alone(), Report(quiet=True), GO_ON)
    assert len(fill_cache(known, alone(), Report(quiet=True), GO_ON)[1]) == 6, "what is broken is known, too"
    fill_cache(other, alone(), Report(quiet=True), GO_ON)

    note = tmp_path / COMPLETE
    whole = note.read_bytes()
    reader = ShardReader(tmp_path)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        for content in (damaged, whole[:place]):
            note.write_bytes(content)
            assert read_note(reader, known.digest) is None
    note.write_bytes(b"[" * 100_000)
    assert read_note(reader, known.digest) is None
    note.write_bytes(whole)
    reader.read(reader.find("r0", wanted(1, vae="b")[0].parts))
    with ShardWriter(tmp_path, 999) as writer:
        writer.retract(reader.find("r0", wanted(1, vae="b")[0].parts))
    with pytest.raises(AssertionError):
        fill_cache(other, alone(), Report(quiet=True), GO_ON)
    made.clear()
    filled(tmp_path, made, wanted(4, vae="b"))
    assert sorted(made) == ["r0", "r2"], "the retracted record is made again, with its chunk"
