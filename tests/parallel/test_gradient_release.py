from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import ShardedParameter, TorchEngine
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Optimizer
from simpletuner.training.optimizers import make_optimizer

LAYERS, WIDTH = 8, 16


def backward_of(released: bool) -> tuple[int, list[torch.Tensor], float]:
    """Train a step, and return how many gradient bytes there were at most, the weights, and the norm."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = Mesh(World(0, 1, 0, torch.device("cpu"), HashStore()))
    optimizer = partial(make_optimizer, settings=Optimizer(learning_rate=0.1))
    engine = TorchEngine(model, model, mesh, optimizer, lambda is_last: nullcontext(), nullcontext)
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))
        )
    if released:
        engine.release_gradients()
    engine.set_learning_rate(0.01)
    engine.backward(model(torch.ones(2, WIDTH)).square().sum())
    assert all((each.grad is None) == released for each in model.parameters())
    norm = engine.step(0.0).item()
    return max(held), [each.detach().clone() for each in model.parameters()], norm


def test_no_more_than_one_gradient_is_held_and_the_step_is_the_same():
    (most, weights, norm), (least, own_weights, own_norm) = backward_of(released=False), backward_of(released=True)
    assert (most, least) == (LAYERS * WIDTH**2 * 4, WIDTH**2 * 4)
    assert all(torch.equal(one, other) for one, other in zip(weights, own_weights, strict=True))
    assert own_norm == pytest.approx(norm, rel=1e-6)


def plain_sgd(parameters: Mapping[str, ShardedParameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([each.shard for each in parameters.values()], lr=1.0)


def test_values_are_clipped_one_by_one_where_the_method_says_so():
    weights = {}
    for by_value in (False, True):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        mesh = Mesh(World(0, 1, 0, torch.device("cpu"), HashStore()))
        engine = TorchEngine(model, model, mesh, plain_sgd, lambda _: nullcontext(), nullcontext)
        engine.clips_values = by_value
        engine.backward(model(torch.tensor([[30.0, 0.5]])).sum())
        assert engine.step(1.0).item() == pytest.approx((30**2 + 0.5**2) ** 0.5)  # as it was before clipping
        weights[by_value] = model.weight.tolist()
    assert weights[True] == [[-1.0, -0.5]]
    assert weights[False] == [[pytest.approx(-0.99986, abs=1e-4), pytest.approx(-0.01666, abs=1e-4)]]
