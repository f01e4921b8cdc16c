"""A trace of a few blocks, lengthened, is the trace of all of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from simpletuner.counting.step_trace import (
    Execution,
    StepTrace,
    equal_blocks,
    new_mode,
    shortened,
    trace_by_kinds,
    trace_step,
    with_fake_parameters,
)
from simpletuner.models.family.base import family_class
from simpletuner.settings.declared.sections import Data, Lora, Model, Settings
from simpletuner.settings.values.shape import Shape

DEEP = {
    "flux": {"num_layers": 14, "num_single_layers": 17},
    "pixart_sigma": {"num_layers": 11},
}
SHAPE = Shape(1, 64, 96)


def deep(family: str, folder: Path, target: Path, **model: str) -> tuple:
    """Return a family whose denoiser has many blocks, and the denoiser with fake parameters."""
    shutil.copytree(folder, target)
    config = target / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | DEEP[family]))
    chosen = Model(model_family=family, **model)
    settings = Settings(model=chosen, data=Data(tokenizer_max_length=8), lora=Lora(lora_rank=2))
    opened = family_class(chosen).open(target, settings)
    denoiser = opened.denoiser()
    if opened.adapter is not None:
        denoiser.requires_grad_(False)
        opened.adapter.attach(denoiser)
    mode = new_mode()
    return opened, with_fake_parameters(denoiser.train(), mode), mode


@pytest.mark.parametrize(
    ("family", "model_type", "recomputes", "offloads"),
    [("flux", "lora", True, False), ("pixart_sigma", "full", False, True)],
)
def test_what_few_blocks_take_is_what_all_of_them_take(family, model_type, recomputes, offloads, pipelines, tmp_path):
    opened, model, mode = deep(family, pipelines(family), tmp_path / "base", model_type=model_type)
    counts = equal_blocks(model)
    assert sorted(counts.values()) == sorted(DEEP[family].values())
    model.enable_gradient_checkpointing() if recomputes else model.disable_gradient_checkpointing()

    execution = Execution(torch.bfloat16, autocast=True, on_gpu=True, offloads=offloads)

    def trace() -> StepTrace:
        shapes = opened.input_shapes(SHAPE)
        return trace_step(opened, model, mode, shapes, 2, execution)

    whole, found = trace(), trace_by_kinds(model, counts, trace)
    for each in fields(StepTrace):
        if each.name != "backward_points":
            assert getattr(found, each.name) == getattr(whole, each.name), each.name
    assert [share for _, share in found.backward_points] == [share for _, share in whole.backward_points]
    pairs = zip(found.backward_points, whole.backward_points, strict=True)
    off = [abs(mine - its) for (mine, _), (its, _) in pairs]
    assert max(off) <= 0.01 * max(live for live, _ in whole.backward_points)
    assert found.peak_bytes(1e6) == pytest.approx(whole.peak_bytes(1e6), rel=0.01)


def test_blocks_that_differ_are_all_traced(pipelines, tmp_path):
    _, model, _ = deep("flux", pipelines("flux"), tmp_path / "base")
    with shortened(model, {"transformer_blocks": 3}):
        assert len(model.transformer_blocks) == 3 and len(model.single_transformer_blocks) == 17
    assert len(model.transformer_blocks) == 14
    model.single_transformer_blocks[3].requires_grad_(False)
    assert equal_blocks(model) == {"transformer_blocks": 14}
    with shortened(model, {"transformer_blocks": 4}):
        assert equal_blocks(model) == {}, "as many would be traced"
