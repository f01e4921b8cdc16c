"""A training step queues work and never waits for the device: nothing is read from it, and what is copied to it was
pinned by the thread that prepares batches. The meta device takes the place of a GPU: reading from it raises, and a
copy to it is seen."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models.test_inputs import BY_CLASS, CPU, PROMPT, SHAPE, opened_for_short_captions
from models.test_predictions import conditioning_of, rows
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.counting.flops import autocast_of_meta
from simpletuner.models.family.objectives import sample_losses
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.step_logger import StopVote

META = torch.device("meta")
OF_DIFFUSERS = {
    "chroma": ["diffusers/models/transformers/transformer_chroma.py"],  # makes its guidance of zeros on the CPU
    "qwen_image": ["diffusers/models/transformers/transformer_qwenimage.py"],
}
"""Where diffusers' own code copies from the CPU in each forward."""
READS = ("lumina2",)
"""Families whose denoiser in diffusers reads lengths from the device to make rotary tables."""


def caller() -> str:
    """Return the line of simpletuner's or a library's code that is running, without this file and torch."""
    frames = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
    last = [each for each in frames if each.filename != __file__][-1]
    return f"{last.filename.rpartition('site-packages/')[2].rpartition('/main/')[2]}:{last.lineno}: {last.line}"


class CopiesSeen(TorchDispatchMode):
    """Note each copy of a CPU tensor to the device."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device == META and "copy" in str(func):
            tensors = [each for each in args if isinstance(each, Tensor)]
            # what a family copies itself are its `host_inputs`, which are pinned
            if any(each.device == CPU for each in tensors) and not (kwargs or {}).get("non_blocking"):
                self.waits.append(caller())
        return made


class ConstantsSeen(TorchFunctionMode):
    """Note each tensor that is made of Python numbers on the device: a copy that the dispatcher does not show."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and made.device == META and not isinstance(args[0], Tensor):
            self.waits.append(caller())
        return made


@contextmanager
def waits_seen() -> Iterator[list[str]]:
    waits: list[str] = []
    with CopiesSeen(waits), ConstantsSeen(waits), autocast_of_meta():
        yield waits


@pytest.mark.parametrize("key", [key for key in BY_CLASS if key not in READS])
def test_a_micro_batch_copies_nothing_pageable_and_reads_nothing(key, pipelines):
    family = opened_for_short_captions(key, pipelines(key), tokens=48)
    text = rows(family.text_encoder(CPU, torch.float32).encode([PROMPT, "a blue square on a black background"]))
    conditioning = conditioning_of(family, text)
    conditioning |= {name: value.to(META) for name, value in conditioning.items() if name not in family.host_inputs}
    latents = family.vae(CPU).encode(torch.zeros(2, 3, *SHAPE[1:])).to(META)
    model, objective = family.meta_denoiser.train(), family.objective()
    for _ in range(2):  # what is made once, at the first step, is no wait
        with waits_seen() as waits:
            noised = objective.add_noise(latents, torch.empty_like(latents), torch.empty(2, device=META))
            prediction = family.predict(model, noised.x_t, noised.timesteps, conditioning)
            sample_losses(prediction, noised.target, noised.weights).mean().backward()
    theirs = [wait for wait in waits if wait.startswith("diffusers/")]
    assert [wait for wait in waits if wait not in theirs] == []
    assert {wait.partition(":")[0] for wait in theirs} == {*OF_DIFFUSERS.get(key, ())}


def test_what_ranks_tell_each_other_after_a_step_is_made_on_the_device():
    with waits_seen() as waits:
        StopVote(StopRequest()).local_vote(META)
    assert waits == []


def test_the_modes_see_what_they_must():
    with waits_seen() as waits:
        torch.ones(2).to(META)
        torch.tensor([1.0], device=META)
        torch.full((2,), 1.0, device=META)
        torch.empty(2, device=META).copy_(torch.ones(2))
    assert len(waits) == 3
    with pytest.raises(RuntimeError):
        torch.empty(2, device=META).sum().item()
