"""The torch engine of state_layout=split and bf16: bf16 weights, perhaps with what they lack of float32,
and 8-bit moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.precision.split_adamw import SplitAdamW, join_float32, write_float32
from simpletuner.parallel.torch_engine import ShardedParameter, ShardUpdate, TorchEngine, local_tensor

# Float32 weights that are read at once, over all ranks, before they are split.
LOAD_BYTES = 2**30


def hold_in_bf16(model: nn.Module) -> None:
    """Make parameters on the meta device bf16; buffers, such as rotary tables, keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def load_split(model: nn.Module, load_weights: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    """Read float32 weights into a bf16 model; return this rank's shard of the remainders. Collective."""
    remainders: dict[str, Tensor] = {}
    for weights in groups_of_bytes(model.state_dict(), LOAD_BYTES):
        held = {name: weight for name, weight in weights.items() if weight.dtype == torch.bfloat16}
        exact = {name: torch.empty_like(weight, dtype=torch.float32) for name, weight in held.items()}
        load_weights(weights | exact)
        for name, weight in held.items():
            remainders[name] = torch.empty_like(local_tensor(weight), dtype=torch.int16)
            write_float32(local_tensor(exact[name]), local_tensor(weight), remainders[name])
    return remainders


def groups_of_bytes(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in groups of so many float32 bytes, or one larger tensor; equal on all ranks."""
    group: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if group and 4 * sum(each.numel() for each in [*group.values(), tensor]) > limit:
            yield group
            group = {}
        group[name] = tensor
    if group:
        yield group


class SplitEngine(TorchEngine):
    """A TorchEngine over bf16 weights. What it gives to checkpoints are float32 copies in host memory."""

    optimizer: SplitAdamW
    saves_views = False

    def __init__(self, remainders: dict[str, Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.remainders = remainders
        shards = {name: each.shard for name, each in self.parameters.items() if name in remainders}
        self.optimizer.remainders = {shard: remainders[name] for name, shard in shards.items()}

    def scale_to_norm(self, shards: list[nn.Parameter], max_grad_norm: float, grad_norm: Tensor) -> None:
        # as torch.nn.utils.clip_grads_with_norm_ scales them
        self.optimizer.gradient_scale = (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        for name, shard in super().local_shards():
            # Checkpoints and averages are float32, whatever the layout.
            yield name, join_float32(shard, self.remainders[name]) if name in self.remainders else shard.float()

    @torch.no_grad()
    def update_shards(self, change: ShardUpdate) -> None:
        for name, values in self.local_shards():
            change(name, values)
            shard = local_tensor(self.weights[name])
            if name in self.remainders:
                write_float32(values, shard, self.remainders[name])
            elif shard.data_ptr() != values.data_ptr():
                shard.copy_(values)

    def to_checkpoint(self, name: str, shard: Tensor) -> Tensor:
        return super().to_checkpoint(name, shard.cpu())

    def moment(self, each: ShardedParameter, name: str) -> Tensor | None:
        if not (state := self.optimizer.state.get(each.shard)):
            return super().moment(each, name)
        return state[name].read(0, each.shard.numel()).view_as(each.shard)

    def start_optimizer(self, shard: nn.Parameter, steps: int, step_on: torch.device) -> None:
        self.optimizer.start(shard, steps)

    def put_back(self, moment: str, tensors: NamedTensors) -> None:
        for name, each in self.parameters.items():
            values = local_tensor(tensors[name]).to(each.shard.device).view(-1)
            self.optimizer.state[each.shard][moment].write(0, values)
