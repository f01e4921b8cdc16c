"""What trades memory for speed changes neither losses nor gradients: recomputation, offloading, fused projections."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain

import levers
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.parallel.model.activations import CastParameter, HostMemory, describe_activations
from simpletuner.settings.declared.sections import Compile, Settings, Training

RECOMPUTED = {"gradient_checkpointing": True}
OFFLOADED = {"training": {"offload_activations": True}}
ALL_LEVERS = {"offload_activations": True, "fuse_qkv_projections": True}
STREAMED = {"engine": "fsdp2-cpu", **RECOMPUTED, "training": ALL_LEVERS}


def budget(share: float, **training) -> dict:
    return {"compile": {"dynamo_backend": "aot_eager"}, "training": {"activation_memory_budget": share, **training}}


ALONE = {
    "plain": {},
    "recomputed": RECOMPUTED,
    "offloaded": OFFLOADED,
    "fused": {"training": {"fuse_qkv_projections": True}},
    "streamed": STREAMED,
    "budget 0.5": budget(0.5, fuse_qkv_projections=True),
    "budget 0": RECOMPUTED | budget(0.0),
    "fsdp2, budget 0.5": {"engine": "fsdp2", **budget(0.5, **ALL_LEVERS)},
}
SHARED = {
    "data-parallel": RECOMPUTED | OFFLOADED,
    "streamed": STREAMED,
    "cp2": {"engine": "cp2", **RECOMPUTED | OFFLOADED},
}
"""Compiled blocks of several ranks, data-parallel and FSDP2, are in `end_to_end/test_compiling.py`."""


@pytest.mark.long
def test_losses_and_gradients_are_those_of_a_run_that_keeps_all(run_on, arguments_of):
    arguments = arguments_of("flux", crop=True)  # one bucket: every size is compiled
    alone = run_on(levers.steps_by_variant, 1, arguments, ALONE)
    shared = run_on(levers.steps_by_variant, 2, arguments, SHARED)
    plain, everything, _ = alone["plain"]
    for taken in (alone, shared):
        for label, (steps, _, graphs) in taken.items():
            assert list(chain(*steps)) == pytest.approx(list(chain(*plain)), rel=1e-4), label
            assert (graphs > 0) == ("budget" in label), label
    kept = {label: number / everything for label, (_, number, _) in alone.items()}
    # Measured: 0.073 and 0.0013. What is not offloaded is outside of the denoiser: the loss.
    assert kept["recomputed"] < 0.1 and kept["offloaded"] < 0.002 and kept["streamed"] < 0.002
    assert 0.3 < kept["budget 0.5"] < 0.6 and kept["budget 0"] < 0.1


def test_parameters_stay_where_they_are_and_strides_as_they_are():
    weight, activation = nn.Parameter(torch.ones(3, 2)), torch.rand(2, 3, 4).permute(2, 0, 1)
    hooks = HostMemory()
    for saved in (weight, weight.t()):
        assert hooks.unpack(hooks.pack(saved)) is saved
    held = hooks.unpack(hooks.pack(activation))
    assert torch.equal(held, activation) and held.stride() == activation.stride()
    assert held.data_ptr() != activation.data_ptr()


def test_a_budget_decides_for_compiled_blocks_alone():
    for backend, share, offloads, said in (
        ("no", None, False, "blocks are recomputed"),
        ("auto", 0.5, True, "blocks are recomputed, in the machine's memory"),
        ("inductor", 0.5, False, "compiled blocks keep 50%"),
        ("inductor", None, False, "blocks are recomputed"),
    ):
        training = Training(activation_memory_budget=share, offload_activations=offloads, gradient_checkpointing=True)
        assert describe_activations(Settings(training=training, compile=Compile(dynamo_backend=backend))) == said
    assert describe_activations(Settings(training=Training(gradient_checkpointing=False))) == "all kept"


def test_what_autocast_makes_of_weights_is_not_kept_but_cast_again():
    layer, values, hooks = nn.Linear(4, 5), torch.rand(3, 4), HostMemory()
    packed = []

    def pack(tensor):
        packed.append(hooks.pack(tensor))
        return packed[-1]

    gradients = {}
    for offloads in (False, True):
        layer.zero_grad()
        saved = saved_tensors_hooks(pack, hooks.unpack) if offloads else nullcontext()
        with saved, torch.autocast("cpu", torch.bfloat16):
            loss = layer(layer(values)[:, :4]).float().sum()
        loss.backward()
        assert layer.weight.grad is not None
        gradients[offloads] = layer.weight.grad.clone()
    assert torch.equal(gradients[False], gradients[True])
    weights = [each for each in packed if isinstance(each, CastParameter)]
    assert [each.parameter is layer.weight for each in weights] == [True], "the first layer's input needs no gradient"
