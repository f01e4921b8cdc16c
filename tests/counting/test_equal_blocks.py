"""A trace of a few blocks, lengthened, is the trace of all of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from models.test_inputs import BY_CLASS, opened
from torch import nn

from simpletuner.counting.step_trace import (
    NUMBERS,
    Execution,
    equal_blocks,
    lists_of_equals,
    new_mode,
    shortened,
    trace_by_kinds,
    trace_step,
    with_fake_parameters,
)
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.private_api.of_torch import FakeTensorMode
from simpletuner.settings.declared.sections import Data, Lora, Model, Settings
from simpletuner.settings.values.shape import Shape

LAYERS = re.compile(r"(num|n)_(\w+_)?layers|num_single_dit_layers")
SHAPE = Shape(1, 64, 96)


def deep(family: str, folder: Path, target: Path, layers: Mapping[str, int], **model: str) -> tuple:
    """Return a family whose denoiser has many blocks, and the denoiser with fake parameters."""
    shutil.copytree(folder, target)
    config = target / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **layers}))
    chosen = Model(model_family=family, **model)
    settings = Settings(model=chosen, data=Data(tokenizer_max_length=8), lora=Lora(lora_rank=2))
    opened = family_class(chosen).open(target, settings)
    denoiser = opened.denoiser()
    if opened.adapter is not None:
        denoiser.requires_grad_(False)
        opened.adapter.attach(denoiser)
    mode = new_mode()
    return opened, with_fake_parameters(denoiser.train(), mode), mode


def compare(family: ModelFamily, model: nn.Module, mode: FakeTensorMode, counts: dict[str, int], **how: bool) -> None:
    """Trace all blocks of a model, and two or three of each kind."""
    execution = Execution(torch.bfloat16, autocast=True, on_gpu=True, **how)
    trace = partial(trace_step, family, model, mode, family.input_shapes(SHAPE), 2, execution)
    whole, found = trace(), trace_by_kinds(model, counts, trace)
    assert found.released == whole.released
    for name in NUMBERS:
        # LTX-Video 2 launches 10 more of 700 kernels in each further block
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=0.02 if name == "launches" else 0.005)
    assert [share for _, share in found.backward_points] == [share for _, share in whole.backward_points]
    pairs = zip(found.backward_points, whole.backward_points, strict=True)
    off = [abs(mine - its) for (mine, _), (its, _) in pairs]
    assert max(off) <= 0.01 * max(live for live, _ in whole.backward_points)
    assert found.peak_bytes(1e6) == pytest.approx(whole.peak_bytes(1e6), rel=0.005)


# Two more than the shortest that is traced: those further ones that a published model has add what the third adds.
BLOCKS = 4
OF_BLOCKS = [key for key in BY_CLASS if family_class(Model(model_family=key)).denoiser_name != "unet"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Z-Image, in torch
@pytest.mark.parametrize("key", OF_BLOCKS)
def test_what_few_blocks_take_is_what_all_of_them_take(key, pipelines):
    """Whole published models: benchmarks/plan_blocks.py."""
    family, mode = opened(key, pipelines(key)), new_mode()
    family.config = {
        name: BLOCKS if LAYERS.fullmatch(name) and value else value for name, value in family.exported_config().items()
    }
    model = with_fake_parameters(family.denoiser().train(), mode)
    counts = {name: len(blocks) for name, blocks in lists_of_equals(model).items() if len(blocks) == BLOCKS}
    assert bool(counts) == (key not in ("sd3", "qwen_image")), "whose last block differs"
    model.enable_gradient_checkpointing() if BY_CLASS.index(key) % 2 else model.disable_gradient_checkpointing()
    if counts:
        compare(family, model, mode, counts)


@pytest.mark.parametrize(
    ("family", "model_type", "recomputes", "offloads"),
    [("flux", "lora", True, False), ("pixart_sigma", "full", False, True)],
)
def test_the_same_with_a_lora_and_with_offloaded_activations(
    family, model_type, recomputes, offloads, pipelines, tmp_path
):
    layers = dict.fromkeys(("num_layers", "num_single_layers") if family == "flux" else ("num_layers",), BLOCKS)
    found, model, mode = deep(family, pipelines(family), tmp_path / "base", layers, model_type=model_type)
    model.enable_gradient_checkpointing() if recomputes else model.disable_gradient_checkpointing()
    compare(found, model, mode, {name: len(getattr(model, name)) for name in lists_of_equals(model)}, offloads=offloads)


def test_blocks_that_differ_are_all_traced(pipelines, tmp_path):
    _, model, _ = deep("flux", pipelines("flux"), tmp_path / "base", {"num_layers": 14, "num_single_layers": 17})
    with shortened(model, {"transformer_blocks": 3}):
        assert len(model.transformer_blocks) == 3 and len(model.single_transformer_blocks) == 17
    assert len(model.transformer_blocks) == 14
    model.single_transformer_blocks[3].requires_grad_(False)
    assert equal_blocks(model) == {"transformer_blocks": 14}
    with shortened(model, {"transformer_blocks": 4}):
        assert equal_blocks(model) == {}, "as many would be traced"
