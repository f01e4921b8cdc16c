"""What the loop asks of an engine, and the one place that chooses and wraps.

These questions, because they are all that differ between one rank, data-parallel, FSDP2 and ZeRO: what to call, when to
reduce gradients, how to go backward, how to update, and what the named state is. That has two forms: the slices that an
engine keeps of its float32 weights, in which EMA follows them at each step, and the one form that checkpoints hold.
Checkpoints, EMA and validation are built on these and on `module`, so they work with every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState
from simpletuner.parallel.torch_engine import ShardUpdate
from simpletuner.settings.sections import Settings


class Engine(Protocol):
    """One engine around one denoiser and its optimizer."""

    @property
    def model(self) -> nn.Module:
        """What a training step calls."""
        ...

    @property
    def module(self) -> nn.Module:
        """The denoiser itself, with its own parameter names; drawing calls it, on all ranks together."""
        ...

    @property
    def micro_batch(self) -> Callable[[bool], AbstractContextManager[None]]:
        """What surrounds forward and backward of one micro-batch; gradients are reduced if it is the last."""
        ...

    @property
    def inference(self) -> Callable[[], AbstractContextManager[None]]:
        """What surrounds calls of `module` outside training."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""
        ...

    def step(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip (0: do not), step, clear the gradients; return the global gradient norm before clipping."""
        ...

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters, over all ranks."""
        ...

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every weight by name, parameters in float32; it is valid until the next one is
        asked for, since an engine may have to fetch it."""
        ...

    def update_shards(self, change: ShardUpdate) -> None:
        """Let `change` write into each of those parts; the weights that compute follow. All ranks take part."""
        ...

    def to_checkpoint(self, name: str, part: Tensor) -> Tensor:
        """Return a weight's part, or a tensor of its layout, as checkpoints hold it: sharded by rows over the ranks, as
        a DTensor on the part's device, or whole. All ranks take part."""
        ...

    def from_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of what `to_checkpoint` returned. All ranks take part."""
        ...

    def optimizer_state(self) -> OptimizerState:
        """Return the optimizer's state by moment and parameter name, as checkpoints hold it."""
        ...

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        """Put back what `optimizer_state` returned, in this run or another: `read` fills the tensors of one moment."""
        ...

    def close(self) -> None:
        """Give back what the process and its disks would keep."""
        ...


def compute_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype of activations."""
    return torch.bfloat16 if settings.training.mixed_precision == "bf16" else torch.float32
