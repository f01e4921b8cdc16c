"""The Strategy around a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simpletuner.deepspeed.partitions import Fragments, make_moments, moments_of, steps_taken
from simpletuner.deepspeed.row_shards import Interval, Rows
from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState
from simpletuner.parallel.torch_engine import ShardUpdate, local_tensor


class DeepSpeedEngine:
    """ZeRO at any stage; `fixed` are frozen parameters (rows of their float32 values) and buffers, which no optimizer
    has; `masters` is where the float32 masters lie."""

    def __init__(
        self,
        engine: Any,
        fragments: Fragments,
        rows: Rows,
        fixed: Mapping[str, Tensor],
        masters: torch.device,
        close: Callable[[], None],
    ) -> None:
        self.model, self.module, self.optimizer = engine, engine.module, engine.optimizer
        self.fragments, self.rows, self.fixed, self.masters, self.close = fragments, rows, fixed, masters, close
        self.intervals = intervals_of_all(fragments, [name for name, _ in fragments.pieces()])
        self.num_parameters = sum(shape.numel() for shape in rows.shapes.values())

    @property
    def micro_batch(self) -> Callable[[bool], AbstractContextManager[None]]:
        """Return what tells DeepSpeed whether gradients are to be complete after this micro-batch."""
        return self._micro_batch

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(last)
        yield

    @property
    def inference(self) -> Callable[[], AbstractContextManager[None]]:
        """Return nothing special: weights are gathered by hooks on the module, and freed by them."""
        return nullcontext

    def backward(self, loss: Tensor) -> None:
        """Add gradients; the loss is divided by the number of passes already."""
        self.model.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip by the global norm, step, clear; return the norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.clip_grad = max_grad_norm
        self.model.step()
        norm = self.model.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.model.device)

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's slice of every master, and what no optimizer has."""
        yield from self.fragments.pieces()
        for name, tensor in self.fixed.items():
            yield name, local_tensor(tensor)

    def update_shards(self, change: ShardUpdate) -> None:
        """Let `change` write into them; the working weights follow."""
        self.fragments.rewrite(change)
        for name, tensor in self.fixed.items():
            change(name, local_tensor(tensor))

    def to_checkpoint(self, name: str, part: Tensor) -> Tensor:
        """Return a slice as rows, in memory of their own."""
        if name in self.fixed:
            return self.rows.of(name, part.flatten()) if isinstance(self.fixed[name], DTensor) else part
        return self.rows.from_part(name, part, self.intervals[name])

    def from_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's slice of rows."""
        if name in self.fixed:
            return local_tensor(tensor)
        assert isinstance(tensor, DTensor)
        return self.rows.to_part(name, tensor, self.intervals[name])

    def optimizer_state(self) -> OptimizerState:
        """Return the optimizer's state."""
        names = moments_of(self.optimizer)
        return OptimizerState(steps_taken(self.optimizer), {name: partial(self._moment, name) for name in names})

    def _moment(self, moment: str) -> NamedTensors:
        return {name: self.to_checkpoint(name, piece) for name, piece in self.fragments.pieces(moment)}

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        """Put the optimizer's state back: `read` fills the rows of a moment, which are cut into slices."""
        if not steps:
            return
        make_moments(self.optimizer, self.fragments, steps, moments)
        for moment in moments:
            rows = {name: self.rows.empty(name, self.masters) for name in self.intervals}
            read(moment, rows)
            self.take_over(rows, moment)

    def take_over(self, rows: NamedTensors, moment: str = "") -> None:
        """Write rows of a moment, or of the masters, into the slices that hold them."""

        def change(name: str, piece: Tensor) -> None:
            """Write one slice."""
            piece.copy_(self.from_checkpoint(name, rows[name]))

        self.fragments.rewrite(change, moment)


def intervals_of_all(fragments: Fragments, names: list[str]) -> dict[str, list[Interval]]:
    """Return for every parameter which elements each rank has. All ranks take part."""
    mine = [fragments.interval(name) for name in names]
    gathered: list[list[Interval]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return {name: [intervals[number] for intervals in gathered] for number, name in enumerate(names)}


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
