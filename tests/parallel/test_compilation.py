from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from simpletuner.errors import TrainingError
from simpletuner.parallel.parallelize import compile_in_place, compiler_explained, described
from simpletuner.settings.declared.sections import Compile


class Block(nn.Module):
    def __init__(self, width: int, breaks: bool = False) -> None:
        super().__init__()
        self.inner, self.breaks = nn.Linear(width, width), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.inner(x).relu() + x


class Model(nn.Module):
    def __init__(self, widths: list[int], breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, breaks) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x[..., : block.inner.in_features]).mean() for block in self.blocks]).sum()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield


def compiled(model: Model, **setting_fields) -> Model:
    compile_in_place(model, ("Block",), Compile(dynamo_backend="eager", **setting_fields))
    return model


def graphs_of(model: Model, *rows: int) -> int:
    """Call a model with inputs of so many rows; return how many graphs that takes."""
    plain = Model([block.inner.in_features for block in model.blocks])
    plain.load_state_dict(model.state_dict())
    for count in rows:
        x = torch.randn(count, 40)
        assert torch.allclose(model(x), plain(x))
    return counters["stats"]["unique_graphs"]


def test_equal_blocks_are_compiled_once_and_names_stay():
    model = compiled(Model([4, 4, 4, 5, 5]))
    assert graphs_of(model, 3) == 2
    assert [*model.state_dict()] == [*Model([4, 4, 4, 5, 5]).state_dict()]


def test_the_whole_model_is_one_graph():
    assert graphs_of(compiled(Model([4, 4, 5]), dynamo_use_regional_compilation=False), 3) == 1


@pytest.mark.parametrize(("dynamic", "graphs"), [(False, 3), (True, 1)])
def test_every_size_is_compiled_or_one_for_all(dynamic, graphs):
    assert graphs_of(compiled(Model([4]), dynamo_dynamic=dynamic), 3, 5, 7) == graphs


def test_blocks_of_many_widths_are_all_compiled():
    widths = list(range(4, 24))
    assert graphs_of(compiled(Model(widths), dynamo_fullgraph=True), 3) == len(widths)


def test_a_graph_that_must_be_split_is_split():
    assert graphs_of(compiled(Model([4], breaks=True)), 3) >= 1


def test_a_graph_that_must_be_split_is_an_error_if_asked():
    model = compiled(Model([5], breaks=True), dynamo_fullgraph=True)
    with pytest.raises(TrainingError, match=r"torch\.compile failed: .*graph_break") as caught, compiler_explained():
        model(torch.randn(3, 40))
    assert "dynamo_backend=no" in caught.value.hint
    assert "\n" not in caught.value.message


def test_other_errors_are_not_the_compilers():
    with pytest.raises(RuntimeError, match="^mine$"), compiler_explained():
        raise RuntimeError("mine")


def test_how_it_is_compiled_is_described():
    assert described(Compile(dynamo_backend="eager")) == "eager, block by block, once per size"
    wish = Compile(
        dynamo_backend="inductor",
        dynamo_mode="max-autotune",
        dynamo_dynamic=True,
        dynamo_fullgraph=True,
        dynamo_use_regional_compilation=False,
    )
    assert described(wish) == "inductor (max-autotune), as a whole, once for all sizes, full graphs"
