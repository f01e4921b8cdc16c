"""Engine around a torch model; fsdp2.py and parallelize.py pass in how gradients are reduced and cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpletuner.parallel.mesh import SHARDS, Mesh, mesh_of
from simpletuner.parallel.optimizer_state import NamedTensors, NewMoments, OptimizerState, new_moments
from simpletuner.private_api import of_torch
from simpletuner.settings.declared.sections import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")

ShardUpdate = Callable[[str, Tensor], None]
"""(name, shard) -> None: writes into this rank's shard of a weight, in place."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of the model (a DTensor under FSDP2), and this rank's shard of it, in the same memory.

    The optimizer works on plain shards: over DTensors the same fused AdamW and clipping pass through torch's
    sharding rules at every step, which takes several times as long (`benchmarks/sharded_update.py`).
    """

    parameter: nn.Parameter
    shard: nn.Parameter

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """The ranks that share its rows; None where each holds all of them."""
        mesh = mesh_of(self.parameter)
        return None if mesh is None else mesh.get_group(SHARDS)


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a whole weight; one that stage 3 of ZeRO has partitioned has no elements itself."""
    return getattr(parameter, "ds_shape", parameter.shape)


MakeOptimizer = Callable[[Mapping[str, ShardedParameter]], torch.optim.Optimizer]


def sharded_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, ShardedParameter]:
    def with_shard(parameter: nn.Parameter) -> ShardedParameter:
        shard = parameter if mesh_of(parameter) is None else nn.Parameter(local_tensor(parameter.detach()))
        return ShardedParameter(parameter, shard)

    return {name: with_shard(each) for name, each in parameters if each.requires_grad}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: of a DTensor sharded on dim 0 its rows, else the tensor itself."""
    return tensor if mesh_of(tensor) is None else cast("DTensor", tensor).to_local()


def autocast(mesh: Mesh, dtype: torch.dtype) -> torch.autocast:
    """Autocast context for float32 weights computing in `dtype`; no-op for float32."""
    return torch.autocast(mesh.world.device.type, dtype, enabled=dtype != torch.float32)


class TorchEngine:
    """An Engine whose weights are DTensors of the model, or whole on each rank.

    With an `adapter`, its parameters by the names of checkpoints are all that is trained, averaged and saved.
    """

    updates_in_backward = False
    """True if each weight changes in the backward pass, as soon as its gradient is there."""
    saves_views = True
    clips_values = False
    """True if `max_grad_norm` limits each value of the gradients instead of their norm."""
    skips_weights = False
    """True if some steps have no gradient of some weights. These are stepped with zeros, as sharded engines and ZeRO
    step them: moments decay, and all weights have taken as many steps, which is what checkpoints say."""

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
        self.with_shards = [each for each in self.parameters.values() if each.shard is not each.parameter]
        # With a LoRA its matrices only: the base is read from the pipeline, not averaged and not saved.
        self.weights: dict[str, Tensor] = (
            module.state_dict() if adapter is None else {name: each.detach() for name, each in adapter.items()}
        )
        self.is_sharded = any(mesh_of(weight) is not None for weight in self.weights.values())
        self.num_parameters = sum(map(Tensor.numel, module.parameters() if adapter is None else adapter.values()))
        self.optimizer = make_optimizer(self.parameters)
        self.released_norms: list[Tensor] = []
        self.before_update: list[Callable[[], None]] = []

    def backward(self, loss: Tensor) -> None:
        if self.updates_in_backward:
            self.finish_reads()
        loss.backward()

    def finish_reads(self) -> None:
        for finish in self.before_update:
            finish()

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> Tensor:
        self.finish_reads()
        if self.skips_weights and not self.updates_in_backward:
            for each in self.parameters.values():
                if each.parameter.grad is None:
                    each.parameter.grad = torch.zeros_like(each.parameter)
        for each in self.with_shards:
            # At each step: gradients are freed after it (None), so the next backward pass allocates others.
            each.shard.grad = local_tensor(each.parameter.grad) if each.parameter.grad is not None else None
        shards = [each.shard for each in self.parameters.values()]
        gradients = [gradient for shard in shards if (gradient := shard.grad) is not None]
        # In float32: sums of bf16 squares lose small gradients. One launch for all parameters.
        norms = of_torch.foreach_norm(gradients, dtype=torch.float32) if gradients else []
        grad_norm = self.global_norm([*norms, *self.released_norms])
        self.released_norms.clear()
        if max_grad_norm > 0:
            self.clip(shards, max_grad_norm, grad_norm)
        self.optimizer.step()
        for each in self.parameters.values():
            each.parameter.grad = None
        for each in self.with_shards:
            each.shard.grad = None
        return grad_norm

    def clip(self, shards: list[nn.Parameter], max_grad_norm: float, grad_norm: Tensor) -> None:
        if self.clips_values:
            nn.utils.clip_grad_value_(shards, max_grad_norm)
        else:
            self.scale_to_norm(shards, max_grad_norm, grad_norm)

    def scale_to_norm(self, shards: list[nn.Parameter], max_grad_norm: float, grad_norm: Tensor) -> None:
        # Not clip_grad_norm_, which would compute the norm of this rank's shards alone.
        nn.utils.clip_grads_with_norm_(shards, max_grad_norm, grad_norm)

    def step_as(self, settings: Optimizer) -> None:
        """Clip, and keep gradients until `step` or not, as the settings say."""
        self.clips_values = settings.grad_clip_method == "value"
        if settings.optimizer_release_gradients:
            self.release_gradients()

    def release_gradients(self) -> None:
        """Step each weight in the backward pass as soon as its gradient exists, and free the gradient."""
        self.updates_in_backward = True
        for each in self.parameters.values():
            each.parameter.register_post_accumulate_grad_hook(partial(self._step_alone, each))

    @torch.no_grad()
    def _step_alone(self, each: ShardedParameter, _: Tensor) -> None:
        """Step one parameter; FSDP2 calls this when a unit's gradients are reduced, else autograd."""
        assert each.parameter.grad is not None
        each.shard.grad = local_tensor(each.parameter.grad)
        self.released_norms.append(torch.linalg.vector_norm(each.shard.grad, dtype=torch.float32))
        groups = self.optimizer.param_groups
        # A step visits all parameters of its groups: with 1,000 of them, a million visits per step.
        self.optimizer.param_groups = [{**groups[0], "params": [each.shard]}]
        self.optimizer.step()
        self.optimizer.param_groups = groups
        each.parameter.grad = each.shard.grad = None

    def global_norm(self, norms: list[Tensor]) -> Tensor:
        """Return the L2 norm over all parameters, float32, shape (). Collective where they are sharded."""
        norm = torch.linalg.vector_norm(torch.stack(norms))
        # squares of shards add up; replicas hold equal gradients, which DDP has averaged already
        return self.mesh.sum_over_shards(norm.square()).sqrt() if self.is_sharded else norm

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, local_tensor(weight)

    @torch.no_grad()
    def update_shards(self, change: ShardUpdate) -> None:
        self.finish_reads()
        for name, shard in self.local_shards():
            change(name, shard)

    def to_checkpoint(self, name: str, shard: Tensor) -> Tensor:
        weight = self.weights[name]
        if mesh_of(weight) is None:
            return shard
        from torch.distributed.tensor import DTensor  # which the sharded weights have imported

        # EMA and moments may be in host memory with the weight on a GPU, so the shard's device has the mesh.
        mesh, shape = self.mesh.shard_mesh(shard.device.type), torch.Size((len(weight), *shard.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            shard, mesh, cast("DTensor", weight).placements, run_check=False, shape=shape, stride=stride
        )

    def from_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        return local_tensor(tensor)

    def optimizer_state(self) -> OptimizerState:
        steps = max((int(state["step"]) for state in self.optimizer.state.values() if state), default=0)
        return OptimizerState(steps, {name: partial(self._moment, name) for name in self.moments() if steps})

    def moments(self) -> list[str]:
        return sorted({name for each in self.parameters.values() for name in self.new_moments(each.shard)})

    def new_moments(self, shard: nn.Parameter) -> NewMoments:
        return new_moments(self.optimizer, shard)

    def _moment(self, moment: str) -> NamedTensors:
        """Return one moment in the checkpoint layout, of those parameters that have it."""
        shards = ((name, self.moment(each, moment)) for name, each in self.parameters.items())
        return {
            name: self.to_checkpoint(name, shard) if shard.dim() == self.weights[name].dim() else shard
            for name, shard in shards
            if shard is not None
        }

    def moment(self, each: ShardedParameter, name: str) -> Tensor | None:
        """Return this rank's shard of a moment; a new one for a parameter that never had a gradient, and None
        for one that has no such moment."""
        shard = self.optimizer.state.get(each.shard, {}).get(name)
        # An unused parameter never gets a gradient, hence no state; checkpoints have moments of all weights,
        # so that those of every engine have the same names.
        if shard is None and (new := self.new_moments(each.shard).get(name)):
            return new()
        return shard

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        # A checkpoint of step 0 has no moments, and an optimizer without state makes it at its first step.
        if not steps:
            return
        for group in self.optimizer.param_groups:
            for shard in group["params"]:
                # As the optimizer makes it: fused kernels read it on the device; all others would wait for
                # the device at each weight and step.
                self.start_optimizer(shard, steps, shard.device if group.get("fused") else CPU)
        for moment in moments:
            read(moment, tensors := self._moment(moment))
            self.put_back(moment, tensors)

    def start_optimizer(self, shard: nn.Parameter, steps: int, step_on: torch.device) -> None:
        """Make the state of a shard after some steps, which `step_on` holds; its moments are to be read."""
        step = torch.tensor(float(steps), device=step_on)
        self.optimizer.state[shard] = {"step": step, **{name: new() for name, new in self.new_moments(shard).items()}}

    def put_back(self, moment: str, tensors: NamedTensors) -> None:
        """Take over what was read into the tensors of a moment."""
        # Nothing to do: `_moment` returned views of the optimizer's own memory, which `read` has filled. An
        # engine whose moments are converted (split_engine.py) writes the float32 values back here.

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass  # memory goes with the process, and nothing lies on a disk
