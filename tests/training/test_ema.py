from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import TorchEngine
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Ema, Optimizer
from simpletuner.training.ema import EMA, DelayedAverage
from simpletuner.training.optimizers import make_optimizer


def engine(module: torch.nn.Module) -> TorchEngine:
    optimizer = partial(make_optimizer, settings=Optimizer())
    mesh = Mesh(World(0, 1, 0, torch.device("cpu"), HashStore()))
    return TorchEngine(module, module, mesh, optimizer, lambda is_last: nullcontext(), nullcontext)


def average_of(values: list[float], **settings) -> tuple[EMA, torch.Tensor]:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.tensor(values))
    return EMA(engine(module), Ema(use_ema=True, **settings)), module.w


def move(live: torch.Tensor, values: list[float]) -> None:
    with torch.no_grad():
        live.copy_(torch.tensor(values))


def test_the_average_starts_at_the_weights_and_is_a_copy():
    average, live = average_of([1.0, 2.0])
    move(live, [5.0, 5.0])
    assert average.shards["w"].tolist() == [1.0, 2.0]
    assert not average.shards["w"].requires_grad


def test_the_decay_warms_up_from_a_tenth():
    average, _ = average_of([0.0], ema_decay=0.5)
    decays = []
    for _ in range(10):
        decays.append(average.decay())
        average.updates += 1
    assert decays == pytest.approx([1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5])


def test_updates_by_hand():
    average, live = average_of([1.0])
    move(live, [2.0])
    average.update(1)
    assert average.shards["w"].item() == pytest.approx(0.1 * 1 + 0.9 * 2)  # 1.9
    move(live, [4.0])
    average.update(2)
    assert average.shards["w"].item() == pytest.approx(2 / 11 * 1.9 + 9 / 11 * 4)
    assert average.updates == 2


def test_a_full_grown_average_decays_as_the_settings_say():
    average, live = average_of([1.0], ema_decay=0.9)
    average.updates = 1000
    move(live, [2.0])
    average.update(1)
    assert average.shards["w"].item() == pytest.approx(1.1)


def test_only_steps_that_are_due_update():
    average, live = average_of([0.0], ema_update_interval=3)
    move(live, [1.0])
    updates = []
    for step in range(1, 8):
        average.update(step)
        updates.append(average.updates)
    assert updates == [0, 0, 1, 1, 1, 2, 2]


def test_whole_numbers_are_left_alone():
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2))
    module.register_buffer("count", torch.tensor(3))
    average = EMA(engine(module), Ema(use_ema=True))
    average.update(1)
    assert set(average.shards) == {"w"}


def test_in_place_shows_the_average_and_puts_the_weights_back():
    average, live = average_of([1.0, 2.0])
    move(live, [3.0, 4.0])
    with average.swapped_in():
        assert live.tolist() == [1.0, 2.0]
        assert average.shards["w"].tolist() == [3.0, 4.0]
    assert live.tolist() == [3.0, 4.0]
    assert average.shards["w"].tolist() == [1.0, 2.0]


def test_in_place_puts_the_weights_back_after_a_failure():
    average, live = average_of([1.0])
    move(live, [3.0])
    with pytest.raises(RuntimeError, match="validation failed"), average.swapped_in():
        raise RuntimeError("validation failed")
    assert live.tolist() == [3.0]
    assert average.shards["w"].tolist() == [1.0]


def test_the_module_itself_sees_the_exchange():
    module = torch.nn.Linear(2, 1, bias=False)
    average = EMA(engine(module), Ema(use_ema=True))
    before = module(torch.ones(1, 2)).item()
    with torch.no_grad():
        module.weight.add_(1)
    with average.swapped_in():
        assert module(torch.ones(1, 2)).item() == pytest.approx(before)
    assert module(torch.ones(1, 2)).item() == pytest.approx(before + 2)


def test_the_average_is_in_float32_whatever_the_weights_are():
    module = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    average = EMA(engine(module), Ema(use_ema=True))
    average.update(1)
    assert average.shards["weight"].dtype == torch.float32


def test_an_average_is_put_back_from_the_form_that_checkpoints_hold():
    average, live = average_of([1.0, 2.0])
    saved = {name: tensor.clone() for name, tensor in average.tensors().items()}
    move(live, [5.0, 5.0])
    average.update(1)

    def read(tensors) -> None:
        tensors["w"].copy_(saved["w"])

    average.restore(read, 7)
    assert average.shards["w"].tolist() == [1.0, 2.0] and average.updates == 7
    assert live.tolist() == [5.0, 5.0]


def test_an_average_that_follows_in_a_thread_has_the_same_bits_and_is_complete_where_it_is_read():
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64)
    direct, delayed = (EMA(engine(module), Ema(use_ema=True)) for _ in range(2))
    delayed.delayed = DelayedAverage(delayed.shards, None)
    for step in range(1, 6):
        for average in (direct, delayed):
            average.update(step)
        delayed.wait_for_copy()
        with torch.no_grad():
            module.weight.add_(torch.randn(64, 64))  # the copy is made, so the average does not see it
    found, wanted = delayed.tensors(), direct.tensors()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    delayed.update(6)
    before = module.weight.detach().clone()
    with delayed.swapped_in():
        shown = module.weight.detach().clone()
    direct.update(6)
    assert torch.equal(shown, direct.shards["weight"]) and torch.equal(module.weight, before)
