"""Each optimizer on each engine of torch: the same steps, checkpoints from which any engine goes on, its files."""

from __future__ import annotations

import engines
import pytest
import torch
from end_to_end.test_resuming import assert_same_bits
from PIL import Image
from safetensors.torch import load_file

CLOSE = {"muon": 4e-3}
"""Relative, otherwise 1e-3. Muon orthogonalizes in bf16, whose rounding is 4e-3, and depends on the kind of CPU: the
gradient norm after a step was 1.3e-3 off on one, and within 1e-3 on another."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "optimizers"), [("sdxl", ["adafactor"]), ("flux2", ["muon", "adamw_schedulefree", "prodigy"])]
)
def test_steps_are_those_of_one_rank_and_checkpoints_go_on_anywhere(family, optimizers, run_on, arguments_of):
    """Adafactor's factors have the shape of what they belong to, so it takes the U-Net, which has convolutions."""
    arguments = arguments_of(family, learning_rate=1e-2)
    alone = [f"{name} whole" for name in optimizers]
    shared = [f"{name} fsdp2" for name in optimizers]
    taken = run_on(engines.save_in_turn, 1, arguments, alone)
    taken |= run_on(engines.save_in_turn, 2, arguments, alone + shared)
    sources = {f"{name} fsdp2": [f"{name} whole-x1", f"{name} fsdp2-x2"] for name in optimizers}
    resumed = run_on(engines.resume_in_turn, 2, arguments, sources)
    for name in optimizers:
        expected, steps = taken[f"{name} whole-x1"], [taken[f"{name} whole-x2"], taken[f"{name} fsdp2-x2"]]
        assert resumed.pop(f"{name} fsdp2-x2 from {name} fsdp2-x2") == [[], steps[1]], "resumed bit for bit"
        different, after = resumed.pop(f"{name} fsdp2-x2 from {name} whole-x1")
        assert different == []
        for found in [*steps, after]:
            for pair, wanted in zip(found, expected, strict=True):
                assert pair == pytest.approx(wanted, rel=CLOSE.get(name, 1e-3)), name


@pytest.mark.long
def test_muon_takes_the_same_steps_under_zero_and_goes_on_from_any_engine(run_on, arguments_of):
    arguments = arguments_of("flux2", learning_rate=1e-2)
    stages = ["muon zero2", "muon zero3"]  # stages 1 and 2 are one class of DeepSpeed
    taken = run_on(engines.save_in_turn, 2, arguments, ["muon fsdp2", *stages])
    expected = taken["muon fsdp2-x2"]
    for name in stages:
        for pair, wanted in zip(taken[f"{name}-x2"], expected, strict=True):
            assert pair == pytest.approx(wanted, rel=CLOSE["muon"]), name
    sources = {name: [f"{name}-x2", "muon fsdp2-x2"] for name in stages}
    sources |= {"muon fsdp2": [f"{name}-x2" for name in stages]}
    resumed = run_on(engines.resume_in_turn, 2, arguments, sources)
    assert len(resumed) == 6
    for name, (different, steps) in resumed.items():
        assert different == [], name
        exactly = name.split(" from ")[0] == name.split(" from ")[1]
        for pair, wanted in zip(steps, expected, strict=True):
            assert pair == pytest.approx(wanted, rel=CLOSE["muon"]), name
        assert not exactly or steps == taken[name.split(" from ")[1]]


def test_muon_takes_the_same_steps_of_convolutions_under_zero(run_on, arguments_of):
    names = ["muon fsdp2", "muon zero2", "muon zero3"]
    expected, *others = run_on(engines.losses_in_turn, 2, arguments_of("sdxl", learning_rate=1e-2), names, 2).values()
    for steps in others:
        for pair, wanted in zip(steps, expected, strict=True):
            assert pair == pytest.approx(wanted, rel=CLOSE["muon"])


def test_gradients_are_released_in_the_backward_pass_and_nothing_else_changes(run_on, arguments_of):
    arguments = arguments_of("flux", mixed_precision="bf16", max_grad_norm=0.0)
    for world, names in ((1, ["whole", "adamw_schedulefree whole"]), (2, ["fsdp2", "split fsdp2"])):
        both = [*names, *(f"released {name}" for name in names)]
        taken = run_on(engines.losses_in_turn, world, arguments, both, 3)
        for name in names:
            (losses, norms), (ours, own_norms) = (zip(*taken[each], strict=True) for each in (name, f"released {name}"))
            assert ours == losses and len(set(losses)) == 3, name
            assert own_norms == pytest.approx(norms, rel=1e-6), "squares are added up in another order"


def test_schedule_free_adamw_evaluates_saves_and_exports_the_average(flux_flags, train, tmp_path):
    flags = (
        *flux_flags,
        "--optimizer=adamw_schedulefree",
        "--lr_scheduler=constant_with_warmup",
        "--train_batch_size=4",
    )
    flags = (*flags, "--lr_warmup_steps=2", "--learning_rate=1e-2", "--fsdp_state_dict_type=FULL_STATE_DICT")
    looks = ("--validation_prompt=a red circle", "--validation_num_inference_steps=1", "--validation_step_interval=1")
    straight = train(tmp_path / "straight", *flags, "--max_train_steps=4")
    for steps in (2, 4):
        run = train(tmp_path / "halves", *flags, *looks, f"--max_train_steps={steps}")
    assert run.losses == straight.losses, "neither resuming nor looking at the average changes what is trained"
    saved = run.output / "checkpoints" / "checkpoint-000004"
    assert_same_bits(straight.output / "checkpoints" / "checkpoint-000004", saved)
    held = {group: load_file(saved / group / "diffusion_pytorch_model.safetensors") for group in ("model", "y", "z")}
    exported = load_file(run.output / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, value in exported.items():
        assert torch.equal(value, held["model"][name])
        torch.testing.assert_close(held["y"][name], 0.9 * value + 0.1 * held["z"][name])
    assert any(not torch.equal(value, held["y"][name]) for name, value in exported.items())
    model = f"--pretrained_model_name_or_path={run.output / 'pipeline'}"
    fresh = train(tmp_path / "fresh", *flags, *looks, model, "--max_train_steps=2")
    images = [run.output / "validation" / "step-000004", fresh.output / "validation" / "step-000000"]
    assert len({Image.open(folder / "trained-00.png").tobytes() for folder in images}) == 1
