"""Memory and work of a training step, counted on fake tensors: shapes, dtypes and lifetimes, but no numbers.

All operations of eager torch run, so recomputation, saved tensors and temporaries are those of the real step.
A denoiser with 12 billion parameters takes seconds and no memory.

Of equal blocks one runs (block_replay.py): of the 57 of FLUX two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_counter import ATTENTION, Execution, MemoryCounter, StepCounter
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.streams import take_streams
from simpletuner.models.family.vae import has_alpha, takes_frames
from simpletuner.private_api.of_torch import META, FakeTensor, FakeTensorMode, run_backward
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from simpletuner.counting.block_replay import EqualBlocks

CPU = torch.device("cpu")
NUMBERS = ("kept_bytes", "host_bytes", "product_flops", "attention_flops", "other_bytes", "launches")


@dataclass(frozen=True)
class StepTrace:
    """Forward and backward of one micro-batch on one device."""

    samples: int
    kept_bytes: int
    """Bytes held for the backward pass when the forward pass ends, weights excluded."""
    host_bytes: int
    """The same in the machine's memory, where activations are offloaded."""
    backward_points: tuple[tuple[int, float], ...]
    """(bytes of activations at most since the last point, fraction of all gradients that exist by then)."""
    product_flops: int
    """FLOPs of products and convolutions, recomputation included."""
    attention_flops: int
    other_bytes: int
    """Read and written by all other operators, each of which passes through the device's memory."""
    launches: int
    released: tuple[str, ...] = ()
    """The parameters in the order of `backward_points`, each of which is before one's gradient."""

    @classmethod
    def from_json(cls, value: Any) -> StepTrace:
        """Read what asdict() made, through JSON. Raises TypeError or LookupError for anything else."""
        points = tuple((live, share) for live, share in value["backward_points"])
        return cls(**{**value, "backward_points": points, "released": tuple(value["released"])})

    def peak(
        self, gradient_bytes: float, are_kept: bool = False, gathered: Iterable[float] = ()
    ) -> tuple[float, float, float]:
        """Return the bytes of activations, of gradients, and of what is `gathered` at each point, when all
        together are most.

        `gradient_bytes` are those of all gradients at the end; they are there from the start where
        micro-batches before this one have left theirs (`are_kept`).
        """
        points = zip(self.backward_points, chain(gathered, repeat(0.0)), strict=False)
        return max(((live, gradient_bytes * (are_kept or exist), more) for (live, exist), more in points), key=sum)

    def peak_bytes(self, gradient_bytes: float) -> float:
        return sum(self.peak(gradient_bytes))

    def scaled(self, samples: int, other: StepTrace) -> StepTrace:
        """Return the trace of another number of samples, on the line through this trace and another."""
        return replace(self.towards(other, (samples - self.samples) / (other.samples - self.samples)), samples=samples)

    def towards(self, other: StepTrace, share: float) -> StepTrace:
        """Interpolate linearly between this trace (share 0) and another (1), or extrapolate."""

        def line(ours: float, theirs: float) -> int:
            return round(ours + (theirs - ours) * share)

        both = zip(self.backward_points, other.backward_points, strict=True)
        points = tuple((line(mine, its), fraction) for (mine, fraction), (its, _) in both)
        numbers = {name: line(getattr(self, name), getattr(other, name)) for name in NUMBERS}
        return replace(self, backward_points=points, **numbers)


def with_fake_parameters(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace parameters, cast to `dtype`, and buffers of a model on the meta device by fake ones."""

    # to_empty() would do so, too, but converting each meta tensor takes longer than tracing a step; and of
    # torch.empty() and nn.Parameter() a fake mode makes 6,700 operators for SDXL's 1,680 weights, 0.15 CPU s
    def fake(each: Tensor) -> FakeTensor:
        return FakeTensor(mode, torch.empty(each.shape, dtype=dtype or each.dtype, device=META), CPU)

    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None:
                made: Any = fake(each).requires_grad_(each.requires_grad)
                made._is_param = True  # as nn.Parameter does
                module._parameters[name] = made
        for name, each in module._buffers.items():
            if each is not None:
                module._buffers[name] = fake(each)
    return model


def trace_step(
    family: ModelFamily,
    model: nn.Module,
    mode: FakeTensorMode,
    shapes: Mapping[str, tuple[int, ...]],
    samples: int,
    execution: Execution,
    equal: EqualBlocks | None = None,
    learns: bool = False,
) -> StepTrace:
    """Trace a model with fake parameters; `shapes` are those of the inputs of one sample.

    Of `equal` blocks one runs. `learns` where blocks keep nothing in their first forward pass
    (`SelectiveRecomputation`).
    """
    with mode:
        inputs = {name: torch.empty(samples, *shape) for name, shape in shapes.items() if "mask" not in name}
        timesteps, anchor = torch.empty(samples), torch.empty((), requires_grad=True)
        noised = {name: each.to(execution.dtype) for name, each in take_streams(inputs).items()}
    # Masks are real: their sums are lengths, which become shapes.
    masks = {name: torch.ones(samples, *shape, dtype=torch.long) for name, shape in shapes.items() if "mask" in name}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    present = [*model.parameters(), *model.buffers(), anchor, *noised.values(), *inputs.values()]
    counter = StepCounter.of(execution, iter(present))
    if learns and not equal:
        with counter.casts(), counter.forward():
            family.predict_streams(model, noised, timesteps, inputs | masks)
    blocks = nullcontext()
    if equal:
        from simpletuner.counting.block_replay import BlockReplays  # a start whose counts are kept does without

        blocks = BlockReplays(counter, anchor, learns).replaced(model, equal)
    with counter.counting(), counter.gradients_released(trained), blocks:
        with counter.forward():
            prediction = family.predict_streams(model, noised, timesteps, inputs | masks)
        first, *others = (each.float().square().mean() for each in prediction.values())
        loss = sum(others, first)
        kept, on_host = counter.memory.live, counter.memory.on_host
        run_backward(loss)
        last = counter.memory.restart_peak()
    total, ends = sum(each.numel() for each in trained.values()), [0]
    for name in counter.released:
        ends.append(ends[-1] + trained[name].numel())
    points = [(peak, end / total) for peak, end in zip(counter.peaks, ends, strict=False)]
    work = counter.memory.work
    attention = sum(work.flops[each] for each in ATTENTION)
    return StepTrace(
        samples,
        kept,
        on_host,
        (*points, (last, 1.0)),
        work.flops.total() - attention,
        attention,
        work.moved,
        work.launches,
        tuple(counter.released),
    )


@torch.no_grad()
def trace_vae(model: nn.Module, dtype: torch.dtype, shape: Shape, samples: int, decodes: bool) -> int:
    """Most bytes, weights included, that a VAE on the meta device takes for samples of a shape in px."""
    mode = RememberingMode()
    parameters = list(with_fake_parameters(model, mode, dtype).parameters())
    vae: Any = model
    has_frames = takes_frames(vae)
    with mode:
        channels = 4 if has_alpha(vae.config) else 3
        images = torch.empty(samples, channels, *(shape if has_frames else shape.axes), dtype=dtype)
    encoded = vae.encode(images)
    latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    memory = MemoryCounter()
    memory.exclude(iter([*parameters, *model.buffers(), latents, images]))
    del encoded
    with memory:
        vae.decode(latents) if decodes else vae.encode(images)
    return memory.peak + sum(each.numel() * each.element_size() for each in parameters)
