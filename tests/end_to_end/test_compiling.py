"""Training with torch.compile, on real ranks: the same losses, names, pictures and pipelines as without."""

from __future__ import annotations

import json
from itertools import chain

import compiling
import levers
import numpy as np
import pytest
from conftest import ROOT, SMALL
from flags import last_wins
from PIL import Image
from safetensors import safe_open

INDUCTOR = ROOT / ".torch_extensions" / "inductor"
"""Inductor's own cache, which outlives a session: its C++ takes 6 CPU seconds."""
FSDP2 = ("--train_batch_size=2", "--fsdp_enable", "--gradient_checkpointing")


def eager(**more: bool) -> dict:
    return {"compile": {"dynamo_backend": "eager", **more}}


ALONE = {"plain": {}, "compiled": eager(dynamo_fullgraph=True, dynamo_dynamic=True)}
SHARED = {
    "data-parallel": eager(),
    "FSDP2": {"engine": "fsdp2", "gradient_checkpointing": True, **eager()},
    "FSDP2, as a whole": {"engine": "fsdp2", **eager(dynamo_use_regional_compilation=False)},
    "ZeRO-2": {"engine": "zero2", **eager()},
}
"""Runs on one rank and on two, by what differs."""


@pytest.fixture
def flags(tmp_path, flux_flags) -> tuple[str, ...]:
    """Train on pictures of one size, since every size is compiled."""
    return (*flux_flags, "--crop", f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}")


@pytest.mark.long
def test_losses_are_those_of_the_uncompiled_run_on_every_engine(run_on, arguments_of):
    arguments = arguments_of("flux", crop=True, caption_dropout=0.2)
    taken = run_on(levers.steps_by_variant, 1, arguments, ALONE) | run_on(levers.steps_by_variant, 2, arguments, SHARED)
    plain = taken.pop("plain")[0]
    assert len(taken) == 5
    for label, (steps, _, graphs) in taken.items():
        assert list(chain(*steps)) == pytest.approx(list(chain(*plain)), rel=1e-5), label
        assert graphs > 0, label


def test_quantized_bases_are_compiled_too(run_on, arguments_of):
    bases, variants = ("int8 products lora", "nf4 lora"), {}
    for base in bases:
        variants[f"{base} plain"] = {"engine": f"{base} whole", "compile": {"dynamo_backend": "no"}}
        variants[f"{base} compiled"] = {"engine": f"{base} whole", **eager()}
    taken = run_on(levers.steps_by_variant, 1, arguments_of("flux", crop=True), variants)
    for base in bases:
        steps, _, graphs = taken[f"{base} compiled"]
        assert list(chain(*steps)) == pytest.approx(list(chain(*taken[f"{base} plain"][0])), rel=1e-5), base
        assert graphs > 0, base


def test_compiled_models_draw_and_export_as_others(flags, train, tmp_path):
    flags = (*flags, *FSDP2, "--max_train_steps=1", "--validation_prompt=a red circle")
    flags = (*flags, "--validation_num_inference_steps=1", "--fsdp_state_dict_type=FULL_STATE_DICT", "--use_ema")
    plain = train(tmp_path / "plain", *flags, world=2)
    compiled = train(tmp_path / "compiled", *flags, "--dynamo_backend=eager", world=2)
    assert "compiled" in compiled.said and "eager, " in compiled.said
    for folder in ("pipeline/transformer", "checkpoints/checkpoint-000001/model", "checkpoints/checkpoint-000001/ema"):
        assert names_in(compiled.output / folder) == names_in(plain.output / folder) != set()
    for name in ("step-000000/trained-00.png", "step-000001/trained-00.png", "step-000001/ema-00.png"):
        drawn = [np.asarray(Image.open(run.output / "validation" / name), dtype=float) for run in (plain, compiled)]
        assert np.abs(drawn[0] - drawn[1]).max() <= 1


def names_in(folder) -> set[str]:
    """Return the names of the tensors in a folder's safetensors."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def test_two_and_two_compiled_steps_equal_four(flags, train, tmp_path):
    flags = (*flags, "--train_batch_size=4", "--dynamo_backend=eager", "--use_ema")
    straight = train(tmp_path / "straight", *flags, "--max_train_steps=4")
    train(tmp_path / "halves", *flags, "--max_train_steps=2")
    halves = train(tmp_path / "halves", *flags, "--max_train_steps=4")
    assert "resuming from" in halves.said
    assert halves.losses == straight.losses


@pytest.mark.parametrize(("world", "fsdp"), [(1, False), (2, True)])
def test_inductor_gives_the_same_losses_alone_and_under_fsdp2(world, fsdp, starter, tmp_path):
    run = starter.start(compiling.losses_by_backend, world, str(tmp_path), str(INDUCTOR), fsdp)
    assert run.wait() == [0] * world, run.said
    for rank in range(world):
        losses = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert losses["graphs"] == [1], "both blocks are compiled, and once"
        assert losses["no"][0] > losses["no"][-1]
        assert losses["inductor"] == pytest.approx(losses["no"], rel=1e-5)


def test_a_compiler_that_fails_is_one_sentence(flags, starter, tmp_path):
    flags = (f"--output_dir={tmp_path / 'run'}", *SMALL, *flags, "--max_train_steps=1", "--dynamo_backend=inductor")
    run = starter.start(compiling.command_line_without_cxx, 1, ["train", *last_wins(flags)])
    assert run.wait() == [5], run.said
    assert "torch.compile failed: " in run.said and "dynamo_backend=no" in run.said
    assert "Traceback" not in run.said


def test_what_cannot_be_compiled_is_refused_before_anything_is_encoded(flags, train, tmp_path):
    run = train(tmp_path / "run", *flags, "--dynamo_backend=eager", "--zero_stage=3", code=2)
    assert "dynamo_backend=eager cannot be used with zero_stage = 3" in run.said and "making" not in run.said
    run = train(tmp_path / "run", *flags, "--dynamo_backend=eager", "--dynamo_mode=max-autotune", code=2)
    assert "eager has no modes" in run.said and "making" not in run.said
