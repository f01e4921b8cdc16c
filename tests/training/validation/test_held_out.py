"""The loss on held-out images: the same on any number of ranks, and of images that are not trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from PIL import Image
from safetensors.torch import load_file

from simpletuner.checkpoints.layout import FINISHED
from simpletuner.runs.health.best_step import find_best_of
from simpletuner.runs.metrics import rows_in

# 9 batches of 2 images at 3 timesteps: the second of two ranks has one less, and keeps the first company.
FLAGS = ("--eval_split=0.35", "--eval_step_interval=2", "--eval_timesteps=3", "--vae_batch_size=1", "--use_ema")


def measured(run) -> list[dict[str, float]]:
    return [row for row in run.rows if "eval_loss" in row]


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks_and_after_a_kill(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, *FLAGS, "--ema_decay=0.5")
    plain = train(tmp_path / "plain", *flags, "--train_batch_size=4", "--max_train_steps=4")
    rows = measured(plain)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["eval_loss"] == rows[0]["eval_loss_ema"] and rows[2]["eval_loss"] != rows[2]["eval_loss_ema"]
    assert rows[2]["eval_loss"] < rows[0]["eval_loss"], "what is learnt holds for images that were never seen"
    assert "held out" in plain.said and "held-out loss" in plain.said
    with Image.open(plain.output / "loss.png") as curve:
        pixels = np.asarray(curve.convert("RGB"), int).reshape(-1, 3)
    for colour in ((0xD9, 0x48, 0x01), (0x23, 0x8B, 0x45)):
        assert (np.abs(pixels - colour).max(1) < 8).any()

    two = (*flags, "--train_batch_size=2", "--checkpoint_step_interval=2")
    first = train(tmp_path / "two", *two, "--max_train_steps=2", "--fsdp_enable", world=2)
    # as if it had been killed after its checkpoint, and before what follows it was written
    metrics = first.output / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows_in(metrics.read_bytes())[:-1]))
    again = train(tmp_path / "two", *two, "--max_train_steps=4", "--fsdp_enable", world=2)
    assert [row["step"] for row in measured(again)] == [0, 2, 4]
    for ours, theirs in zip(measured(again), rows, strict=True):
        numbers = (
            {name: each[name] for name in each if not name.endswith("_parts") and name != "eval_set"}
            for each in (ours, theirs)
        )
        assert next(numbers) == pytest.approx(next(numbers), rel=1e-5)
        assert ours["eval_set"] == theirs["eval_set"]
        assert ours["eval_loss_parts"] == pytest.approx(theirs["eval_loss_parts"], rel=1e-5)


def test_a_dataset_of_type_eval_is_measured_and_not_trained_on(sdxl, shapes, train, tmp_path):
    for name, numbers in {"seen": range(8), "unseen": range(8, 11)}.items():
        (tmp_path / name).mkdir()
        for number in numbers:
            for suffix in (".png", ".txt"):
                shutil.copy(shapes / f"{number:04}{suffix}", tmp_path / name)
    entries = [
        {"id": "seen", "type": "local", "instance_data_dir": str(tmp_path / "seen")},
        {"id": "unseen", "dataset_type": "eval", "instance_data_dir": str(tmp_path / "unseen")},
    ]
    file = tmp_path / "datasets.json"
    file.write_text(json.dumps(entries))
    flags = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", f"--data_backend_config={file}")
    run = train(tmp_path / "run", *flags, "--train_batch_size=4", "--max_train_steps=2", "--eval_step_interval=1")
    assert [row["step"] for row in measured(run)] == [0, 1, 2]
    assert "8 in 1 bucket" in run.said and "3 held out" in run.said
    file.write_text(json.dumps(entries[1:]))
    alone = train(tmp_path / "alone", *flags, "--max_train_steps=2", code=2)
    assert "names no dataset of images or videos to train on" in alone.said


OVERFITTING = (
    *("--eval_split=0.6", "--eval_step_interval=1", "--eval_timesteps=2", "--max_train_steps=10"),
    *(
        "--learning_rate=2e-2",
        "--lr_scheduler=constant",
        "--checkpoint_step_interval=10",
        "--checkpoints_total_limit=1",
    ),
    *("--export_best", "--early_stopping_patience=3"),
)
"""Of a run whose held-out loss falls for three steps and is three times as high after the fourth."""


def steps_in(folder: Path) -> int:
    return json.loads((folder / FINISHED).read_text())["steps"]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("unet/*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.long
def test_a_run_that_overfits_keeps_and_exports_its_best_step_and_ends_early(sdxl_flags, train, starter, tmp_path):
    flags = (*sdxl_flags, *OVERFITTING)
    run = train(tmp_path / "plain", *flags, "--train_batch_size=4")
    assert [row["step"] for row in measured(run)] == [0, 1, 2, 3, 4, 5, 6]
    assert "the held-out loss rises: the best was step 3 (0.8" in run.said
    assert "14 images have been seen 2 times each" in run.said
    assert "training ends at step 6, after 3 evaluations in a row above the best one" in run.said
    assert find_best_of(run.output).best.step == 3
    kept = sorted(path.name for path in (run.output / "checkpoints").iterdir())
    assert kept == ["checkpoint-000003", "checkpoint-000006"], "the last, as always, and the best beside the limit of 1"
    best, last = run.output / "pipeline-best", run.output / "pipeline"
    assert (steps_in(best), steps_in(last)) == (3, 6) and (last / "model_index.json").is_file()
    assert "the step with the lowest loss on held-out images, 3" in (best / "README.md").read_text()
    status = starter.start(ranks.command_line, 1, ["status", str(run.output), "--json"])
    assert status.wait() == [0]
    said = json.loads(status.said)
    assert any(each.startswith("the held-out loss rises: the best was step 3 (") for each in said["alarms"])
    assert said["best"] == {
        "step": 3,
        "loss": pytest.approx(measured(run)[3]["eval_loss"]),
        "weights": "trained",
        "above": 3,
    }
    again = train(run.output, *flags, "--train_batch_size=4")
    assert "finished already, after 6 steps; raise early_stopping_patience" in again.said
    assert measured(again) == measured(run)

    shutil.rmtree(best)  # as of a run that was killed before it was written, or is asked for it only now
    damaged = next((run.output / "checkpoints" / "checkpoint-000003" / "model").glob("*.safetensors"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = train(run.output, *flags, "--train_batch_size=4")
    assert "the best step cannot be exported" in again.said and steps_in(best) == 6
    assert measured(again) == measured(run), "nothing is trained or measured again"


@pytest.mark.long
def test_all_ranks_end_at_one_step_and_export_the_best_average_also_after_a_resume(
    sdxl_flags, train, starter, tmp_path
):
    flags = (*sdxl_flags, *OVERFITTING, "--train_batch_size=2", "--fsdp_enable", "--use_ema", "--ema_decay=0.5")
    flags = (*flags, "--ema_validation=ema_only")
    output = tmp_path / "two"
    train(output, *flags, "--max_train_steps=3", world=2)
    run = train(output, *flags, "--max_train_steps=30", world=2)
    assert "after 3 evaluations in a row above the best one" in run.said
    steps = [row["step"] for row in run.rows if "eval_loss_ema" in row]
    assert steps == [*range(len(steps))], "none is measured twice, or left out"
    found = find_best_of(output)
    assert found.best.weights == "ema"
    base = next(flag for flag in flags if flag.startswith("--pretrained_model_name_or_path="))
    command = ["runs", "export", str(output), "--ema", base, "--checkpoint=best", f"--output={tmp_path / 'best'}"]
    exported = starter.start(ranks.command_line, 1, command)
    assert exported.wait() == [0], exported.said
    one, two = map(weights_in, (tmp_path / "best", output / "pipeline-best"))
    assert steps_in(output / "pipeline-best") == found.best.step < steps_in(output / "pipeline")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
