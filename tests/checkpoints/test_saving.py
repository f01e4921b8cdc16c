"""What ranks write together, at once and in the background."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import saving
import torch
from patience import PATIENCE
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed import HashStore

from simpletuner.checkpoints.layout import STATE, load_checkpoint
from simpletuner.checkpoints.saving import run_on_all_ranks
from simpletuner.checkpoints.verification import find_file_damage
from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.world import World
from simpletuner.system.files.atomic import unfinished_path


def test_shards_and_whole_tensors_are_written_at_once_and_in_the_background(starter, tmp_path):
    run = starter.start(saving.save_all_ways, 4, str(tmp_path), str(tmp_path / "report"))
    assert run.wait() == [0] * 4, run.said
    reports = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(4)]
    for report in reports:
        for form in ("sharded", "full"):
            assert report[form] == report[f"{form} in the background"] == []
        assert "cannot save to" in report["no room"] and report["no room"] == reports[0]["no room"]
    assert [report["one rank cannot write"] for report in reports] == ["", "IsADirectoryError", "", ""]
    names = [f"diffusion_pytorch_model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    files = ["config.json", *names, "diffusion_pytorch_model.safetensors.index.json"]
    assert reports[0]["files"] == files
    for form in ("sharded", "full"):
        check_calls(tmp_path / form / "checkpoint-000001", [report[f"{form}, calls"] for report in reports])

    wanted = saving.whole_tensors()
    folder = tmp_path / "full" / "checkpoint-000001" / "model"
    index = json.loads((folder / files[-1]).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    held = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)
    for form in ("sharded", "full"):
        checkpoint = load_checkpoint(tmp_path / form / "checkpoint-000003")
        assert checkpoint.state["checksums"].keys() == checkpoint.state["files"].keys()
        assert {find_file_damage(checkpoint, name) for name in checkpoint.state["files"]} == {""}
    shards = [load_file(file) for file in sorted((tmp_path / "sharded" / "checkpoint-000001" / "model").glob("*.saf*"))]
    assert len(shards) == 4, "copies share the writing"
    assert sum(tensor.nbytes for shard in shards for tensor in shard.values()) == index["metadata"]["total_size"]
    headers = [int.from_bytes(file.read_bytes()[:8], "little") for file in tmp_path.rglob("model/*.safetensors")]
    assert len(headers) >= 8 and not any(size % 8 for size in headers), "readers that map a file find aligned data"


def check_calls(folder: Path, calls: list[list[Any]]) -> None:
    """Expect each rank to sync what it writes, and the first one all, before state.json and the folder have names."""
    first, hidden = calls[0], unfinished_path(folder)
    state, renamed = (first.index(["rename", str(path), -1]) for path in (hidden / STATE, folder))
    assert state < renamed
    weights = {path.name: path.stat().st_size for path in (folder / "model").glob("*.safetensors")}
    by_writer = [path for own in (first[:state], *calls[1:]) for call, path, _ in own if path.endswith(".safetensors")]
    assert sorted(by_writer) == sorted(f"{hidden}/model/{name}" for name in weights)
    synced = {path: size for call, path, size in first[:renamed] if call == "sync"}
    assert {f"{hidden}/model/{name}": size for name, size in weights.items()}.items() <= synced.items()
    assert {str(hidden), f"{hidden}/model", f"{hidden}/model/config.json"} <= synced.keys()
    assert first[renamed + 1][:2] == ["sync", str(folder.parent)]


def test_a_rank_that_dies_while_a_checkpoint_is_written_is_noticed_by_the_others(starter, tmp_path):
    run = starter.start(saving.lose_a_rank, 4, str(tmp_path / "run"), str(tmp_path / "report"))
    assert run.wait(PATIENCE) == [0] * 4, run.said
    assert [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(3)] == [True] * 3
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_ranks_wait_for_one_that_writes_to_a_slow_disk_alone(starter, tmp_path):
    run = starter.start(saving.wait_for_a_slow_disk, 2, 6.0, str(tmp_path / "report"))
    assert run.wait(PATIENCE) == [0, 0], run.said
    assert (tmp_path / "report").read_text() == "0,1"


def test_one_rank_reads_without_collectives(run_on, tmp_path):
    """Gloo's threads would start OpenMP teams of their own: see `reading_threads`."""
    before, after = run_on(saving.threads_after_reading, 1, str(tmp_path))
    assert after == before


def test_a_checkpoint_that_cannot_be_saved_leaves_nothing_and_says_why(tmp_path):
    def fails(failure: Exception) -> None:
        raise failure

    hidden = tmp_path / ".checkpoint"
    world = World(0, 1, 0, torch.device("cpu"), HashStore())
    for failure, said, hint in (
        (OSError(28, "No space left on device", str(hidden / "state.json")), "No space left", "make room"),
        (PermissionError(13, "Permission denied", str(hidden)), "Permission denied", "see who owns it"),
        (OSError(30, "Read-only file system", str(hidden)), "Read-only", "choose another folder"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "Permission denied", "see who owns it"),
    ):
        hidden.mkdir()
        (hidden / "shard").write_bytes(b"1")
        with pytest.raises(EnvironmentNotReady, match=f"cannot save to .*{said}") as caught:
            run_on_all_ranks(world, hidden, partial(fails, failure))
        assert hint in caught.value.hint and list(tmp_path.iterdir()) == []
