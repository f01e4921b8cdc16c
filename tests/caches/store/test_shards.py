from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from disk_calls import recorded_calls
from patience import PATIENCE

from simpletuner.caches.fill import why_missing
from simpletuner.caches.store.records import KeyParts, RecordLocation
from simpletuner.caches.store.shards import ShardReader, ShardWriter
from simpletuner.errors import EnvironmentNotReady

PARTS = {"file": "1", "VAE": "a", "dtype": "fp32"}


def written(folder: Path, *names: str, rank: int = 0, **parts: str) -> Path:
    with ShardWriter(folder, rank) as writer:
        for name in names:
            writer.write(name, PARTS | parts, {"t": torch.full((10,), float(len(name)))})
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the shards and their indexes: all that is not derived from them."""
    return {path.name: path.read_bytes() for path in folder.glob("rank*")}


def records(folder: Path) -> dict[str, RecordLocation]:
    return {each.name: each for each in ShardReader(folder).records()}


def only(folder: Path, suffix: str) -> Path:
    (path,) = folder.glob(f"*{suffix}")
    return path


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Make the kernel refuse to write more, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_of_several_types_come_back_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "f32": torch.randn(4, 8, 8),
        "bf16": torch.randn(77, 16).bfloat16(),
        "f16": torch.randn(3).half(),
        "i64": torch.tensor([[1024, 768, 0, 0]]),
        "bool": torch.tensor([[True, False, True], [False, False, True]]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(12.0).view(3, 4).t(),
    }
    with ShardWriter(tmp_path, 0) as writer:
        writer.write("first", PARTS, {"t": torch.ones(2)})
        writer.write("näme/with „signs“\n", PARTS, tensors)
    reader = ShardReader(tmp_path)
    got = reader.read(reader.find("näme/with „signs“\n", PARTS))
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert torch.equal(reader.read(reader.find("first", PARTS))["t"], torch.ones(2))


def test_changing_what_was_read_changes_nothing_on_disk(tmp_path):
    written(tmp_path, "a")
    before = contents(tmp_path)
    reader = ShardReader(tmp_path)
    reader.read(reader.find("a", PARTS))["t"].add_(1)
    fresh = ShardReader(tmp_path)
    assert torch.equal(fresh.read(fresh.find("a", PARTS))["t"], torch.ones(10))
    assert contents(tmp_path) == before


def test_what_was_read_outlives_its_reader(tmp_path):
    written(tmp_path, "a", "b")
    tensors = [ShardReader(tmp_path).read(place)["t"] for place in records(tmp_path).values()]
    gc.collect()
    assert all(torch.equal(tensor, torch.ones(10)) for tensor in tensors)


def test_a_type_that_cannot_be_read_back_is_refused_when_it_is_written(tmp_path):
    with ShardWriter(tmp_path, 0) as writer, pytest.raises((KeyError, TypeError, ValueError, AssertionError)):
        writer.write("a", PARTS, {"t": torch.ones(2, dtype=torch.complex64)})


def test_a_record_is_found_by_exactly_its_parts(tmp_path):
    reader = ShardReader(written(tmp_path, "a"))
    assert reader.find("a", dict(reversed(PARTS.items()))) is not None
    assert reader.find("a", PARTS | {"VAE": "b"}) is None
    assert reader.find("a", {"file": "1"}) is None
    assert reader.find("b", PARTS) is None


def test_an_empty_or_missing_folder_holds_nothing(tmp_path):
    assert ShardReader(tmp_path).find("a", PARTS) is None
    assert records(tmp_path / "none") == {}


def test_a_writer_that_writes_nothing_leaves_no_files(tmp_path):
    with ShardWriter(tmp_path / "cache", 0):
        pass
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_broken_record_is_remembered_with_the_reason(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        writer.write_broken("bad", PARTS, "cut short")
        writer.write("good", PARTS, {"t": torch.ones(1)})
    reader = ShardReader(tmp_path)
    assert reader.find("bad", PARTS).broken == "cut short"
    assert reader.find("good", PARTS).broken == ""
    assert reader.find("bad", PARTS | {"file": "2"}) is None


def test_a_shard_of_nothing_but_broken_records_can_be_opened(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        writer.write_broken("bad", PARTS, "no picture")
    assert ShardReader(tmp_path).find("bad", PARTS).broken == "no picture"


def test_a_torn_index_line_is_ignored_wherever_it_is_torn(tmp_path):
    written(tmp_path, "a", "b")
    index = only(tmp_path, ".index.jsonl")
    whole = index.read_bytes()
    second = whole.index(b"\n") + 1
    for length in range(len(whole)):
        index.write_bytes(whole[:length])
        assert records(tmp_path).keys() == ({"a"} if length >= second else set())
    index.write_bytes(whole)
    assert len(records(tmp_path)) == 2


def test_garbage_in_an_index_does_not_hide_the_lines_after_it(tmp_path):
    written(tmp_path, "a")
    index = only(tmp_path, ".index.jsonl")
    index.write_bytes(b'\x00\x00\xff\n{"name": "x"}\n\n' + index.read_bytes())
    assert records(tmp_path).keys() == {"a"}


def test_records_beyond_the_end_of_a_truncated_shard_are_ignored(tmp_path):
    written(tmp_path, "a", "b", "c")
    shard = only(tmp_path, ".shard")
    places = records(tmp_path)
    for name, place in reversed(places.items()):
        with shard.open("r+b") as file:
            file.truncate(place.offset + place.length - 1)
        left = records(tmp_path).keys()
        assert left == {other for other in places if other < name}
    shard.unlink()
    assert records(tmp_path) == {}


def test_a_new_writer_never_touches_old_shards(tmp_path):
    written(tmp_path, "a")
    before = contents(tmp_path)
    written(tmp_path, "b")
    written(tmp_path, "c", rank=1)
    after = contents(tmp_path)
    assert before.items() <= after.items()
    assert len(after) == 6
    assert records(tmp_path).keys() == {"a", "b", "c"}


def test_two_writers_of_one_rank_at_once_do_not_disturb_each_other(tmp_path):
    with ShardWriter(tmp_path, 0) as one, ShardWriter(tmp_path, 0) as two:
        for number in range(5):
            one.write(f"one {number}", PARTS, {"t": torch.full((3,), float(number))})
            two.write(f"two {number}", PARTS, {"t": torch.full((3,), 10.0 + number)})
    reader = ShardReader(tmp_path)
    for number in range(5):
        assert reader.read(reader.find(f"one {number}", PARTS))["t"][0] == number
        assert reader.read(reader.find(f"two {number}", PARTS))["t"][0] == 10 + number


def test_a_writer_never_uses_the_name_of_a_shard_again_that_was_removed_meanwhile(tmp_path):
    closed: list[Path] = []
    with ShardWriter(tmp_path, 0, shard_bytes=1, on_closed=closed.append) as writer:
        for number in range(3):
            writer.write(str(number), PARTS, {"t": torch.ones(2)})
            if closed:
                closed[0].unlink(missing_ok=True)
    assert len({*closed}) == 3 and closed[2].exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_shard_and_then_its_index_are_on_the_disk_before_it_counts_as_closed(tmp_path):
    closed: list[tuple[Path, int]] = []
    with recorded_calls() as calls:
        writer = ShardWriter(tmp_path, 0, on_closed=lambda path: closed.append((path, len(calls))))
        writer.write("a", PARTS, {"t": torch.ones(500)})
        assert calls == [], "records are not synced one by one"
        writer.close()
    shard, index = only(tmp_path, ".shard"), only(tmp_path, ".index.jsonl")
    assert calls == [("sync", str(path), path.stat().st_size) for path in (shard, index)]
    assert closed == [(shard, 2)]


def test_every_record_begins_at_a_multiple_of_eight_bytes(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        for number in range(1, 12):
            place = writer.write("n" * number, PARTS, {"t" * number: torch.ones(number, dtype=torch.bool)})
            assert place.offset % 8 == 0, "torch.frombuffer refuses numbers that are not aligned"
            writer.write_broken(f"broken {number}", PARTS, "cut short")


def test_a_damaged_line_of_a_broken_record_is_not_believed(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        writer.write_broken("bad", PARTS, "cut short")
    index = only(tmp_path, ".index.jsonl")
    line = json.loads(index.read_text())
    assert records(tmp_path)["bad"].broken == "cut short"
    for change in ({"broken": "cut shorT"}, {"name": "baD"}, {"parts": PARTS | {"VAE": "b"}}):
        index.write_text(json.dumps(line | change) + "\n")
        assert records(tmp_path) == {}, "nothing is left out of training because of a flipped bit"


def test_a_full_shard_is_followed_by_the_next_one(tmp_path):
    with ShardWriter(tmp_path, 0, shard_bytes=1000) as writer:
        for number in range(10):
            writer.write(f"r{number}", PARTS, {"t": torch.full((80,), float(number))})
        writer.write("larger than a shard", PARTS, {"t": torch.ones(1000)})
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.shard"))]
    assert len(sizes) == 6
    assert max(sizes[:-1]) <= 1000 < sizes[-1]
    reader = ShardReader(tmp_path)
    assert [float(reader.read(reader.find(f"r{number}", PARTS))["t"][0]) for number in range(10)] == list(range(10))


def test_a_record_can_be_read_while_the_writer_goes_on(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        writer.write("a", PARTS, {"t": torch.ones(4)})
        reader = ShardReader(tmp_path)
        writer.write("b", PARTS, {"t": torch.zeros(4)})
        assert torch.equal(reader.read(reader.find("a", PARTS))["t"], torch.ones(4))
        assert reader.find("b", PARTS) is None, "a reader is a snapshot"


@pytest.mark.parametrize("where", ["record", "header", "name", "parts", "offset", "length"])
def test_damage_of_one_record_is_found_and_the_record_is_made_again_at_the_next_start(tmp_path, where):
    written(tmp_path, "a", "bb", "c")
    shard, index = only(tmp_path, ".shard"), only(tmp_path, ".index.jsonl")
    place = ShardReader(tmp_path).find("bb", PARTS)
    if where in ("record", "header"):
        blob = bytearray(shard.read_bytes())
        blob[place.offset + (place.length - 1 if where == "record" else 4)] ^= 1
        shard.write_bytes(blob)
    else:
        lines = [json.loads(line) for line in index.read_text().splitlines()]
        b = next(line for line in lines if line["name"] == "bb")
        new = {"name": "d", "parts": PARTS | {"VAE": "z"}, "offset": lines[0]["offset"], "length": b["length"] - 8}
        b[where] = new[where]
        index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = ShardReader(tmp_path)
    assert torch.equal(reader.read(reader.find("a", PARTS))["t"], torch.ones(10))
    found = [each for each in reader.records() if each.name not in ("a", "c")]
    assert len(found) == 1, "of a changed name or changed parts there is a record, but not the one asked for"
    with pytest.raises(EnvironmentNotReady) as caught:
        reader.read(found[0])
    assert f"{shard} is damaged at byte {found[0].offset}" in caught.value.message
    assert "run the same command again: it makes this record again" in caught.value.hint
    assert records(tmp_path).keys() <= {"a", "c"}
    written(tmp_path, "bb")
    again = ShardReader(tmp_path)
    assert torch.equal(again.read(again.find("bb", PARTS))["t"], torch.full((10,), 2.0))


def test_any_flipped_bit_of_an_index_is_found_or_the_record_is_missing(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        writer.write("a", PARTS, {"t": torch.arange(4.0)})
        writer.write_broken("bad", PARTS, "cut short")
    index = only(tmp_path, ".index.jsonl")
    whole = index.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        index.write_bytes(damaged)
        reader = ShardReader(tmp_path)
        for name, parts, wanted in (("a", PARTS, ""), ("bad", PARTS, "cut short")):
            found = reader.find(name, parts)
            if found is None:
                continue
            assert found.broken == wanted or name == "bad"
            if not found.broken:
                try:
                    assert torch.equal(reader.read(found)["t"], torch.arange(4.0))
                except EnvironmentNotReady:
                    for path in tmp_path.glob("rank999*"):
                        path.unlink()


@pytest.mark.parametrize(
    "change", [{"offset": "0"}, {"name": ["a"]}, {"parts": None}, {"length": -5}, {"retracts": 3}, {"checksum": 7}]
)
def test_an_index_line_of_wrong_types_hides_at_most_its_own_record(tmp_path, change):
    written(tmp_path, "a", "b")
    index = only(tmp_path, ".index.jsonl")
    first, second = index.read_text().splitlines()
    index.write_text(json.dumps(json.loads(first) | change) + "\n" + second + "\n")
    assert ShardReader(tmp_path).find("b", PARTS) is not None


def test_a_folder_in_the_place_of_an_index_or_a_shard_holds_nothing(tmp_path):
    written(tmp_path, "a")
    for suffix in (".index.jsonl", ".shard"):
        path = only(tmp_path, suffix)
        path.unlink()
        path.mkdir()
        assert records(tmp_path) == {}
    written(tmp_path, "a")
    assert len(records(tmp_path)) == 1


def test_a_missing_record_says_which_parts_changed(tmp_path):
    written(tmp_path, "a")
    assert changed(tmp_path, PARTS | {"VAE": "b", "dtype": "bf16"}) == {"a": ["VAE", "dtype"]}
    assert changed(tmp_path, PARTS | {"new part": "x"}) == {"a": ["new part"]}


def changed(folder: Path, parts: KeyParts) -> dict[str, list[str]]:
    return why_missing(folder, ["a", "never made"], lambda name: parts)


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1), (1, 0)])
def test_the_nearest_record_of_a_name_explains_what_changed_whichever_rank_wrote_it(tmp_path, ranks):
    written(tmp_path, "a", rank=ranks[0])
    written(tmp_path, "a", rank=ranks[1], VAE="b")
    assert changed(tmp_path, PARTS | {"VAE": "b", "file": "2"}) == {"a": ["file"]}
    assert changed(tmp_path, PARTS | {"dtype": "bf16"}) == {"a": ["dtype"]}
    assert ShardReader(tmp_path).find("a", PARTS) is not None, "the older one is still there"


def test_the_latest_record_of_the_same_parts_is_the_one_that_is_read(tmp_path):
    with ShardWriter(tmp_path, 0) as writer:
        writer.write("a", PARTS, {"t": torch.ones(1)})
    with ShardWriter(tmp_path, 0) as writer:
        writer.write("a", PARTS, {"t": torch.zeros(1)})
    reader = ShardReader(tmp_path)
    assert reader.read(reader.find("a", PARTS))["t"] == 0


WRITE_UNTIL_KILLED = """
import itertools, os, random, signal, sys, time
from pathlib import Path
import torch
from simpletuner.caches.store.shards import ShardWriter

torch.set_num_threads(1)
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
for turn in range(kills):
    started, first_written = os.pipe()
    child = os.fork()
    if child == 0:
        writer = ShardWriter(folder, turn % 2)
        for number in itertools.count():
            size = random.Random(number).randrange(1, 20000)
            tensors = {"t": torch.full((size,), float(number)), "turn": torch.tensor(turn)}
            writer.write(f"{turn}/{number}", {"p": "1"}, tensors)
            if number == 0:
                os.write(first_written, b"1")
    os.read(started, 1)  # on a busy machine, a child may take longer than any wait to write its first record
    time.sleep(0.03 * turn)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_writer_killed_at_any_moment_leaves_every_indexed_record_readable(tmp_path):
    turns = 6
    subprocess.run([sys.executable, "-c", WRITE_UNTIL_KILLED, tmp_path, str(turns)], check=True, timeout=PATIENCE)
    reader = ShardReader(tmp_path)
    assert {each.name.split("/")[0] for each in reader.records()} == {str(turn) for turn in range(turns)}
    for place in reader.records():
        name = place.name
        turn, number = map(int, name.split("/"))
        got = reader.read(place)
        assert got["turn"] == turn
        assert bool((got["t"] == number).all()), name
    before = contents(tmp_path)
    written(tmp_path, "after")
    assert before.items() <= contents(tmp_path).items()
    assert ShardReader(tmp_path).find("after", PARTS) is not None


def write_until_full(writer: ShardWriter, floats: int) -> None:
    for number in range(1000):
        writer.write(f"r{number}", PARTS, {"t": torch.full((floats,), float(number))})


@pytest.mark.parametrize(("floats", "kept"), [(20_000, 0), (2_500, 2), (250, 27)])
def test_a_full_disk_is_said_and_what_was_written_is_kept(tmp_path, floats, kept):
    writer = ShardWriter(tmp_path, 0)
    with files_no_larger_than(30_000), pytest.raises(EnvironmentNotReady) as caught:
        write_until_full(writer, floats)
    assert f"cannot write to the cache {tmp_path}: File too large" in caught.value.message
    assert "cache_dir_vae" in caught.value.hint
    reader = ShardReader(tmp_path)
    assert len(list(reader.records())) == kept
    for place in reader.records():
        assert torch.equal(reader.read(place)["t"], torch.full((floats,), float(place.name[1:])))
    writer.close()


@pytest.mark.parametrize("floats", [2_500, 250])
def test_a_full_disk_is_said_when_the_writer_is_closed_by_it(tmp_path, floats):
    writer = ShardWriter(tmp_path, 0)
    try:
        with files_no_larger_than(30_000), pytest.raises(EnvironmentNotReady), writer:
            write_until_full(writer, floats)
    finally:
        writer.close()


@pytest.mark.parametrize("line", ["null", "[]", "17"])
def test_an_index_line_that_is_no_record_is_ignored(tmp_path, line):
    written(tmp_path, "a")
    index = only(tmp_path, ".index.jsonl")
    index.write_text(f"{line}\n{index.read_text()}")
    assert records(tmp_path).keys() == {"a"}


def test_an_index_line_without_a_name_is_ignored(tmp_path):
    written(tmp_path, "a")
    index = only(tmp_path, ".index.jsonl")
    index.write_text(json.dumps({"offset": 0, "length": 0, "parts": {}}) + "\n" + index.read_text())
    assert records(tmp_path).keys() == {"a"}


def test_compressed_records_are_smaller_read_as_written_and_lie_beside_others(tmp_path):
    written(tmp_path, "a")
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    tensors = {"f32": noise, "bf16": noise.bfloat16(), "odd": torch.tensor([True, False, True]), "none": torch.zeros(0)}
    with ShardWriter(tmp_path, 1, compress=True) as writer:
        writer.write("b", PARTS, tensors)
        writer.write("tiny", PARTS, {"t": torch.ones(0)})
        writer.write_broken("bad", PARTS, "cut short")
    with ShardWriter(tmp_path, 2) as writer:
        writer.write("c", PARTS, tensors)
    reader = ShardReader(tmp_path)
    b, c = (reader.find(name, PARTS) for name in "bc")
    assert b.length < 0.9 * c.length
    for place in (b, c):
        got = reader.read(place)
        assert got.keys() == tensors.keys()
        assert all(got[name].dtype == each.dtype and torch.equal(got[name], each) for name, each in tensors.items())
    assert reader.read(reader.find("tiny", PARTS))["t"].numel() == 0
    assert torch.equal(reader.read(reader.find("a", PARTS))["t"], torch.ones(10))
    got = reader.read(b)["f32"].add_(1)  # memory of its own
    assert torch.equal(reader.read(b)["f32"], noise) and not torch.equal(got, noise)


def test_a_damaged_compressed_record_is_retracted(tmp_path):
    with ShardWriter(tmp_path, 0, compress=True) as writer:
        for name in "ab":
            writer.write(name, PARTS, {"t": torch.randn(4096)})
    shard, index = only(tmp_path, ".shard"), only(tmp_path, ".index.jsonl")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    blob = bytearray(shard.read_bytes())
    for line in lines:
        blob[line["offset"] + 12] ^= 255  # in the header of the frame
    shard.write_bytes(blob)
    reader = ShardReader(tmp_path)
    for name in "ab":
        with pytest.raises(EnvironmentNotReady, match="is damaged at byte"):
            reader.read(reader.find(name, PARTS))
    assert records(tmp_path) == {}
