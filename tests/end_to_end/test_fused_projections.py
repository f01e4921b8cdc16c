"""Runs with fused projections, another kernel of attention, and activations in the machine's memory."""

from __future__ import annotations

import pytest
from conftest import base

LEVERS = ("--fuse_qkv_projections", "--attention_backend=math", "--offload_activations", "--gradient_checkpointing")


def test_a_run_resumes_with_and_without_fused_projections(sdxl, shapes, train, tmp_path):
    flags = (*base("sdxl", sdxl, shapes), "--train_batch_size=4", "--checkpoint_step_interval=2", "--crop")
    straight = train(tmp_path / "straight", *flags, "--max_train_steps=4", *LEVERS)
    assert "attention: math" in straight.said
    assert "blocks are recomputed, in the machine's memory" in " ".join(straight.said.split())
    train(tmp_path / "changed", *flags, "--max_train_steps=2")
    last = "--gradient_checkpointing=auto"
    changed = train(tmp_path / "changed", *flags, "--max_train_steps=4", *LEVERS, last)
    assert "all kept, in the machine's memory; about 0." in " ".join(changed.said.split())
    assert "resuming from" in changed.said
    # The fourth loss follows an update by moments that were saved without fused projections.
    assert changed.losses == pytest.approx(straight.losses, rel=1e-5)


def test_a_family_without_fused_attention_is_refused_before_anything_is_encoded(pipelines, shapes, train, tmp_path):
    flags = base("qwen_image", pipelines("qwen_image"), shapes)
    run = train(tmp_path / "run", *flags, "--max_train_steps=1", "--fuse_qkv_projections", code=2)
    assert "diffusers has no fused attention for QwenImage" in run.said and "making" not in run.said
