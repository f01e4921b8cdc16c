"""A split sequence gives the losses and gradients of the whole one: every family, both strategies, uneven parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import splitting
from conftest import base
from PIL import Image

from simpletuner.models.registry import presets

SPLIT = [name for name, preset in presets().items() if preset.heads]


@pytest.fixture
def compared(starter, pipelines, shapes, tmp_path):
    """Train on some ranks; return by (family, engine, what else differs) losses, difference of gradients, graphs."""
    # 5 x 5 tokens, or 3 x 3 where a token is 32 px wide; captions of different length, so that there are masks
    common = {"pictures": str(shapes), "resolution": 80, "caption_dropout": 0.5, "max_grad_norm": 0.0}
    own = {
        "ltxvideo": {"resolution": 96, "alignment": 32, "tokenizer_max_length": 9},
        "lumina2": {},
        "qwen_image": {},
        "z_image": {},
    }

    def case(family: str, engine: str, steps: int, what: str, more: dict):
        place = {"base": str(pipelines(family)), "folder": str(tmp_path / family), "label": f"{family} {engine}{what}"}
        return {**common, **own.get(family, {"tokenizer_max_length": 9}), **more, **place} | {
            "family": family,
            "engine": engine,
            "steps": steps,
        }

    def run(world: int, *cases: tuple):
        report = tmp_path / f"report-{world}.json"
        started = starter.start(splitting.compare_in_turn, world, [case(*each) for each in cases], str(report))
        assert started.wait(900) == [0] * world, started.said
        return json.loads(report.read_text())

    return run


def assert_equal(taken: dict) -> None:
    """Expect of all runs of a family the losses, norms and gradients of its first one, which has whole sequences."""
    for label, (steps, difference, _) in taken.items():
        expected = next(own for name, (own, *_) in taken.items() if name.split()[0] == label.split()[0])
        flat = [number for step in steps for number in step]
        assert flat == pytest.approx([number for step in expected for number in step][: len(flat)], rel=1e-5), label
        assert difference < 1e-5, label


@pytest.mark.long
def test_every_family_on_four_ranks_of_which_two_or_four_share_a_sequence(compared):
    engines = {family: ["whole", "cp2-alltoall", "cp4"] for family in SPLIT}
    engines["flux"] += ["cp2", "cp4-alltoall", "hybrid-cp2"]
    steps = dict.fromkeys(SPLIT, 2) | {"flux": 10}
    taken = compared(4, *((family, name, steps[family], "", {}) for family in SPLIT for name in engines[family]))
    assert len(SPLIT) == 11 and len(taken) == 36
    assert_equal(taken)
    (first, _), *_, (last, _) = taken["flux whole"][0]
    assert last < first


def test_accumulated_recomputed_and_compiled_steps_are_the_same(compared):
    less_memory = {"passes": 2, "gradient_checkpointing": True}
    compiled = {"dynamo_backend": "aot_eager"}
    cases = []
    for family, more in (("flux", {"dynamo_use_regional_compilation": False}), ("qwen_image", {})):
        cases += [(family, engine, 3, "", {}) for engine in ("fsdp2", "cp2", "cp2-alltoall")]
        cases += [(family, engine, 2, ", less memory", less_memory) for engine in ("cp2", "cp2-alltoall")]
        cases.append((family, "cp2-alltoall", 1, ", compiled", {"compile": compiled | more}))
    taken = compared(2, *cases)
    assert_equal(taken)
    for label, (*_, graphs) in taken.items():
        assert (graphs > 0) == label.endswith("compiled"), label


@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_images_of_a_split_denoiser_are_those_of_a_whole_one(family, pipelines, shapes, train, tmp_path):
    flags = (
        *base(family, pipelines(family), shapes),
        f"--cache_dir_vae={tmp_path / 'latents'}",
        f"--cache_dir_text={tmp_path / 'text'}",
        *("--validation_prompt=a red circle", "--validation_prompt=a blue square", "--validation_prompt=a star"),
        *("--validation_num_inference_steps=2", "--validation_resolution=80", "--max_train_steps=1"),
    )
    whole = train(tmp_path / "whole", *flags, "--train_batch_size=4")
    split = train(
        tmp_path / "split", *flags, "--train_batch_size=2", "--fsdp_enable", "--context_parallel_size=2", world=4
    )
    assert "4 = 2 x 2 x 1 (batch x ranks / context_parallel_size = 2 x accumulation)" in " ".join(split.said.split())
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    for number in range(3):
        name = f"validation/step-000001/trained-{number:02d}.png"
        with Image.open(whole.output / name) as expected, Image.open(split.output / name) as image:
            assert np.abs(np.int16(expected) - np.int16(image)).max() <= 1
