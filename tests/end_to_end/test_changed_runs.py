"""A run that goes on with other settings: what still applies is kept, what does not is said, nothing is overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import BinaryIO

import pytest
from buckets import sampler_of
from conftest import base

from simpletuner.caches.store.records import file_fingerprint
from simpletuner.checkpoints.layout import list_checkpoints
from simpletuner.settings.declared.sections import Data, Launch, Model, Optimizer, Settings, Training
from simpletuner.training.optimizers import LearningRate, Schedule, resumed_schedule

VALIDATION = ("--validation_prompt=a red circle", "--validation_num_inference_steps=1")


def state_of(output: Path) -> dict:
    return json.loads((list_checkpoints(output / "checkpoints")[0] / "state.json").read_text())


@pytest.mark.parametrize("engine", [(1, "--train_batch_size=4"), (2, "--train_batch_size=2", "--fsdp_enable")])
def test_another_optimizer_starts_without_state_and_the_rest_goes_on(engine, sdxl_flags, train, tmp_path):
    world, *flags = engine
    flags = (*sdxl_flags, *flags)
    output = tmp_path / "run"
    kinds = {"lion": {"exp_avg"}, "adamw": {"exp_avg", "exp_avg_sq"}, "adagrad": {"sum"}}
    for steps, (optimizer, moments) in enumerate(kinds.items(), start=1):
        run = train(output, *flags, f"--optimizer={optimizer}", f"--max_train_steps={steps}", world=world)
        assert ("holds the state of another optimizer" in run.said) == (steps > 1)
        checkpoint = output / "checkpoints" / f"checkpoint-{steps:06d}"
        assert {path.name for path in checkpoint.iterdir() if path.is_dir()} == {"model", *moments}
        assert state_of(output)["optimizer"] == {"steps": 1, "moments": sorted(moments)}
        assert state_of(output)["position"]["batch"] == steps
    table = (output / "log.txt").read_text().rpartition("settings changed since the last start (")[2]
    effect = "starts without state; weights, EMA and data go on"
    assert re.search(rf"\n +optimizer +adamw +adagrad +{effect}\n", table), table
    assert run.said.index("settings changed since") < run.said.index("another optimizer")
    same = train(output, *flags, "--optimizer=adagrad", "--max_train_steps=4", world=world)
    assert "another optimizer" not in same.said and state_of(output)["optimizer"]["steps"] == 2


def test_a_base_model_that_changed_since_the_checkpoint_is_said(sdxl, shapes, train, tmp_path):
    pipeline = tmp_path / "base"
    shutil.copytree(sdxl, pipeline)
    flags = (*base("sdxl", pipeline, shapes), "--train_batch_size=4")
    train(tmp_path / "run", *flags, "--max_train_steps=1")
    assert "the base model changed" not in train(tmp_path / "run", *flags, "--max_train_steps=2").said
    scheduler = pipeline / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace("0.012", "0.013"))
    changed = train(tmp_path / "run", *flags, "--max_train_steps=3")
    assert "the base model changed since the checkpoint: scheduler/scheduler_config.json" in changed.said
    flip_unseen_bit(pipeline / "vae" / "diffusion_pytorch_model.safetensors")
    flipped = train(tmp_path / "run", *flags, "--max_train_steps=4").said.replace("\n", " ")
    assert "changed since the run began, and the pipeline has it as it is now: vae/diffusion_pytorch_model" in flipped


def flip_unseen_bit(path: Path) -> None:
    """Flip a bit where a fingerprint does not see it."""
    sampled = file_fingerprint(path)
    with path.open("r+b") as file:
        for place in range(path.stat().st_size // 2, path.stat().st_size, 1 << 12):
            flip(file, place)
            if file_fingerprint(path) == sampled:
                return
            flip(file, place)
    raise AssertionError(f"all of {path} is seen")


def flip(file: BinaryIO, place: int) -> None:
    file.seek(place)
    (byte,) = file.read(1)
    file.seek(place)
    file.write(bytes([byte ^ 1]))
    file.flush()


@pytest.mark.long
def test_one_bit_of_the_weights_that_a_lora_is_trained_on_is_said(sdxl, shapes, train, tmp_path):
    pipeline = tmp_path / "base"
    shutil.copytree(sdxl, pipeline)
    flags = (*base("sdxl", pipeline, shapes), "--train_batch_size=4", "--model_type=lora", "--lora_rank=2")
    train(tmp_path / "run", *flags, "--max_train_steps=1")
    assert "the base model changed" not in train(tmp_path / "run", *flags, "--max_train_steps=2").said
    flip_unseen_bit(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    changed = train(tmp_path / "run", *flags, "--max_train_steps=3").said.replace("\n", " ")
    assert "the base model changed since the checkpoint: unet/diffusion_pytorch_model.safetensors" in changed


def test_ema_that_is_left_out_or_added_is_said(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4")
    output = tmp_path / "run"
    train(output, *flags, "--max_train_steps=1", "--use_ema")
    without = train(output, *flags, "--max_train_steps=2")
    assert "use_ema is off: the EMA in checkpoint-000001 is not continued" in without.said
    assert re.search(r"use_ema +true +false +the EMA is not continued", without.said)
    again = train(output, *flags, "--max_train_steps=3", "--use_ema")
    assert "checkpoint-000002 holds no EMA: it starts from the weights of step 2" in again.said
    assert state_of(output)["ema_updates"] == 1


def test_a_wrong_start_overwrites_nothing_and_settings_have_a_history(pipelines, sdxl, shapes, train, tmp_path):
    output = tmp_path / "run"
    flags = (*base("sdxl", sdxl, shapes), "--train_batch_size=4")
    train(output, *flags, "--max_train_steps=2", "--checkpoint_step_interval=1")
    files = [
        path for path in output.rglob("*") if path.is_file() and path.name not in (".lock", "log.txt", "status.json")
    ]
    before = {path: path.read_bytes() for path in files}
    other = train(output, *base("flux", pipelines("flux"), shapes), "--train_batch_size=4", code=2)
    assert "is of model_family sdxl, but model_family = flux" in other.said and "making" not in other.said
    from diffusers import UNet2DConditionModel

    larger = tmp_path / "larger"
    shutil.copytree(sdxl, larger)
    config = json.loads((larger / "unet" / "config.json").read_text())
    UNet2DConditionModel.from_config({**config, "layers_per_block": 2}).save_pretrained(larger / "unet")
    wrong = train(output, *base("sdxl", larger, shapes), "--train_batch_size=4", "--max_train_steps=9", code=2)
    assert "is of another model: " in wrong.said and "making" not in wrong.said
    assert "finished already" in train(output, *flags, "--max_train_steps=1", "--learning_rate=1").said
    assert {path: path.read_bytes() for path in before} == before
    assert not list(output.glob("base-*"))
    train(output, *flags, "--max_train_steps=3", "--learning_rate=5e-4")
    history = [json.loads(line) for line in (output / "settings_history.jsonl").read_text().splitlines()]
    assert [(row["step"], set(row["changed"])) for row in history[:1]] == [(0, set())]
    assert history[1]["step"] == 2 and history[1]["changed"]["learning_rate"] == [1e-3, 5e-4]
    train(output, *flags, "--max_train_steps=3", "--learning_rate=5e-4", "--resume_from_checkpoint=none")
    history = (output / "settings_history.jsonl").read_text().splitlines()
    assert len(history) == 3, "each start has a line, changed or not"
    assert json.loads((output / "settings.json").read_text())["learning_rate"] == 5e-4


def test_epochs_are_counted_on_with_another_effective_batch(sdxl_flags, train, tmp_path):
    output = tmp_path / "run"  # 36 images in 3 buckets of 12
    flags = (*sdxl_flags, "--lr_scheduler=linear", "--num_train_epochs=4")
    stop = (*flags, "--train_batch_size=2", "--checkpoint_step_interval=10")
    assert len(train(output, *stop, "--num_train_epochs=2").rows) == 36
    rest = train(output, *flags, "--train_batch_size=4")
    assert [row["epoch"] for row in rest.rows][36:] == [2] * 9 + [3] * 9 and len(rest.rows) == 54
    back = train(output, *flags, "--train_batch_size=2", "--num_train_epochs=5")
    assert [row["epoch"] for row in back.rows][54:] == [4] * 18
    assert "finished already" in train(output, *flags, "--train_batch_size=4", "--num_train_epochs=5").said


ORDER = sampler_of({"a": list(range(20)), "b": list(range(20, 33))}, seed=1)


def settings_of(batch: int, epochs: int, warm_up: float = 0) -> Settings:
    return Settings(
        model=Model(model_family="sdxl"),
        data=Data(instance_data_dir=Path("x")),
        training=Training(train_batch_size=batch, num_train_epochs=epochs),
        optimizer=Optimizer(learning_rate=1.0, lr_scheduler="linear", lr_warmup_steps=warm_up),
        launch=Launch(),
    )


@pytest.mark.parametrize("warm_up", [0, 5, 0.1])
@pytest.mark.parametrize(("batch", "other"), [(2, 4), (4, 2), (3, 5), (2, 2)])
@pytest.mark.parametrize("at", [1, 7, 30, 61])
def test_the_learning_rate_does_not_jump_when_the_batch_changes_and_ends_with_the_run(batch, other, at, warm_up):
    epochs = 12
    before, after = settings_of(batch, epochs, warm_up), settings_of(other, epochs, warm_up)
    total = ORDER.count_steps(epochs, batch)
    schedule, positions = Schedule(total, epochs), ORDER.batches(ORDER.start(batch))
    for _ in range(at):
        _, position = next(positions)
    saved = {"step": at, **schedule.as_json()}
    resumed = resumed_schedule(after, ORDER, saved, ORDER.with_batch_size(position, other))
    if other == batch:
        assert resumed == schedule
    rates = [LearningRate(each, before.optimizer).at(at) for each in (schedule, resumed)]
    assert rates[1] == pytest.approx(rates[0], abs=1e-12)
    assert LearningRate(resumed, after.optimizer).at(resumed.max_steps) == pytest.approx(0, abs=1e-12)
    left = 0
    for _, place in ORDER.batches(ORDER.with_batch_size(position, other)):
        if place.epoch >= epochs:
            break
        left += 1
    assert resumed.max_steps == at + left
    again = resumed_schedule(after, ORDER, {"step": at, **resumed.as_json()}, ORDER.with_batch_size(position, other))
    assert again == resumed


def test_metrics_are_whole_at_any_moment_and_images_of_a_killed_round_are_made_up_for(sdxl_flags, train, tmp_path):
    output = tmp_path / "run"
    flags = (
        *sdxl_flags,
        "--train_batch_size=4",
        "--validation_prompt=a red circle",
        "--validation_num_inference_steps=1",
    )
    flags = (*flags, "--validation_step_interval=2", "--checkpoint_step_interval=2")
    train(output, *flags, "--max_train_steps=4")
    metrics = output / "metrics.jsonl"
    rows, inode = metrics.read_bytes(), metrics.stat().st_ino
    (output / "validation" / "grid-000004.png").unlink()  # killed between the checkpoint and its images
    shutil.rmtree(output / "pipeline")
    again = train(output, *flags, "--max_train_steps=4")
    assert (output / "validation" / "grid-000004.png").is_file()
    assert metrics.read_bytes() == rows and metrics.stat().st_ino == inode, "rewritten though nothing was to be dropped"
    assert len(again.rows) == 4
    damaged = b'5\n{"no": "step"}\n{"step": 2}\n\xff\xfe\n' + rows + b'{"step": 9, "lo'
    metrics.write_bytes(damaged)
    assert [row["step"] for row in train(output, *flags, "--max_train_steps=5").rows] == [1, 2, 3, 4, 5]


def test_links_in_the_output_folder_are_not_followed_when_files_are_written(sdxl_flags, train, tmp_path):
    output, foreign = tmp_path / "run", tmp_path / "foreign"
    foreign.mkdir()
    flags = (
        *sdxl_flags,
        "--train_batch_size=4",
        "--validation_prompt=a red circle",
        "--validation_num_inference_steps=1",
    )
    train(output, *flags, "--max_train_steps=1", "--checkpoint_step_interval=1")
    for name in ("settings.json", "loss.png", "validation/grid-000002.png"):
        (foreign / Path(name).name).write_text("not ours")
        (output / name).unlink(missing_ok=True)
        (output / name).symlink_to(foreign / Path(name).name)
    checkpoint = output / "checkpoints" / "checkpoint-000001"
    checkpoint.rename(foreign / checkpoint.name)
    checkpoint.symlink_to(foreign / checkpoint.name)
    train(output, *flags, "--max_train_steps=3", "--checkpoint_step_interval=1", "--checkpoints_total_limit=1")
    assert {path.read_text() for path in foreign.iterdir() if path.is_file()} == {"not ours"}
    assert (foreign / checkpoint.name / "state.json").is_file() and not os.path.lexists(checkpoint)
    (output / "metrics.jsonl").rename(foreign / "metrics.jsonl")
    (output / "metrics.jsonl").symlink_to(foreign / "metrics.jsonl")
    refused = train(output, *flags, "--max_train_steps=4", code=3)
    assert "metrics.jsonl is a link" in refused.said


@pytest.fixture
def tiny_disk(tmpfs):
    return tmpfs("size=400k")


def test_full_and_read_only_disks_and_things_in_the_way_are_sentences(sdxl, shapes, train, tiny_disk, tmp_path):
    flags = ("--model_family=sdxl", f"--instance_data_dir={shapes}", "--train_batch_size=4", "--max_train_steps=1")
    tiny = train(tiny_disk / "run", *flags, "--model_flavour=tiny", code=3)
    assert "No space left on device" in tiny.said and "make room" in tiny.said
    flags = (*flags, f"--pretrained_model_name_or_path={sdxl}")
    (tiny_disk / "fill").write_bytes(b"")
    with (tiny_disk / "fill").open("ab", buffering=0) as file:  # until not a byte is left
        for size in (100_000, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    for output, said in ((tiny_disk / "other", "No space left"), (Path("/proc/x"), "cannot use /proc/x")):
        refused = train(output, *flags, code=3)
        assert said in refused.said and "bug" not in refused.said
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for world in (1, 2):
        refused = train(tiny_disk / "ro", *flags, "--num_processes=" + str(world), world=world, code=3)
        assert "Read-only file system" in refused.said and refused.said.count("\nerror:") <= 1
    in_the_way = tmp_path / "file"
    in_the_way.write_text("a file")
    refused = train(in_the_way, *flags, code=3)
    assert str(in_the_way) in refused.said and "bug" not in refused.said
    for name in ("metrics.jsonl", "log.txt", "validation", "checkpoints", "cache", "loss.png"):
        output = tmp_path / f"with-{name}"
        output.mkdir()
        if "." in name:
            (output / name).mkdir()
        else:
            (output / name).write_text("in the way")
        refused = train(output, *flags, "--validation_prompt=a", "--validation_num_inference_steps=1", code=3)
        assert name in refused.said and "bug" not in refused.said, refused.said
