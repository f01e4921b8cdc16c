"""The engine for everything that torch itself trains; how gradients are reduced and cast is passed in.

The optimizer works on this rank's shards as plain tensors. Over DTensors the same fused AdamW and the same clipping
also pass through torch's sharding rules at every step, which `benchmarks/sharded_update.py` shows the price of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from simpletuner.parallel.module_stats import count_parameters
from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ShardUpdate = Callable[[str, Tensor], None]
"""What writes into this rank's part of a weight, given its name."""


@dataclass(frozen=True)
class Shard:
    """A parameter as the model has it, and this rank's part of it as the optimizer sees it, in the same memory."""

    parameter: nn.Parameter
    part: nn.Parameter


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Return every trainable parameter by name, with this rank's part of it."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {
        name: Shard(p, nn.Parameter(local_tensor(p.detach())) if isinstance(p, DTensor) else p) for name, p in named
    }


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TorchEngine:
    """An Engine around a torch model; `micro_batch` and `inference` are what replicated and sharded engines do
    differently."""

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        micro_batch: Callable[[bool], AbstractContextManager[None]],
        inference: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.module, self.micro_batch, self.inference = model, module, micro_batch, inference
        self.shards = shards_of(module)
        self.weights: dict[str, Tensor] = module.state_dict()
        sharded = [weight for weight in self.weights.values() if isinstance(weight, DTensor)]
        self.meshes: dict[str, DeviceMesh] = {weight.device.type: weight.device_mesh for weight in sharded[:1]}
        self.is_sharded = bool(sharded)
        self.optimizer = make_optimizer([shard.part for shard in self.shards.values()])

    def backward(self, loss: Tensor) -> None:
        """Add gradients."""
        loss.backward()

    @torch.no_grad()
    def step(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip by the global norm, step, clear; return the norm before clipping."""
        shards = self.shards.values()
        for shard in shards:
            shard.part.grad = local_tensor(shard.parameter.grad) if shard.parameter.grad is not None else None
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

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters, over all ranks."""
        return count_parameters(self.module)

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every weight by name: the live ones."""
        for name, weight in self.weights.items():
            yield name, local_tensor(weight)

    @torch.no_grad()
    def update_shards(self, change: ShardUpdate) -> None:
        """Let `change` write into this rank's part of every weight."""
        for name, part in self.local_shards():
            change(name, part)

    def to_checkpoint(self, name: str, part: Tensor) -> Tensor:
        """Return a tensor of the part's layout as what the weight is: a DTensor if that is sharded. No copy."""
        weight = self.weights[name]
        if not isinstance(weight, DTensor):
            return part
        kind, shape, stride = part.device.type, weight.shape, weight.stride()
        if kind not in self.meshes:
            self.meshes[kind] = init_device_mesh(kind, tuple(weight.device_mesh.shape))
        mesh = self.meshes[kind]
        return DTensor.from_local(part, mesh, weight.placements, run_check=False, shape=shape, stride=stride)

    def from_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of what `to_checkpoint` returned."""
        return local_tensor(tensor)

    def optimizer_state(self) -> OptimizerState:
        """Return the optimizer's state; the moments of a parameter that never had a gradient are zero."""
        states = [self.optimizer.state.get(shard.part, {}) for shard in self.shards.values()]
        steps = {int(state["step"]) for state in states if state}
        names = {name for state in states for name in state if name != "step"}
        return OptimizerState(max(steps, default=0), {name: partial(self._moment, name) for name in sorted(names)})

    def _moment(self, moment: str) -> NamedTensors:
        tensors = {}
        for name, shard in self.shards.items():
            part = self.optimizer.state.get(shard.part, {}).get(moment)
            tensors[name] = self.to_checkpoint(name, torch.zeros_like(shard.part.detach()) if part is None else part)
        return tensors

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        """Put the optimizer's state back: `read` fills the tensors of a moment, in their place."""
        if not steps:
            return
        for shard in self.shards.values():
            step = torch.tensor(float(steps), device=shard.part.device)
            tensors = {moment: torch.empty_like(shard.part.detach()) for moment in moments}
            self.optimizer.state[shard.part] = {"step": step, **tensors}
        for moment in moments:
            read(moment, self._moment(moment))

    def close(self) -> None:
        """Hold nothing that needs to be given back."""
