"""Optimizer partitions and row shards, for the shapes that go wrong first; waiting for compilations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import row_shard_ranks
import torch

from simpletuner.deepspeed.engine import engine_config, set_swap_folder
from simpletuner.deepspeed.partitions import ElementRange, row_ranges
from simpletuner.deepspeed.startup import keep_cpu_info, wait_for_compile
from simpletuner.settings.declared.sections import Parallel, Settings
from simpletuner.training.run_folder.run_tables import format_engine

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_rows_are_cut_as_chunks_are():
    for shape, ranks in [((7, 3), 4), ((1,), 4), ((3, 2, 2), 4), ((8, 2), 2), ((5,), 1)]:
        pieces = list(torch.arange(torch.Size(shape).numel()).view(shape).chunk(ranks))
        pieces += [torch.empty(0, dtype=torch.int64)] * (ranks - len(pieces))
        for piece, (first, end) in zip(pieces, row_ranges(shape, ranks), strict=True):
            assert piece.flatten().tolist() == list(range(first, end))


def test_shared_elements_of_two_ranges():
    others = [ElementRange(3, 9), ElementRange(5, 9), ElementRange(1, 2), ElementRange(0, 0)]
    assert [ElementRange(0, 5).count_shared(other) for other in others] == [2, 0, 1, 0]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_partitions_become_row_shards_and_partitions_again(world, starter, tmp_path):
    run = starter.start(row_shard_ranks.to_rows_and_back, world, str(tmp_path / "right"))
    assert run.wait() == [0] * world, run.said
    for rank in range(world):
        right = json.loads((tmp_path / f"right.{rank}").read_text())
        assert right and all(right)


@needs_deepspeed
@pytest.mark.parametrize("dtype", ["no", "bf16"])
def test_small_shared_and_frozen_parameters_and_buffers_are_those_of_the_other_engines(dtype, starter, tmp_path):
    names = ["whole", "fsdp2", "zero1", "zero2", "zero2-cpu", "zero3", "zero3-cpu"]
    run = starter.start(row_shard_ranks.odd_shapes, 4, names, dtype, str(tmp_path / "odd"))
    assert run.wait() == [0] * 4, run.said
    made = {name: torch.load(tmp_path / f"odd.{name}.0") for name in names}
    expected, rel = made["whole"], 1e-5 if dtype == "no" else 5e-2
    assert {"again.weight", "frozen", "mean", "count", "scale"} <= expected["begun"].keys()
    for name, engine in made.items():
        begun, trained, shown, back = (engine[key] for key in ("begun", "trained", "shown", "back"))
        assert engine["size"] == expected["size"]
        assert begun.keys() - {"again.weight"} == expected["begun"].keys() - {"again.weight"}, name
        assert all(torch.equal(begun[key], expected["begun"][key]) for key in begun), name
        assert all(torch.equal(back[key], trained[key]) for key in back), name
        assert all(torch.equal(shown[key], value) for key, value in engine["average"].items()), name
        for key in ("frozen", "mean", "count"):
            assert torch.equal(trained[key], begun[key]), (name, key)
        assert not torch.equal(trained["scale"], begun["scale"])
        assert engine["losses"] == pytest.approx(expected["losses"], rel=rel), name
        assert engine["moments"].keys() == expected["moments"].keys() == {"exp_avg", "exp_avg_sq"}
        for moment, tensors in engine["moments"].items():
            assert tensors.keys() == expected["moments"][moment].keys(), name
        for key, value in trained.items():
            assert torch.allclose(value, expected["trained"][key], rtol=1e-4 if dtype == "no" else 0.1, atol=1e-2 * rel)


@needs_deepspeed
def test_weights_whose_gradient_is_0_are_found_on_any_engine(starter, tmp_path):
    names = ["fsdp2", "fsdp2 released", "zero1", "zero2", "zero2-cpu", "zero3", "zero3-cpu"]
    run = starter.start(row_shard_ranks.silent_weights, 2, names, str(tmp_path / "silent"))
    assert run.wait() == [0] * 2, run.said
    assert json.loads((tmp_path / "silent.0").read_text()) == dict.fromkeys(names, ["silent", "unused"])


def test_the_engine_is_described_in_a_few_words():
    offloaded = Parallel(zero_stage=3, offload_optimizer="cpu", offload_param="nvme", offload_param_path=Path("x"))
    told = format_engine(Settings(parallel=offloaded), 2)
    assert told == "ZeRO-3, optimizer in the machine's memory, weights in files"
    assert format_engine(Settings(parallel=Parallel(zero_stage=1)), 2) == "ZeRO-1"


def test_only_nvme_offloading_gets_the_folder_of_this_process():
    offloaded = Parallel(zero_stage=3, offload_optimizer="cpu", offload_param="nvme", offload_param_path=Path("x"))
    config = engine_config(Settings(parallel=offloaded), 2, largest_tensor=300_000_000)
    assert not {"optimizer", "scheduler"} & config.keys()
    set_swap_folder(config, Path("x/mine"))
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    named = {"device": "nvme", "nvme_path": "x/mine", "buffer_size": 150_000_000}
    assert config["zero_optimization"]["offload_param"] == named


@needs_deepspeed
def test_the_cpu_is_measured_once_by_a_rank_that_loads_operators(monkeypatch):
    import cpuinfo

    asked = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: asked.append("measured") or {"arch": "X86_64"})
    for _ in range(2):
        keep_cpu_info()
        assert cpuinfo.get_cpu_info() == {"arch": "X86_64"}  # as builder.py does, which imports the name each time
    assert asked == ["measured"]


def test_a_lock_that_a_killed_compilation_left_is_removed(tmp_path):
    (tmp_path / "lock").touch()
    said = []
    started = time.monotonic()
    wait_for_compile(tmp_path, said.append, lambda: None, stale_seconds=1)
    assert time.monotonic() - started > 1  # another machine that shares the home folder may be compiling
    assert not (tmp_path / "lock").exists()
    assert said[0].startswith("waiting for another process that compiles") and "was killed: removing" in said[1]


def test_a_running_compilation_is_waited_for(tmp_path):
    lock = tmp_path / "lock"
    code = f"import time; f = open({str(lock)!r}, 'w'); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as compiler:
        while not lock.exists():
            time.sleep(0.01)
        long_ago = (0, 0)
        os.utime(lock, long_ago)
        os.utime(tmp_path, long_ago)
        asked = []

        def stop() -> None:
            asked.append(time.monotonic())
            if len(asked) == 4:
                lock.unlink()

        wait_for_compile(tmp_path, lambda text: None, stop, stale_seconds=30)
        compiler.kill()
    assert len(asked) == 4
