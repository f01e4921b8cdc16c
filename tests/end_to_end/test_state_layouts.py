"""Layouts of weights and moments: the same checkpoints, from which each layout and engine goes on."""

from __future__ import annotations

import engines
import pytest
import torch
from safetensors.torch import load_file

SAVED = {1: ["split whole"], 2: ["whole", "split whole", "split fsdp2"]}
RESUMED = {1: ["split whole"], 2: ["split fsdp2", "fsdp2"]}


@pytest.mark.long
def test_each_layout_goes_on_from_the_checkpoints_of_each(run_on, arguments_of):
    arguments = arguments_of("flux", ema=True, mixed_precision="bf16", max_grad_norm=0.5)
    expected, resumed = {}, {}
    for world, names in SAVED.items():
        expected |= run_on(engines.save_in_turn, world, arguments, names)
    sources = [name for name in expected if name != "split whole-x2"]
    for world, names in RESUMED.items():
        resumed |= run_on(engines.resume_in_turn, world, arguments, dict.fromkeys(names, sources))
    for name, steps in (expected | {pair: steps for pair, (_, steps) in resumed.items()}).items():
        for taken, wanted in zip(steps, expected["whole-x2"], strict=True):
            assert taken == pytest.approx(wanted, rel=5e-3), name
    assert len(resumed) == 9
    for pair, (different, steps) in resumed.items():
        target, _, source = pair.partition(" from ")
        if target == source:
            assert steps == expected[source], pair
        if target == source or not target.startswith("split"):
            assert different == [], pair
        # moments are rounded to 8 bits where they were not, or were with other neighbours
        assert all(name.startswith(("exp_avg:", "exp_avg_sq:")) for name in different), (pair, different)
    assert resumed["split whole-x1 from whole-x2"][0], "8 bits cannot hold float32 moments"


def test_weights_of_bf16_alone_go_on_from_any_layout_and_any_layout_from_them(run_on, arguments_of):
    """state_layout=bf16, with gradients that are released: its checkpoints are float32 like all others."""
    arguments = arguments_of("flux", ema=True, mixed_precision="bf16", max_grad_norm=0)
    names = ["whole", "bf16 fsdp2", "bf16 released fsdp2"]
    expected = run_on(engines.save_in_turn, 2, arguments, names)
    assert expected["bf16 released fsdp2-x2"] == expected["bf16 fsdp2-x2"], "the noise is that of a step and a weight"
    assert expected["bf16 fsdp2-x2"] != expected["whole-x2"]
    sources = {"bf16 fsdp2": ["bf16 fsdp2-x2", "whole-x2"], "fsdp2": ["bf16 fsdp2-x2"]}
    for pair, (different, steps) in run_on(engines.resume_in_turn, 2, arguments, sources).items():
        source = pair.partition(" from ")[2]
        for taken, wanted in zip(steps, expected[source], strict=True):
            assert taken == pytest.approx(wanted, rel=1e-2), pair
        if pair == "bf16 fsdp2-x2 from bf16 fsdp2-x2":
            assert (steps, different) == (expected[source], [])
        if pair.startswith("fsdp2"):
            assert different == [], "float32 holds what bf16 and 8 bits held"


def test_an_adamw_that_splits_its_state_draws_and_exports_float32(flux_flags, train, tmp_path):
    flags = (*flux_flags, "--state_layout=split", "--mixed_precision=bf16", "--gradient_checkpointing", "--use_ema")
    drawn = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--ema_validation=comparison")
    whole = ("--fsdp_state_dict_type=FULL_STATE_DICT", "--train_batch_size=4", "--max_train_steps=2")
    run = train(tmp_path / "run", *flags, *drawn, *whole)
    exported = load_file(run.output / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
    saved = run.output / "checkpoints" / "checkpoint-000002"
    held = {group: load_file(saved / group / "diffusion_pytorch_model.safetensors") for group in ("model", "ema")}
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    for name, tensor in exported.items():
        assert torch.equal(tensor, held["ema"][name]) or torch.equal(tensor, held["model"][name])
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in held["model"].values())
    assert len(list((run.output / "validation" / "step-000002").glob("*.png"))) == 2
