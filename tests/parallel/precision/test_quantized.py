"""Quantized weights: near the exact ones, and nothing but their parts is kept for the backward pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.precision.precision import grouped
from simpletuner.parallel.precision.quantized import (
    QUANTIZERS,
    QuantizedLinear,
    check_torchao,
    replace_linear_layers,
)

pytest.importorskip("torchao.quantization", exc_type=ImportError)

ERRORS = {"int8": 0.01, "float8": 0.03, "nf4": 0.1}
"""Norm of the error of normally distributed weights, relative to their norm."""


@pytest.fixture
def exact() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 128).requires_grad_(False)


def quantized(exact: nn.Linear, precision: str) -> QuantizedLinear:
    layer = QuantizedLinear(exact, QUANTIZERS[precision])
    layer.quantize_from(exact.weight)
    return layer


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(precision, exact):
    layer = quantized(exact, precision)
    assert 0 < (layer.weight - exact.weight).norm() / exact.weight.norm() < ERRORS[precision]
    plain = nn.Linear(256, 128)
    plain.load_state_dict({"weight": layer.weight, "bias": exact.bias})
    inputs, other = (torch.ones(2, 3, 256).cumsum(-1).requires_grad_() for _ in range(2))
    layer(inputs).square().sum().backward()
    plain(other).square().sum().backward()
    assert torch.allclose(layer(inputs), plain(other))
    assert inputs.grad is not None and torch.allclose(inputs.grad, other.grad)


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_only_the_parts_are_kept_for_the_backward_pass(precision, exact):
    layer, kept = quantized(exact, precision), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        layer(torch.ones(3, 256, requires_grad=True))
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in layer.parts()}
    assert sum(each.nbytes for each in kept) < 1.1 * exact.weight.numel()


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_a_whole_quantized_weight_is_free_as_soon_as_its_rows_are_copied(precision, exact):
    seen: list[weakref.ref[object]] = []

    def quantize(weight: torch.Tensor) -> object:
        result = QUANTIZERS[precision](weight)
        seen.append(weakref.ref(result))
        return result

    gc.disable()
    try:
        QuantizedLinear(exact, quantize).quantize_from(exact.weight)
        assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_int8_are_near_those_of_the_dequantized_weight(bias, exact):
    layer = quantized(exact if bias else nn.Linear(256, 128, bias=False).requires_grad_(False), "int8")
    torch.manual_seed(1)
    inputs, other = (each.requires_grad_() for each in torch.randn(2, 16, 256).expand(2, 2, 16, 256).clone())
    wanted = layer(other)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    layer.in_int8 = True
    found = layer(inputs)
    found.backward(gradient)
    errors = [(found - wanted).norm() / wanted.norm(), (inputs.grad - other.grad).norm() / other.grad.norm()]
    assert found.dtype == wanted.dtype and [each.item() for each in errors] == pytest.approx([0.007, 0.007], rel=0.1)
    few = torch.randn(16, 256)
    assert torch.equal(layer(few), quantized_as(layer)(few)), "cuBLAS takes no fewer than 17 rows"
    zeros = torch.zeros(20, 256)
    assert torch.equal(layer(zeros), layer.bias.expand(20, -1) if bias else torch.zeros(20, 128))


def quantized_as(layer: QuantizedLinear) -> nn.Module:
    plain = nn.Linear(256, 128, bias=layer.bias is not None)
    plain.load_state_dict({"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias}))
    return plain


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracing
@pytest.mark.parametrize("in_int8", [False, True])
def test_a_compiled_layer_computes_the_same(in_int8, exact):
    unit = nn.Sequential(exact.requires_grad_(False))
    replace_linear_layers(unit, "int8", in_int8)
    layer = unit[0]
    inputs, other = (each.requires_grad_() for each in torch.randn(20, 256).expand(2, 20, 256).clone())
    wanted = layer(inputs)
    wanted.sin().sum().backward()
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(other)
    found.sin().sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(other.grad, inputs.grad)
    assert other.grad.count_nonzero() > 5000  # of 5120; torch 2.11 by itself has none


class Layouts(TorchDispatchMode):
    """Collects how the right side of each product of int8 is laid out."""

    def __init__(self) -> None:
        super().__init__()
        self.is_column_major: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._int_mm.default:
            self.is_column_major.append(args[1].stride() == (1, args[1].shape[0]) and args[0].is_contiguous())
        return func(*args, **(kwargs or {}))


def test_both_passes_multiply_the_layout_that_all_gpus_have(exact):
    """cuBLAS has no int8 product of two row-major matrices on an A100."""
    layer = quantized(exact, "int8")
    layer.in_int8 = True
    with Layouts() as found:
        layer(torch.randn(20, 256, requires_grad=True)).sum().backward()
    assert found.is_column_major == [True, True]


def test_trained_layers_and_those_of_odd_sizes_stay():
    unit = nn.Sequential(nn.Linear(8, 7), nn.Linear(8, 8), nn.Sequential(nn.Linear(16, 16))).requires_grad_(False)
    unit.append(nn.Linear(16, 16))
    replace_linear_layers(unit, "nf4")
    kinds = [type(unit[0]), type(unit[1]), type(unit[2][0]), type(unit[3])]
    assert kinds == [nn.Linear, QuantizedLinear, QuantizedLinear, nn.Linear]


def test_weights_are_read_in_groups():
    assert list(grouped({"a": 3, "b": 3, "c": 9, "d": 1}, 6)) == [["a", "b"], ["c"], ["d"]]
    assert list(grouped({}, 6)) == []


def test_an_old_torchao_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    check_torchao("base_model_precision=nf4")
    metadata = tmp_path / "torchao-0.17.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.17.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentNotReady, match="=nf4 needs torchao 0.18 or newer: 0.17.0 is installed"):
        check_torchao("base_model_precision=nf4")
