"""Counts of earlier commands: read where they answer the same question and are whole, else made again."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner.counting.records import FOLDER, MOST_RECORDS, CountRecord, checksum
from simpletuner.counting.step_memory import Workload
from simpletuner.launch.node_info import versions
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.tools.plan.estimate import opened_family
from simpletuner.tools.plan.planner import flops_per_sample

FACTS = {"kind": "test", "shapes": {"latents": (4, 8, 8)}}
FLAGS = {"model_family": "pixart_sigma", "model_flavour": "tiny", "use_cpu": True, "gradient_checkpointing": False}
SAMPLE = SampleShape(Shape(1, 64, 64))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def counted(record: CountRecord, number: int) -> tuple[int, bool]:
    """Return what a record answers, and whether it had to be counted."""
    calls = []

    def count() -> int:
        calls.append(number)
        return number

    return record.number(count), bool(calls)


def test_a_record_answers_its_own_question_only_and_only_as_it_was_written():
    record = CountRecord(FACTS)
    assert counted(record, 7) == (7, True) and counted(record, 8) == (7, False)
    assert counted(CountRecord({**FACTS, "kind": "other"}), 9) == (9, True)
    whole = record.path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 5)]
    truncated = [whole[:length] for length in range(0, len(whole), 17)]
    foreign = CountRecord({**FACTS, "kind": "other"}).path.read_bytes()
    valued = []
    for value in ("7", None, True, 7.5, [7]):
        record.write(value)
        valued.append(record.path.read_bytes())
    for content in (*flipped, *truncated, *valued, foreign, whole + whole, whole + b"\n", b"\xff", b"[" * 100_000):
        record.path.write_bytes(content)
        assert counted(record, 8) == (8, True), content[:200]
        assert counted(record, 9) == (8, False), "written again"
    record.path.unlink()
    record.path.mkdir()
    assert counted(record, 8) == (8, True), "it can be neither read nor written"


def test_whoever_reads_while_others_write_gets_one_of_their_numbers_or_counts():
    record, end, seen = CountRecord(FACTS), threading.Event(), []

    def write(number: int) -> None:
        while not end.is_set():
            with suppress(OSError):  # two write one temporary file: `get` goes on without
                record.write(number)

    writers = [threading.Thread(target=write, args=(number,)) for number in (10**6, 7)]
    record.write(7)
    for writer in writers:
        writer.start()
    try:
        seen = [counted(record, 0) for _ in range(50)]
    finally:
        end.set()
        for writer in writers:
            writer.join()
    assert {number for number, _ in seen} <= {10**6, 7, 0} and len(seen) == 50, "nothing else, whatever it is mixed of"


def test_the_newest_are_kept(home):
    for number in range(MOST_RECORDS + 3):
        (home / FOLDER).mkdir(parents=True, exist_ok=True)
        (home / FOLDER / f"{number}.json").touch()
    record = CountRecord(FACTS)
    record.write(7)
    assert len([*(home / FOLDER).iterdir()]) == MOST_RECORDS and counted(record, 8) == (7, False)


def test_a_step_is_counted_once_for_each_model_shape_and_version(home, tmp_path, monkeypatch):
    settings = load(FLAGS, None, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:

        def count(settings=settings, sample=SAMPLE):
            workload = Workload(family, sample)
            return workload.trace(settings, 2, False), bool(workload.models)

        first, was_counted = count()
        assert was_counted and count() == (first, False), "the same, floats too"
        flops, files = flops_per_sample(family, SAMPLE), len([*home.rglob("*.json")])
        assert flops_per_sample(family, SAMPLE) == flops and len([*home.rglob("*.json")]) == files
        recomputed = settings.model_copy(
            update={"training": settings.training.model_copy(update={"gradient_checkpointing": True})}
        )
        assert count(recomputed)[0].kept_bytes < first.kept_bytes
        larger = count(sample=SampleShape(Shape(1, 64, 96)))
        assert larger[1] and larger[0].kept_bytes > first.kept_bytes
        (path,) = [path for path in home.rglob("*.json") if f'"kept_bytes": {first.kept_bytes}' in path.read_text()]
        facts = json.loads(path.read_text().rpartition("\n")[0])["facts"]
        assert path.stem == checksum(facts)[:16] and {"config", "code", "versions"} <= {*facts["family"]}
        family.config = {**family.config, "num_layers": 9}
        assert count()[0].kept_bytes > first.kept_bytes, "another config"
        family.config = {**family.config, "num_layers": facts["family"]["config"]["num_layers"]}
        assert not count()[1]
        metadata = tmp_path / "site" / "diffusers-99.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 99.0\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        versions.cache_clear()  # as in another process
        assert count()[1], "another version of diffusers"
    versions.cache_clear()


def test_nothing_is_kept_of_a_class_whose_code_no_version_names(home):
    settings = load(FLAGS, None, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:
        own = type("Mine", (type(family),), {"__module__": "mine"})
        family.__class__ = own
        assert CountRecord.of(family, "FLOPs").facts is None
        assert flops_per_sample(family, SAMPLE) > 0 and not home.exists()
        assert replace(CountRecord(FACTS), facts=None).number(lambda: 3) == 3
