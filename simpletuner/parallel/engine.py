"""The Engine protocol: all that differs between one GPU, DDP, FSDP2 and DeepSpeed ZeRO.

Checkpoints, EMA and validation are built on it, so they work with every engine. A weight has two forms: the
shard that an engine keeps of it in float32, cut as the engine likes (rows under FSDP2, a slice of a flat
buffer under ZeRO), in which EMA follows it at each step without communication; and the checkpoint layout,
which is the same for all engines: the whole tensor, or a DTensor sharded on dim 0. So no engine needs a
checkpoint format of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState
from simpletuner.parallel.torch_engine import ShardUpdate
from simpletuner.settings.declared.sections import Settings


class Engine(Protocol):
    """A denoiser and its optimizer on this rank."""

    @property
    def model(self) -> nn.Module:
        """Module that a training step calls: the denoiser, or a wrapper such as DistributedDataParallel."""
        ...

    @property
    def module(self) -> nn.Module:
        """Denoiser with its own parameter names. Calling it is collective, since shards are gathered."""
        ...

    @property
    def num_parameters(self) -> int:
        """Number of parameters, over all ranks."""
        ...

    before_update: list[Callable[[], None]]
    """Called before weights change, in `step`, backward or `update_shards`, to finish reads of them first: by
    the EMA, and by a checkpoint that is copied."""

    @property
    def saves_views(self) -> bool:
        """True if checkpoint tensors are views of memory that changes only after `before_update` calls."""
        ...

    @property
    def micro_batch(self) -> Callable[[bool], AbstractContextManager[None]]:
        """(is_last) -> context of forward and backward of one micro-batch; the last one reduces gradients."""
        ...

    @property
    def inference(self) -> Callable[[], AbstractContextManager[None]]:
        """Context of calls of `module` outside training."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one micro-batch."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the step whose gradients follow."""
        ...

    def step(self, max_grad_norm: float) -> Tensor:
        """Clip (0: do not clip), update the weights, clear the gradients. Collective.

        Returns the gradient norm over all parameters and ranks before clipping, shape ().
        """
        ...

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, shard): this rank's float32 shard of every weight, of any shape, empty where it has
        none.

        A shard in host memory is valid until the next one is asked for: an engine may have to fetch it from a
        disk.
        """
        ...

    def update_shards(self, change: ShardUpdate) -> None:
        """Call `change(name, shard)` on local shards, then refresh the compute-dtype weights. Collective."""
        ...

    def to_checkpoint(self, name: str, shard: Tensor, /) -> Tensor:
        """Convert a local shard, or a tensor of its shape, to the checkpoint layout. Collective.

        Returns the whole tensor, or a DTensor sharded on dim 0 on the shard's device. May share memory with
        `shard`.
        """
        ...

    def from_checkpoint(self, name: str, tensor: Tensor, /) -> Tensor:
        """Invert `to_checkpoint`. Collective."""
        ...

    def moments(self) -> list[str]:
        """Return the names of what the optimizer keeps of each weight, or of some of them."""
        ...

    def optimizer_state(self) -> OptimizerState: ...

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        """Restore `optimizer_state`: `read(moment, tensors)` fills the tensors in place. Collective."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Put the weights of `local_shards` into the denoiser within the block, if it trains others."""
        ...

    def close(self) -> None:
        """Release what would outlive the engine in this process or on its disks."""
        ...


@contextmanager
def evaluation(engine: Engine) -> Iterator[nn.Module]:
    """Yield the denoiser for calls outside training: without gradients and dropout."""
    # Without dropout, as a LoRA may have: images and held-out losses are compared between steps.
    engine.module.eval()
    try:
        with torch.no_grad(), engine.averaged(), engine.inference():
            yield engine.module
    finally:
        engine.module.train()


def compute_dtype(settings: Settings) -> torch.dtype:
    return torch.bfloat16 if settings.training.mixed_precision == "bf16" else torch.float32


def warn_of_slow_dtype(settings: Settings, device: torch.device) -> str:
    """Warning of bf16 on a CPU that has no instructions for it; empty elsewhere."""
    # A step of the tiny SDXL at 64 px takes 6 times as long there; with AVX-512 oneDNN has kernels for bf16.
    if device.type != "cpu" or compute_dtype(settings) != torch.bfloat16:
        return ""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return ""
    return (
        "this CPU has no instructions for bf16 (AVX2 alone), so that steps may take six times as long as in float32: "
        "set mixed_precision=no"
    )
