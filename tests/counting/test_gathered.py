"""Units of FSDP2 as plan counts what they gather."""

from __future__ import annotations

import pytest

from simpletuner.counting.step_memory import Units
from simpletuner.parallel.model.blocks import count_parameters
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.tools.plan.estimate import opened_family

FLAGS = {"model_family": "flux", "model_flavour": "tiny", "fsdp_enable": True, "use_cpu": True}


@pytest.mark.parametrize("more", [{}, {"fsdp_transformer_layer_cls_to_wrap": "FluxTransformerBlock,FluxAttention"}])
def test_each_parameter_is_of_one_unit_also_where_units_are_within_units(more):
    settings = load({**FLAGS, **more}, None, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:
        model = family.meta_denoiser
        units = Units.of(model, settings)
        sizes = dict.fromkeys(["", *units.sizes], 0)
        for name, each in model.named_parameters():
            sizes[units.of_name(name)] += each.numel()
    assert any(one.startswith(f"{other}.") for one in units.sizes for other in units.sizes) == bool(more)
    assert sizes == {"": units.root, **units.sizes} and sum(sizes.values()) == count_parameters(model)
