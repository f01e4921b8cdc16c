"""The engine for everything that torch itself trains; how gradients are reduced and cast is passed in.

The optimizer works on this rank's shards as plain tensors. Over DTensors the same fused AdamW and the same clipping
also pass through torch's sharding rules at every step, which `benchmarks/sharded_update.py` shows the price of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simpletuner.parallel.moments import Moments

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Shard:
    """A parameter as the model has it, and this rank's part of it as the optimizer sees it, in the same memory."""

    parameter: nn.Parameter
    part: nn.Parameter

    def whole(self, part: Tensor) -> Tensor:
        """Return a tensor of the part's layout as what the parameter is: a DTensor if that is sharded."""
        p = self.parameter
        if not isinstance(p, DTensor):
            return part
        return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Return every trainable parameter by name, with this rank's part of it."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {name: Shard(p, nn.Parameter(local(p.detach())) if isinstance(p, DTensor) else p) for name, p in named}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TorchEngine:
    """A Strategy around a torch model; `forward_pass` and `drawing` are what replicated and sharded engines do
    differently."""

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        forward_pass: Callable[[bool], AbstractContextManager[None]],
        drawing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.module, self.forward_pass, self.drawing = model, module, forward_pass, drawing
        self.shards = shards_of(module)
        self.is_sharded = any(isinstance(shard.parameter, DTensor) for shard in self.shards.values())
        self.optimizer = make_optimizer([shard.part for shard in self.shards.values()])

    def backward(self, loss: Tensor) -> None:
        """Add gradients."""
        loss.backward()

    @torch.no_grad()
    def update(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip by the global norm, step, clear; return the norm before clipping."""
        shards = self.shards.values()
        for shard in shards:
            shard.part.grad = local(shard.parameter.grad) if shard.parameter.grad is not None else None
        parts = [shard.part for shard in shards if shard.part.grad is not None]
        grad_norm = self.global_norm([part.grad for part in parts if part.grad is not None])
        if max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parts, max_grad_norm, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for shard in shards:
            shard.parameter.grad = shard.part.grad = None
        return grad_norm

    def global_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm over all parameters and, where they are sharded, all ranks."""
        norm = nn.utils.get_total_norm(gradients)
        if not self.is_sharded:
            return norm
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def weights(self) -> dict[str, Tensor]:
        """Return the float32 masters by name, as DTensors where they are sharded."""
        return self.module.state_dict()

    def moments(self) -> Moments:
        """Return the optimizer's state."""
        moments = Moments()
        for name, shard in self.shards.items():
            for key, value in self.optimizer.state.get(shard.part, {}).items():
                if key == "step":
                    moments.steps = int(value)
                else:
                    moments.tensors.setdefault(key, {})[name] = shard.whole(value)
        return moments

    def empty_moments(self, names: list[str]) -> Moments:
        """Return moments with memory laid out like the parameters, for a checkpoint to be read into."""
        return Moments(
            0,
            {
                moment: {name: shard.whole(torch.empty_like(shard.part)) for name, shard in self.shards.items()}
                for moment in names
            },
        )

    def restore(self, moments: Moments) -> None:
        """Put the optimizer's state back."""
        for name, shard in self.shards.items():
            tensors = {key: local(named[name]) for key, named in moments.tensors.items()}
            step = torch.tensor(float(moments.steps), device=shard.part.device)
            self.optimizer.state[shard.part] = {"step": step, **tensors} if moments.steps else {}
