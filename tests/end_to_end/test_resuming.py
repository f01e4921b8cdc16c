"""Run it again and it goes on: bit for bit on as many ranks, to rounding on any other number; killed at any moment."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import SMALL, base
from patience import PATIENCE
from safetensors.torch import load_file

from simpletuner.caches.store.shards import ShardReader
from simpletuner.checkpoints.layout import list_checkpoints, load_checkpoint
from simpletuner.data.sampler.batch_sampler import DATA_VERSION
from simpletuner.system.files.checksums import with_checksum

FSDP2 = ("--fsdp_enable", "--train_batch_size=2")


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, under its file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert files
    return {f"{file.relative_to(checkpoint)}:{name}": t for file in files for name, t in load_file(file).items()}


def assert_same_bits(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []


@pytest.mark.parametrize("engine", [(1, "--train_batch_size=4"), (2, "--train_batch_size=2"), (2, *FSDP2)])
def test_two_and_two_steps_equal_four_bit_for_bit(engine, sdxl_flags, train, tmp_path):
    world, *flags = engine
    flags = (*sdxl_flags, *flags, "--use_ema", "--ema_decay=0.9")
    straight = train(tmp_path / "straight", *flags, "--max_train_steps=4", world=world)
    train(tmp_path / "halves", *flags, "--max_train_steps=2", world=world)
    halves = train(tmp_path / "halves", *flags, "--max_train_steps=4", world=world)
    assert "resuming from" in halves.said
    assert halves.losses == straight.losses
    assert_same_bits(*(run.output / "checkpoints" / "checkpoint-000004" for run in (straight, halves)))


def test_saved_by_two_ranks_resumed_by_one_and_by_four(sdxl_flags, shapes, train, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for path in sorted(shapes.glob("*.png"))[::3]:  # four of each size
        shutil.copy(path, pictures)
        shutil.copy(path.with_suffix(".txt"), pictures)
    caches = (f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}")
    flags = (*sdxl_flags, *caches, f"--instance_data_dir={pictures}", "--use_ema", "--lr_scheduler=constant")
    straight = train(tmp_path / "straight", *flags, "--train_batch_size=4", "--max_train_steps=5")
    more_or_fewer = {"one": (1, "--train_batch_size=4"), "four": (4, "--train_batch_size=1", "--fsdp_enable")}
    unsharded = {"two, data-parallel": (2, "--train_batch_size=2")}
    for form, resumed in {"SHARDED_STATE_DICT": more_or_fewer, "FULL_STATE_DICT": unsharded}.items():
        saved = tmp_path / form
        train(saved, *flags, *FSDP2, f"--fsdp_state_dict_type={form}", "--max_train_steps=2", world=2)
        for name, (world, *engine) in resumed.items():
            shutil.copytree(saved, output := tmp_path / f"{form}, {name}")
            how = (*engine, f"--fsdp_state_dict_type={form}")
            run = train(output, *flags, *how, "--max_train_steps=5", world=world)
            # 5 steps of 4 pass the end of the first epoch of 12: the order goes on over it, too
            assert run.losses == pytest.approx(straight.losses, rel=1e-5), name
            assert [row["step"] for row in run.rows] == list(range(1, 6))
            assert [row["epoch"] for row in run.rows] == [0, 0, 0, 1, 1]


def test_a_global_batch_stays_the_same_on_two_ranks_then_one_then_four(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=1", "--global_batch_size=4", "--lr_scheduler=constant")
    straight = train(tmp_path / "straight", *flags, "--max_train_steps=6")
    for steps, world in ((2, 2), (4, 1), (6, 4)):
        run = train(tmp_path / "run", *flags, f"--max_train_steps={steps}", world=world)
        batch = {2: "1 x 2 x 2", 1: "1 x 1 x 4", 4: "1 x 4 x 1"}[world]
        assert f"4 = {batch} (batch x ranks x accumulation)" in run.said
    assert run.losses == pytest.approx(straight.losses, rel=1e-5)


def test_changed_pictures_are_noticed_and_training_goes_on_with_the_next_epoch(sdxl_flags, shapes, train, tmp_path):
    pictures = tmp_path / "pictures"
    shutil.copytree(shapes, pictures)
    flags = (*sdxl_flags, f"--instance_data_dir={pictures}", "--train_batch_size=4")
    train(tmp_path / "run", *flags, "--max_train_steps=2")
    for victim in sorted(pictures.glob("*"))[:2]:
        victim.unlink()
    run = train(tmp_path / "run", *flags, "--max_train_steps=4")
    assert "images or seed changed since the checkpoint" in run.said
    assert [row["epoch"] for row in run.rows] == [0, 0, 1, 1]


def test_another_order_of_images_is_refused_and_nothing_is_set_aside(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4")
    output = train(tmp_path / "run", *flags, "--max_train_steps=2").output
    path = output / "checkpoints" / "checkpoint-000002" / "state.json"
    state = json.loads(path.read_text())
    assert state["data_version"] == DATA_VERSION
    del state["checksum"]
    path.write_text(json.dumps(with_checksum({**state, "data_version": DATA_VERSION + 1})))
    before = path.read_bytes()
    said = train(output, *flags, "--max_train_steps=4", code=3).said
    assert "was written with data order version" in said and "begin with another output_dir" in said
    assert path.read_bytes() == before and [each.name for each in path.parents[1].iterdir()] == [path.parent.name]


@pytest.mark.long
def test_killed_in_caching_training_and_saving_it_goes_on_and_nothing_is_corrupt(
    flux, shapes, train, starter, tmp_path
):
    flags = (*base("flux", flux, shapes), *FSDP2, "--max_train_steps=8", "--vae_batch_size=1", "--use_ema")
    flags = (*flags, "--checkpoint_step_interval=2")
    straight = train(tmp_path / "straight", *flags, world=2)
    output = tmp_path / "killed"
    moments = {
        "caching": lambda: any(output.glob("cache/latents/*/*.index.jsonl")),
        "first save": lambda: any(output.glob("checkpoints/.checkpoint-000002.*unfinished/model/*")),
        "later save": lambda: any(output.glob("checkpoints/.checkpoint-00000[46].*unfinished/exp_avg/*")),
        "just saved": lambda: (output / "checkpoints" / "checkpoint-000006").exists(),
        "training": lambda: any(line.startswith('{"step": 7') for line in lines(output / "metrics.jsonl")),
        "last save": lambda: any(output.glob("checkpoints/.checkpoint-000008.*unfinished/ema/*")),
        "export": lambda: any(output.glob(".pipeline.*unfinished/*")),
    }
    waits = random.Random(0)
    for name, reached in moments.items():
        run = starter.train(2, f"--output_dir={output}", *SMALL, *flags)
        end = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < end, f"never came to: {name}\n{run.said}"
            assert any(process.is_alive() for process in run.processes), f"ended before: {name}\n{run.said}"
            time.sleep(0.001)
        time.sleep(waits.random() * 0.02)
        run.kill()
        run.wait()
        for folder in list_checkpoints(output / "checkpoints"):
            load_checkpoint(folder)
    run = train(output, *flags, world=2)
    assert run.losses == straight.losses
    assert_same_bits(*(each.output / "checkpoints" / "checkpoint-000008" for each in (straight, run)))
    for cache in (output / "cache" / "latents").iterdir():
        reader = ShardReader(cache)
        assert len(list(reader.records())) == 36
        for place in reader.records():
            assert reader.read(place)["latents"].isfinite().all()
    assert not list(output.glob("checkpoints/.*"))
    newest, second, third = list_checkpoints(output / "checkpoints")[:3]
    for folder, group, place in ((newest, "model", 20), (second, "exp_avg", -9)):  # a name in a header, a number
        file = min((folder / group).glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
    (output / "pipeline" / "simpletuner.json").write_text('{"steps": 2}')  # as if only half were trained
    again = train(output, *flags, world=2)
    said = again.said.replace("\n", "")
    assert f"{newest.name}/model" in said and f"{second.name}/exp_avg" in said
    assert said.index(f"resuming from {newest}") < said.index(f"resuming from {third}") and again.losses == run.losses


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_an_incomplete_checkpoint_is_passed_over_with_the_reason(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4", "--checkpoint_step_interval=2")
    train(tmp_path / "run", *flags, "--max_train_steps=4")
    newest = tmp_path / "run" / "checkpoints" / "checkpoint-000004"
    weights = next((newest / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "run" / "pipeline" / "simpletuner.json").write_text('{"steps": 2}')  # as if only half were trained
    run = train(tmp_path / "run", *flags, "--max_train_steps=4")
    assert "passed over" in run.said and weights.name in run.said
    assert "checkpoint-000002" in run.said
    refused = train(tmp_path / "other", *flags, f"--resume_from_checkpoint={tmp_path / 'nowhere'}", code=2)
    assert "there is no such folder" in refused.said


def test_going_back_sets_later_checkpoints_aside_and_keeps_its_own(sdxl_flags, train, tmp_path):
    output = tmp_path / "run"
    flags = (*sdxl_flags, "--train_batch_size=4", "--checkpoint_step_interval=1", "--checkpoints_total_limit=3")
    first = train(output, *flags, "--max_train_steps=6")
    again = train(output, *flags, "--max_train_steps=6", "--resume_from_checkpoint=4")
    assert "set-aside: checkpoint-000006, checkpoint-000005" in " ".join(again.said.split())
    assert again.losses == first.losses
    anew = train(output, *flags, "--max_train_steps=2", "--resume_from_checkpoint=none", "--learning_rate=1e-4")
    assert len(anew.rows) == 2 and anew.losses[0] == first.losses[0]
    assert [folder.name for folder in list_checkpoints(output / "checkpoints")] == [
        *("checkpoint-000002", "checkpoint-000001")
    ]
    aside = output / "checkpoints" / "set-aside"
    # Those of the first training, and of the second: neither takes the other's place.
    twice = [f"checkpoint-00000{step}{number}" for step in (5, 6) for number in ("", "-2")]
    assert sorted(folder.name for folder in aside.iterdir()) == ["checkpoint-000004", *twice]
    assert all(load_checkpoint(folder) for folder in aside.iterdir())
