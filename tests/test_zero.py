"""ZeRO is one more engine: the same losses, and checkpoints that all engines resume from."""

from __future__ import annotations

import importlib.util
import json

import engines
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

ZEROS = ["zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", "zero3-disk"]


@pytest.fixture
def run_on(starter, tmp_path):
    """Run a function on some ranks and return what it reports."""

    def run(function, world: int, *arguments):
        report = tmp_path / f"report-{len(starter.started)}.json"
        started = starter.start(function, world, *arguments, str(report))
        assert started.wait(900) == [0] * world, started.said
        return json.loads(report.read_text())

    return run


@pytest.fixture
def arguments_of(pipelines, shapes, tmp_path):
    def made(family: str, **more):
        return {
            "family": family,
            "base": str(pipelines(family)),
            "pictures": str(shapes),
            "folder": str(tmp_path),
            **more,
        }

    return made


def flat(steps: list[list[float]]) -> list[float]:
    return [number for step in steps for number in step]


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_ten_losses_and_norms_are_those_of_the_other_engines(family, run_on, arguments_of):
    arguments = arguments_of(family)
    expected = run_on(engines.losses_in_turn, 1, arguments, ["whole"], 10)["whole"]
    assert expected[-1][0] < expected[0][0]
    taken = run_on(engines.losses_in_turn, 2, arguments, ["whole", "fsdp2", *ZEROS], 10)
    for name, steps in taken.items():
        assert flat(steps) == pytest.approx(flat(expected), rel=1e-5), name


def test_accumulated_and_clipped_gradients_are_those_of_one_pass(run_on, arguments_of):
    names = ["fsdp2", "zero1", "zero2", "zero2-cpu", "zero3", "zero3-cpu"]
    one = run_on(engines.losses_in_turn, 2, arguments_of("sdxl", max_grad_norm=0.1), ["whole"], 4)["whole"]
    two = run_on(engines.losses_in_turn, 2, arguments_of("sdxl", max_grad_norm=0.1, passes=2), names, 4)
    for name, steps in two.items():
        assert flat(steps) == pytest.approx(flat(one), rel=1e-5), name


def test_bf16_over_float32_masters_stays_near_float32(run_on, arguments_of):
    names = ["fsdp2", "zero1", "zero2", "zero3", "zero3-cpu"]
    exact = run_on(engines.losses_in_turn, 2, arguments_of("flux"), ["whole"], 4)["whole"]
    taken = run_on(engines.losses_in_turn, 2, arguments_of("flux", mixed_precision="bf16"), names, 4)
    for name, steps in taken.items():
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in exact], rel=2e-2), name


def test_every_engine_resumes_from_every_other_on_any_number_of_ranks(run_on, arguments_of):
    arguments = arguments_of("sdxl", ema=True)
    engines_of = {1: ["whole"], 2: ["whole", "fsdp2", "zero1", "zero2-cpu", "zero3"], 4: ["fsdp2", "zero3"]}
    expected = {}
    for world, names in engines_of.items():
        expected |= run_on(engines.save_in_turn, world, arguments, names)
    assert len(expected) == 8
    for world, names in engines_of.items():
        resumed = run_on(engines.resume_in_turn, world, arguments, names, list(expected))
        assert len(resumed) == len(names) * 8
        for pair, (different, steps) in resumed.items():
            target, _, source = pair.partition(" from ")
            assert different == [], pair
            if target == source:
                assert steps == expected[source], pair
            assert flat(steps) == pytest.approx(flat(expected[source]), rel=1e-5), pair


def test_what_was_saved_in_bf16_is_put_back_exactly(run_on, arguments_of):
    arguments = arguments_of("flux", ema=True, mixed_precision="bf16", gradient_checkpointing=True)
    names = ["fsdp2", "zero1", "zero2", "zero3", "zero3-disk"]
    expected = run_on(engines.save_in_turn, 2, arguments, names)
    resumed = run_on(engines.resume_in_turn, 2, arguments, names, list(expected))
    for pair, (different, steps) in resumed.items():
        target, _, source = pair.partition(" from ")
        assert different == [], pair
        if target == source:
            assert steps == expected[source], pair
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected[source]], rel=2e-2), pair
