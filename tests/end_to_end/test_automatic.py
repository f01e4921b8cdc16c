"""model_family=auto trains, shards, resumes, samples and exports as a class does, and refuses with one sentence."""

from __future__ import annotations

import json

import pytest
from conftest import base


def test_auto_trains_shards_resumes_samples_and_exports_as_the_class_does(pipelines, shapes, train, tmp_path):
    steps = ("--train_batch_size=2", "--max_train_steps=3", "--flow_schedule_shift=3")
    caches = (f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}")
    drawn = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_resolution=64")
    flags = (*base("auto", pipelines("sd3"), shapes), "--aspect_bucket_alignment=32", *caches, *drawn, *steps)
    plain = train(tmp_path / "plain", *flags)
    said = " ".join(plain.said.split())
    assert "StableDiffusion3Pipeline by its own call, proven with diffusers" in said
    assert "flow, one call for all samples, sampled with guidance" in said
    assert (plain.output / "pipeline" / "model_index.json").is_file()
    by_class = train(tmp_path / "class", *flags, "--model_family=sd3", "--caption_dropout_probability=0.2")
    assert plain.losses == pytest.approx(by_class.losses, rel=1e-5)
    grids = [(run.output / "validation" / "grid-000003.png").read_bytes() for run in (plain, by_class)]
    assert grids[0] == grids[1]
    for number in (2, 3):
        sharded = train(
            tmp_path / "sharded",
            *flags,
            "--train_batch_size=1",
            f"--max_train_steps={number}",
            "--fsdp_enable",
            world=2,
        )
    assert "resuming from" in sharded.said and sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    lora = train(tmp_path / "lora", *flags, "--model_type=lora", "--use_ema", world=2)
    state = json.loads((lora.output / "checkpoints" / "checkpoint-000003" / "state.json").read_text())
    assert "StableDiffusion3Pipeline" in state["proven"]["pipeline"]
