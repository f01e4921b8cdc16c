"""LoKr's products beside those of peft, which computes W1 (x) W2."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoKrConfig, inject_adapter_in_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simpletuner.private_api.of_peft import apply_kronecker_products


def pair_of(*layers, **config):
    """Return a model with a LoKr of random values as peft applies it, and as we do."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    names = [str(number) for number, layer in enumerate(layers) if not isinstance(layer, nn.Flatten)]
    inject_adapter_in_model(LoKrConfig(target_modules=names, init_weights=False, **config), model, "default")
    ours = copy.deepcopy(model)
    apply_kronecker_products(ours)
    return model, ours


def gradients_of(model, x):
    inputs = x.clone().requires_grad_()
    outputs = model(inputs)
    outputs.square().sum().backward()
    return outputs, inputs.grad, [each.grad for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((64, 160), {"r": 4, "alpha": 8, "decompose_factor": 4}),  # W2 is a product of two
        ((64, 96), {"r": 100, "alpha": 50, "decompose_factor": 8}),
        ((60, 84), {"r": 2, "alpha": 2, "decompose_factor": -1, "decompose_both": True}),  # W1, too
    ],
)
def test_outputs_and_gradients_are_those_of_peft(sizes, config):
    peft, ours = (model.double() for model in pair_of(nn.Linear(*sizes), **config))
    x = torch.randn(2, 3, 5, sizes[0], dtype=torch.float64)
    for found, expected in zip(gradients_of(ours, x), gradients_of(peft, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)


def test_a_convolution_stays_with_peft():
    peft, ours = pair_of(nn.Conv2d(8, 16, 3), nn.Flatten(1), r=4, alpha=8, decompose_factor=4)
    x = torch.randn(2, 8, 6, 6)
    assert torch.equal(peft(x), ours(x))


def test_it_keeps_less_and_multiplies_less_and_is_as_exact_in_bf16():
    peft, ours = pair_of(nn.Linear(640, 1280), r=16, alpha=8, decompose_factor=16)
    x, kept, flops, off = torch.randn(1, 256, 640), [], [], []
    exact = nn.functional.linear(x.double(), copy.deepcopy(peft[0]).double().get_delta_weight("default"))

    for model in (peft, ours):
        seen = {}  # by address: views share theirs
        pack = lambda each, seen=seen: seen.setdefault(each.untyped_storage().data_ptr(), each)  # noqa: E731
        with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
                outputs = model(x.clone().requires_grad_())
            outputs.float().sum().backward()
        kept.append(sum(each.untyped_storage().nbytes() for each in seen.values()))
        flops.append(counter.get_total_flops())
        with torch.autocast("cpu", torch.bfloat16):
            off.append(((model[0]._get_delta_activations("default", x) - exact).norm() / exact.norm()).item())
    assert kept[1] < 0.6 * kept[0] and flops[1] < 0.6 * flops[0], (kept, flops)
    assert off[1] < 1.2 * off[0] < 0.01, off
