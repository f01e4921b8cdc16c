"""Products of LoRA and LoKr beside those of peft."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from simpletuner.private_api.of_peft import apply_kronecker_products, apply_low_rank_products


def pair_of(*layers, kind=LoKrConfig, **config):
    """Return a model with an adapter of random values as peft applies it, and as we do."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    names = [str(number) for number, layer in enumerate(layers) if not isinstance(layer, nn.Flatten)]
    random = {"init_weights" if kind is LoKrConfig else "init_lora_weights": False}
    inject_adapter_in_model(kind(target_modules=names, **random, **config), model, "default")
    ours = copy.deepcopy(model)
    apply_kronecker_products(ours)
    apply_low_rank_products(ours)
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


def lora_of(width=48, **config):
    layers = nn.Linear(32, width), nn.Linear(width, 16)
    return pair_of(*layers, kind=LoraConfig, **{"r": 4, "lora_alpha": 6, **config})


def test_outputs_and_gradients_of_a_lora_are_those_of_peft():
    peft, ours = (model.double() for model in lora_of())
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    expected = gradients_of(peft, x)
    for found, each in zip(gradients_of(ours, x), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)
    assert ours[0].forward.__func__ is not type(ours[0]).forward
    for model in (peft, ours):
        model.zero_grad()
        model[0].base_layer.weight.requires_grad_(True)  # no input that needs a gradient before the first layer
        model(x).square().sum().backward()
    for found, each in zip(ours.parameters(), peft.parameters(), strict=True):
        torch.testing.assert_close(found.grad, each.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_a_lora_over_a_base_of_another_dtype_is_as_exact_as_by_peft(base):
    peft, ours = lora_of()
    x, off = torch.randn(64, 32), []
    exact = copy.deepcopy(peft).double()(x.double())
    for model in (peft, ours):
        for layer in model:
            layer.base_layer.to(base)
        outputs = model(x.to(base))
        assert outputs.dtype == base
        off.append(((outputs.double() - exact).norm() / exact.norm()).item())
    assert off[1] <= 1.1 * off[0] + 1e-7


def merge(model):
    for layer in model:
        layer.merge()


def disable(model):
    for layer in model:
        layer.enable_adapters(False)


def add_second(model):
    torch.manual_seed(2)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False), model, "second")
    for layer in model:
        layer.set_adapter(["default", "second"])


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(
    ("config", "change"),
    [({}, merge), ({}, disable), ({}, add_second), ({"lora_dropout": 0.5}, None), ({"use_dora": True}, None)],
)
def test_what_is_no_plain_pair_stays_with_peft(config, change):
    pair, x, outputs = lora_of(**config), torch.randn(3, 32), []
    plain = copy.deepcopy(pair[1])
    disable(plain)
    for model in pair:
        if change is not None:
            change(model)
        torch.manual_seed(1)  # of dropout
        outputs.append(model(x))
    assert torch.equal(*outputs)
    assert torch.equal(outputs[1], plain(x)) == (change is disable)


class Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_lora_under_autocast_takes_fewer_operators_keeps_no_more_and_is_as_exact():
    pair, x = lora_of(32, lora_alpha=4), torch.randn(64, 32)
    exact, off, launches, kept = copy.deepcopy(pair[0]).double()(x.double()), [], [], []
    for model in pair:
        for layer in model:
            layer.base_layer.to(torch.bfloat16)
        seen = {}
        pack = lambda each, seen=seen: seen.setdefault(each.untyped_storage().data_ptr(), each)  # noqa: E731
        inputs = x.clone().requires_grad_()
        with Operators() as counter:
            with (
                torch.autocast("cpu", torch.bfloat16),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each),
            ):
                outputs = model(inputs)
            outputs.float().sum().backward()
        launches.append(counter.count)
        kept.append(sum(each.untyped_storage().nbytes() for each in seen.values()))
        off.append(((outputs.double() - exact).norm() / exact.norm()).item())
    assert launches[1] <= 0.77 * launches[0] and kept[1] <= kept[0], (launches, kept)
    assert off[1] < 1.05 * off[0] < 0.02, off


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
