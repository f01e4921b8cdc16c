"""The block cache: whole at any time, never fatal, and no entry is lost, however many write and however they end."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import detecting
import pytest
from patience import PATIENCE

from simpletuner.counting.block_detection import look_up, parse, put
from simpletuner.system.files import locks
from simpletuner.system.files.cache_files import block_cache_paths, lock_of
from simpletuner.system.files.regular_files import latest_set_aside

ENTRY = {"fingerprint": "1", "classes": []}
PROCESSES, KILLED = 32, 12


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return the home's file and the other one, in empty places."""
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return block_cache_paths()


@pytest.fixture
def warnings():
    return []


def test_what_is_put_is_found_until_what_it_was_made_from_changes(places, warnings):
    assert look_up("a", "1", warnings.append) is None
    put("a", ENTRY, warnings.append)
    put("b", ENTRY | {"fingerprint": "2"}, warnings.append)
    assert look_up("a", "1", warnings.append) == ENTRY
    assert look_up("a", "2", warnings.append) is None
    assert list(json.loads(places[0].read_text())) == ["a", "b"]
    assert sorted(path.name for path in places[0].parent.iterdir()) == sorted([places[0].name, lock_of(places[0]).name])
    assert warnings == [] and not places[1].exists()


def test_a_home_that_cannot_be_written_falls_back_with_a_warning(places, warnings):
    home, elsewhere = places
    home.parent.write_text("a file where the folder should be")
    put("a", ENTRY, warnings.append)
    assert warnings == [f"cannot write {home} (File exists): the block cache is {elsewhere}"]
    assert look_up("a", "1", warnings.append) == ENTRY
    elsewhere.unlink()
    elsewhere.mkdir()
    put("b", ENTRY, warnings.append)
    assert "the result is not cached" in warnings[-1] and look_up("b", "1", [].append) is None


@pytest.mark.parametrize("damage", ["", '{"a": ', "[1]", "\0\0", "[" * 100_000])
def test_a_damaged_file_is_moved_aside_and_made_anew(places, warnings, damage):
    path = places[0]
    for damaged_again in (look_up, put):
        path.parent.mkdir(exist_ok=True)
        path.write_text(damage)
        if damaged_again is look_up:
            assert look_up("a", "1", warnings.append) is None and not path.exists()
        else:
            put("a", ENTRY, warnings.append)
            assert look_up("a", "1", warnings.append) == ENTRY
        assert len(warnings) == 1 and "is set aside as" in warnings.pop()
        aside = latest_set_aside(path)
        assert aside is not None and aside.read_text() == damage
        aside.unlink()


@pytest.mark.parametrize("entry", [None, 1, "x", {}, {"fingerprint": 1}])
def test_an_entry_that_is_none_is_no_answer(places, warnings, entry):
    places[0].parent.mkdir()
    places[0].write_text(json.dumps({"a": entry}))
    assert look_up("a", "1", warnings.append) is None
    put("a", ENTRY, warnings.append)
    assert look_up("a", "1", warnings.append) == ENTRY and warnings == []


def test_a_lock_that_is_never_given_back_ends_in_a_warning(places, warnings, monkeypatch):
    monkeypatch.setattr(locks.exclusive_lock.__wrapped__, "__defaults__", (0.1,))
    with locks.exclusive_lock(lock_of(places[0])):
        put("a", ENTRY, warnings.append)
    assert "another process holds" in warnings[0]
    assert look_up("a", "1", warnings.append) == ENTRY


def test_who_dies_writing_leaves_a_whole_file_and_a_free_lock(places, warnings, fork_server):
    put("a", ENTRY, warnings.append)
    process = fork_server.Process(target=detecting.die_writing, args=(str(places[0].parent),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert look_up("a", "1", warnings.append) == ENTRY
    put("b", ENTRY, warnings.append)
    assert list(parse(places[0])) == ["a", "b"] and warnings == []


def test_of_32_processes_some_killed_none_loses_what_it_finished(places, tmp_path, fork_server):
    folders = [tmp_path / f"model{number}" for number in range(PROCESSES)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        config = {"_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_single_layers": 2 + number}
        (folder / "config.json").write_text(json.dumps(config))
    processes = [
        fork_server.Process(
            target=detecting.detect_often,
            args=(str(folder), str(places[0].parent), 10_000 if number < KILLED else 2),
        )
        for number, folder in enumerate(folders)
    ]
    for process in processes:
        process.start()
    chance = random.Random(0)
    end = time.monotonic() + PATIENCE
    while not all((folder / "finished").exists() for folder in folders[:KILLED]):
        assert time.monotonic() < end
        assert parse(places[0]) is not None
        time.sleep(0.01)
    for process in processes[:KILLED]:
        time.sleep(chance.random() / 20)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        assert parse(places[0]) is not None, "readers see a whole file at any time"
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * KILLED + [0] * (PROCESSES - KILLED)
    entries = parse(places[0])
    assert sorted(entries) == sorted(f"- - {folder.resolve()}" for folder in folders)
    for number, folder in enumerate(folders):
        counts = {item["class_name"]: item["count"] for item in entries[f"- - {folder.resolve()}"]["classes"]}
        assert counts["FluxSingleTransformerBlock"] == 2 + number
