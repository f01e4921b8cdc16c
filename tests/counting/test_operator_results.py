"""What is remembered of operators on fake tensors is what FakeTensorMode makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_counter import MemoryCounter
from simpletuner.private_api.of_torch import tree_iter

OPERATORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a new tensor": lambda x, y: x @ y.t(),
    "an int": lambda x, y: x.to(torch.int32) + 1,
    "a float": lambda x, y: x.to(torch.int32) + 1.0,
    "a bool": lambda x, y: x.to(torch.int32) + True,
    "a view": lambda x, y: x[1:, 2:].t(),
    "a view of a view": lambda x, y: x[1:][2:].view(-1),
    "several views": lambda x, y: x.chunk(2, dim=1),
    "in place": lambda x, y: x.add_(y),
    "several new tensors": lambda x, y: torch.native_layer_norm(x, [8], None, None, 1e-5),
    "a list": lambda x, y: torch.cat([x, y], dim=1),
    "beside a real tensor": lambda x, y: x * torch.ones(8, dtype=torch.float64),
    "other strides": lambda x, y: x.t() + y.t(),
}


def described(operator: Callable[[Tensor, Tensor], Any], given: list[Tensor]) -> list[object]:
    """Return layouts of the outputs, and the inputs whose memory each shares."""
    outputs = operator(*given)
    storages = [each.untyped_storage() for each in given]
    return [
        (each.shape, each.stride(), each.storage_offset(), each.dtype, each.device, each.untyped_storage().nbytes())
        + tuple(each.untyped_storage() is storage for storage in storages)
        for each in tree_iter(outputs)
        if isinstance(each, Tensor)
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_remembered_result_is_that_of_the_operator(name):
    mode, operators = RememberingMode(), [*OPERATORS.values()]

    def inputs() -> list[Tensor]:
        with mode:
            return [torch.empty(6, 8), torch.empty(6, 8)]

    expected = described(OPERATORS[name], inputs())
    with MemoryCounter():
        for each in operators:  # those of the others must not be taken for it
            each(*inputs())
    known = len(mode.results)
    with MemoryCounter():
        assert described(OPERATORS[name], inputs()) == expected
    assert len(mode.results) == known and all(mode.results.values())  # it was remembered


@pytest.mark.parametrize("view", [lambda x: x.as_strided((2,), (1,), 3), lambda x: x.view(torch.float16)])
def test_an_offset_that_is_not_relative_to_the_source_is_the_operators_own(view):
    with RememberingMode():
        values = torch.empty(16)
        sources = values[:8], values[8:]
    expected = [view(each).storage_offset() for each in sources]
    with MemoryCounter():
        assert [view(each).storage_offset() for each in sources] == expected
