"""The work and memory of a step by model_family=auto are counted on a denoiser without memory."""

from __future__ import annotations

import pytest
import torch
from foreign import build_foreign
from models.automatic.test_parity import automatic
from models.test_inputs import opened

from simpletuner.counting.flops import FlopCounter
from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_counter import Execution
from simpletuner.counting.step_trace import trace_step, with_fake_parameters
from simpletuner.models.automatic.family import SMALLEST
from simpletuner.models.family.base import ModelFamily
from simpletuner.settings.values.shape import Shape


def counted(family: ModelFamily, shape: Shape = SMALLEST) -> int:
    inputs = {
        name: torch.empty(1, *axes, device="meta", dtype=torch.long if "mask" in name else torch.float32)
        for name, axes in family.input_shapes(shape).items()
    }
    return FlopCounter(family).count(inputs.pop("latents"), inputs)


@pytest.mark.parametrize("key", ["flux", "qwen_image", "sdxl"])
def test_auto_counts_the_work_that_the_class_does(key, pipelines):
    # The class rounds texts up, and its times have no gradient.
    auto = automatic(pipelines(key), tokens=None)  # as many as the class has by default
    assert counted(auto) == pytest.approx(counted(opened(key, pipelines(key))), rel=0.02)


def test_a_step_of_a_pipeline_without_a_class_is_traced(tmp_path):
    family, mode = automatic(build_foreign("CogVideoXPipeline", tmp_path / "base")), RememberingMode()
    model = with_fake_parameters(family.denoiser(), mode)
    one, two = (
        trace_step(family, model, mode, family.input_shapes(SMALLEST), count, Execution(torch.float32))
        for count in (1, 2)
    )
    assert 0 < one.product_flops < two.product_flops <= 2 * one.product_flops
    assert counted(family) > 0
