"""Defaults that are an optimizer's own reach the optimizer, DeepSpeed's JSON, exports and what explains them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from simpletuner.parallel.torch_engine import sharded_parameters
from simpletuner.settings import load
from simpletuner.settings.declared.sections import Optimizer
from simpletuner.settings.foreign.deepspeed_optimizers import optimizer_block
from simpletuner.settings.showing.export import FORMATS, explain_settings, values_to_write
from simpletuner.training.optimizers import make_optimizer


def group_of(settings: Optimizer) -> dict:
    parameters = sharded_parameters([("weight", nn.Parameter(torch.ones(2, 2)))])
    return make_optimizer(parameters, settings).param_groups[0]


@pytest.mark.parametrize(
    ("name", "betas", "decay"),
    [
        ("lion", (0.9, 0.99), 0.01),
        ("adamw", (0.9, 0.999), 0.01),
        ("adamw_schedulefree", (0.9, 0.999), 0.01),
        ("adam", (0.9, 0.999), 0),
        ("adagrad", None, 0),
        ("adafactor", None, 0),
    ],
)
def test_an_optimizer_takes_its_own_defaults_and_what_is_set_instead(name, betas, decay):
    loaded = load({"optimizer": name.upper()}, complete=False, environment={})
    own = loaded.settings.optimizer
    assert own == Optimizer(optimizer=name)
    group = group_of(own)
    assert (group.get("betas"), group["weight_decay"]) == (betas, decay)
    given = {"adam_beta1": 0.5, "adam_beta2": 0.999, "adam_weight_decay": 0.25}
    group = group_of(load({"optimizer": name, **given}, complete=False, environment={}).settings.optimizer)
    assert (group.get("betas"), group["weight_decay"]) == (betas and (0.5, 0.999), 0.25)


def test_where_such_a_default_comes_from_is_said_and_it_is_no_change():
    explained = {each.name: each for each in explain_settings(load({"optimizer": "lion"}, complete=False))}
    beta2 = explained["adam_beta2"]
    assert (beta2.value, beta2.default, beta2.origin, beta2.because) == (0.99, 0.99, "default", "lion's own")
    given = load({"optimizer": "lion", "adam_beta2": "0.999"}, complete=False)
    beta2 = next(each for each in explain_settings(given) if each.name == "adam_beta2")
    assert (beta2.value, beta2.default, beta2.origin, beta2.because) == (0.999, 0.99, "flag", "")


@pytest.mark.parametrize("given", [{}, {"adam_beta2": 0.999}])
def test_exports_replay_to_the_same_betas(given):
    loaded = load({"optimizer": "lion", "zero_stage": 2, "model_family": "sdxl", **given}, complete=False)
    betas = [0.9, given.get("adam_beta2", 0.99)]
    assert optimizer_block(loaded.settings)["params"]["betas"] == betas
    values = values_to_write(loaded, everything=False)
    assert load(values, complete=False).settings == loaded.settings
    assert FORMATS["deepspeed"](loaded.settings, values).text.count(f"{betas[1]}") == 1
