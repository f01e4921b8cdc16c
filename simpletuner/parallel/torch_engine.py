"""The engine around a torch model; how gradients are reduced and cast is passed in by fsdp2.py and ddp.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ShardUpdate = Callable[[str, Tensor], None]
"""(name, shard) -> None: writes into this rank's shard of a weight, in place."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of the model (a DTensor under FSDP2), and this rank's shard of it, in the same memory.

    The optimizer works on plain shards: over DTensors the same fused AdamW and clipping pass through torch's sharding
    rules at every step, which takes several times as long (`benchmarks/sharded_update.py`).
    """

    parameter: nn.Parameter
    shard: nn.Parameter


def sharded_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, ShardedParameter]:
    """Return those parameters that are trainable by name."""

    def with_shard(parameter: nn.Parameter) -> ShardedParameter:
        is_sharded = isinstance(parameter, DTensor)
        shard = nn.Parameter(local_tensor(parameter.detach())) if is_sharded else parameter
        return ShardedParameter(parameter, shard)

    return {name: with_shard(each) for name, each in parameters if each.requires_grad}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: of a DTensor sharded on dim 0 its rows, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TorchEngine:
    """An Engine whose weights are DTensors of the model, or whole on each rank.

    With an `adapter`, its parameters by the names of checkpoints are all that is trained, averaged and saved.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        mesh: Mesh,
        make_optimizer: MakeOptimizer,
        micro_batch: Callable[[bool], AbstractContextManager[None]],
        inference: Callable[[], AbstractContextManager[None]],
        adapter: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.model, self.module, self.mesh = model, module, mesh
        self.micro_batch, self.inference = micro_batch, inference
        self.parameters = sharded_parameters(adapter.items() if adapter is not None else module.named_parameters())
        self.weights: dict[str, Tensor] = (
            module.state_dict() if adapter is None else {name: each.detach() for name, each in adapter.items()}
        )
        self.is_sharded = any(isinstance(weight, DTensor) for weight in self.weights.values())
        self.num_parameters = sum(map(Tensor.numel, module.parameters() if adapter is None else adapter.values()))
        self.optimizer = make_optimizer([each.shard for each in self.parameters.values()])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        for each in self.parameters.values():
            each.shard.grad = local_tensor(each.parameter.grad) if each.parameter.grad is not None else None
        shards = [each.shard for each in self.parameters.values() if each.shard.grad is not None]
        grad_norm = self.global_norm([shard.grad for shard in shards if shard.grad is not None])
        if max_grad_norm > 0:
            self.clip(shards, max_grad_norm, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for each in self.parameters.values():
            each.parameter.grad = each.shard.grad = None
        return grad_norm

    def clip(self, shards: list[nn.Parameter], max_grad_norm: float, grad_norm: Tensor) -> None:
        nn.utils.clip_grads_with_norm_(shards, max_grad_norm, grad_norm)

    def global_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the L2 norm over all parameters, float32, shape (). Collective where they are sharded."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)))
        # squares of shards add up; replicas hold equal gradients, which DDP has averaged already
        return self.mesh.sum_over_shards(norm.square()).sqrt() if self.is_sharded else norm

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, local_tensor(weight)

    @torch.no_grad()
    def update_shards(self, change: ShardUpdate) -> None:
        for name, shard in self.local_shards():
            change(name, shard)

    def to_checkpoint(self, name: str, shard: Tensor) -> Tensor:
        weight = self.weights[name]
        if not isinstance(weight, DTensor):
            return shard
        mesh, shape, stride = self.mesh.shard_mesh(shard.device.type), weight.shape, weight.stride()
        return DTensor.from_local(shard, mesh, weight.placements, run_check=False, shape=shape, stride=stride)

    def from_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        return local_tensor(tensor)

    def optimizer_state(self) -> OptimizerState:
        states = [self.optimizer.state.get(each.shard, {}) for each in self.parameters.values()]
        steps = {int(state["step"]) for state in states if state}
        names = {name for state in states for name in state if name != "step"}
        return OptimizerState(max(steps, default=0), {name: partial(self._moment, name) for name in sorted(names)})

    def _moment(self, moment: str) -> NamedTensors:
        """Return one moment in the checkpoint layout."""
        return {name: self.to_checkpoint(name, self.moment(each, moment)) for name, each in self.parameters.items()}

    def moment(self, each: ShardedParameter, name: str) -> Tensor:
        """Return this rank's shard of a moment, in float32; zero for a parameter that never had a gradient."""
        shard = self.optimizer.state.get(each.shard, {}).get(name)
        return torch.zeros_like(each.shard.detach()) if shard is None else shard

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        if not steps:
            return
        moments = list(moments)
        for each in self.parameters.values():
            self.start_optimizer(each.shard, steps, moments)
        for moment in moments:
            read(moment, tensors := self._moment(moment))
            self.put_back(moment, tensors)

    def start_optimizer(self, shard: nn.Parameter, steps: int, moments: Iterable[str]) -> None:
        """Make the state of a shard after some steps, with moments of any value."""
        step = torch.tensor(float(steps), device=shard.device)
        self.optimizer.state[shard] = {"step": step, **{each: torch.empty_like(shard.detach()) for each in moments}}

    def put_back(self, moment: str, tensors: NamedTensors) -> None:
        """Take over what was read into the tensors of a moment; here they are the optimizer's own memory."""

    def close(self) -> None:
        pass  # memory goes with the process, and nothing lies on a disk
