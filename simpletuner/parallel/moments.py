"""The state of a torch optimizer, by moment and parameter name, so that any engine can save and restore it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Moments:
    """`steps` taken so far, and tensors such as `exp_avg` by parameter name, laid out like the parameters."""

    steps: int = 0
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def read_moments(optimizer: torch.optim.Optimizer, module: nn.Module) -> Moments:
    """Return an optimizer's state under the parameters' names."""
    moments = Moments()
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key == "step":
                moments.steps = int(value)
            else:
                moments.tensors.setdefault(key, {})[name] = value
    return moments


def empty_moments(module: nn.Module, names: list[str]) -> Moments:
    """Return moments with memory laid out like the parameters, for a checkpoint to be read into."""
    tensors = {
        moment: {name: torch.empty_like(p, requires_grad=False) for name, p in module.named_parameters()}
        for moment in names
    }
    return Moments(0, tensors)


def write_moments(optimizer: torch.optim.Optimizer, module: nn.Module, moments: Moments) -> None:
    """Put named state into a fresh optimizer."""
    if moments.steps == 0:
        return
    for name, parameter in module.named_parameters():
        step = torch.tensor(float(moments.steps), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **{key: named[name] for key, named in moments.tensors.items()}}
