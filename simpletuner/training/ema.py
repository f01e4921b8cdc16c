"""Exponential moving average (EMA) of the weights, in float32, sharded as the engine shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simpletuner.parallel.engine import Engine
from simpletuner.parallel.host_buffer import HostBuffer
from simpletuner.parallel.optimizer_state import NamedTensors, Read
from simpletuner.private_api import of_torch
from simpletuner.settings.declared.sections import Ema, Validation
from simpletuner.system.processes.threads import in_daemon

VARIANTS = {"none": ("trained",), "ema_only": ("ema",), "comparison": ("trained", "ema")}
"""Sets of weights to evaluate, by the setting ema_validation."""


# Of the weights that one launch of kernels averages: a conversion by the engine holds as much.
GROUP_BYTES = 256 << 20


class EMA:
    """This rank's shard of each averaged weight by name, of the shape that `Engine.local_shards` yields.

    An update needs no communication, since the shards are cut like the weights themselves. An average in host
    memory of weights on a GPU is updated while the next step computes: the engine calls `wait_for_copy`
    before weights change.
    """

    def __init__(self, engine: Engine, settings: Ema) -> None:
        self.engine, self.settings, self.updates = engine, settings, 0
        # Always float32: with decay 0.9999 an update moves the average by 1e-4 of the difference, which bf16
        # rounds away.
        on_gpu, self.shards = False, {}
        for name, shard in engine.local_shards():
            if shard.is_floating_point():
                on_gpu = on_gpu or shard.is_cuda
                device = "cpu" if settings.ema_device == "cpu" else None
                self.shards[name] = shard.detach().to(device, torch.float32, copy=True)
        is_delayed = on_gpu and settings.ema_device == "cpu"
        self.delayed = DelayedAverage(self.shards, torch.cuda.Stream()) if is_delayed else None
        engine.before_update.append(self.wait_for_copy)

    def decay(self) -> float:
        # A young average would remember its first weights.
        # The warm-up of tf.train.ExponentialMovingAverage(decay, num_updates).
        return min(self.settings.ema_decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the trained weights, if an update is due after this step."""
        if step % self.settings.ema_update_interval:
            return
        weight = 1 - self.decay()
        if self.delayed is not None:
            self.delayed.begin(self.engine.local_shards, weight)
        else:
            move_towards(self.shards, self.engine.local_shards(), weight)
        self.updates += 1

    def wait_for_copy(self) -> None:
        """Let the GPU change no weight before the last update has read it. Does not wait itself."""
        if self.delayed is not None:
            self.delayed.wait_for_copy()

    def finish(self) -> None:
        """Wait until the last update is in `shards`."""
        if self.delayed is not None:
            self.delayed.finish()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchange the trained weights for the average within the block. Collective."""
        self.finish()
        self.engine.update_shards(self._exchange)
        try:
            yield
        finally:
            self.engine.update_shards(self._exchange)

    def _exchange(self, name: str, shard: Tensor) -> None:
        if (average := self.shards.get(name)) is not None:
            # One weight at a time, so that exchanging all of them takes the memory of the largest shard.
            kept = average.clone()
            average.copy_(shard)
            shard.copy_(kept)

    def tensors(self) -> NamedTensors:
        """Return the average in the checkpoint layout. Collective."""
        self.finish()
        return {name: self.engine.to_checkpoint(name, average) for name, average in self.shards.items()}

    def restore(self, read: Read, updates: int) -> None:
        """Load an average: `read` fills tensors of the checkpoint layout in place. Collective."""
        tensors = self.tensors()
        read(tensors)
        for name, average in self.shards.items():
            average.copy_(self.engine.from_checkpoint(name, tensors[name]))
        self.updates = updates


def move_towards(averages: NamedTensors, shards: Iterable[tuple[str, Tensor]], weight: float) -> None:
    """Interpolate each average towards the shard of its name, in place; those on a GPU by groups."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, shard in shards:
        if (average := averages.get(name)) is not None:
            pairs.append((average, shard.to(average)))
            # A shard in host memory may be gone when the next one is asked for.
            if not shard.is_cuda or sum(each.nbytes for _, each in pairs) >= GROUP_BYTES:
                lerp(pairs, weight)
                pairs = []
    lerp(pairs, weight)


def lerp(pairs: list[tuple[Tensor, Tensor]], weight: float) -> None:
    if pairs:
        averages, values = map(list, zip(*pairs, strict=True))
        of_torch.foreach_lerp_(averages, values, weight)


class DelayedAverage:
    """Updates averages in host memory, in a thread, from a copy that a GPU makes while it computes.

    The copy takes as much page-locked memory as the averages. Without a stream, on a CPU, it is made at once.
    """

    def __init__(self, averages: NamedTensors, stream: torch.cuda.Stream | None) -> None:
        self.averages, self.stream = averages, stream
        self.copies = HostBuffer(averages, page_locked=stream is not None).views
        self.copied: Any = None  # an event of torch.cuda, whose stubs disagree about its type
        self.running: Future[None] | None = None

    def begin(self, local_shards: Callable[[], Iterable[tuple[str, Tensor]]], weight: float) -> None:
        """Begin to copy the weights as they are after the kernels queued so far, and to average the copy."""
        self.finish()  # the last update reads the copies
        if self.stream is not None:
            # The copy starts after the optimizer's kernels, which are queued by now, and runs next to the
            # following forward pass on a stream of its own; `wait_for_copy` orders the next update of the
            # weights after it.
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # what an engine converts is allocated and freed here, too
            for name, shard in local_shards():
                if (copy := self.copies.get(name)) is not None:
                    copy.copy_(shard, non_blocking=True)
            if self.stream is not None:
                # one that sleeps, not `record_event()`, with which the thread would take a core until the step is over
                self.copied = torch.cuda.Event(blocking=True)
                self.copied.record()
        self.running = in_daemon(partial(self._average, self.copied, weight), "ema")

    @torch.no_grad()
    def _average(self, copied: Any, weight: float) -> None:
        if copied is not None and self.stream is not None:
            # A thread begins with device 0, on which every rank would make a context of 0.5 GB.
            with torch.cuda.device(self.stream.device):
                copied.synchronize()
        lerp([(average, self.copies[name]) for name, average in self.averages.items()], weight)

    def wait_for_copy(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def finish(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.result()


def evaluated_variants(ema: EMA | None, validation: Validation) -> tuple[str, ...]:
    """Return the sets of weights that validation images and held-out losses are made with."""
    return VARIANTS[validation.ema_validation] if ema is not None else ("trained",)


def weights_of(ema: EMA | None, variant: str) -> AbstractContextManager[None]:
    """Put a set of weights into the denoiser within the block. Collective."""
    return ema.swapped_in() if variant == "ema" and ema is not None else nullcontext()
