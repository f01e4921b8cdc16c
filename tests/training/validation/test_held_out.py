"""The loss on held-out images: the same on any number of ranks, and of images that are not trained on."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

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
        assert ours == pytest.approx(theirs, rel=1e-5)


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
