"""Memory and work of a training step, counted on fake tensors: shapes, dtypes and lifetimes, but no numbers.

All operations of eager torch run, so recomputation, saved tensors and temporaries are those of the real step.
A denoiser with 12 billion parameters takes seconds and no memory.

A step with many equal blocks is extrapolated from traces with two or three of each kind: all quantities are
linear in the number of blocks. FLUX has 57 of two kinds, of which 14 are traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.counting.flops import CudaAutocast
from simpletuner.counting.memory_counter import ATTENTION, MemoryCounter
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.vae import has_alpha, takes_frames
from simpletuner.parallel.model.activations import CastParameter, HostMemory
from simpletuner.private_api.of_torch import FakeTensorMode, run_backward
from simpletuner.settings.values.shape import Shape


@dataclass(frozen=True)
class Execution:
    """Dtypes and places of a micro-batch's computation; `dtype` is the weights', or autocast's."""

    dtype: torch.dtype
    autocast: bool = False
    on_gpu: bool = False
    """Cast as CUDA's autocast does."""
    offloads: bool = False
    """Keep what the backward pass needs in the machine's memory."""
    key_value_copies: int = 1
    """See MemoryCounter."""


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
        names = ("kept_bytes", "host_bytes", "product_flops", "attention_flops", "other_bytes", "launches")
        numbers = {name: line(getattr(self, name), getattr(other, name)) for name in names}
        return replace(self, backward_points=points, **numbers)


class MetaMemory(HostMemory):
    """HostMemory that keeps no contents: only their bytes are counted."""

    def unpack(self, packed: tuple[torch.device, Tensor] | CastParameter) -> Tensor:
        if isinstance(packed, CastParameter) or not packed[1].is_meta:
            return super().unpack(packed)
        device, tensor = packed
        return torch.empty_like(tensor, device=device)


def with_fake_parameters(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace parameters, cast to `dtype`, and buffers of a model on the meta device by fake ones."""
    # to_empty() would do so, too, but converting each meta tensor takes longer than tracing a step
    with mode:
        for module in model.modules():
            for name, each in module._parameters.items():
                if each is not None:
                    made = torch.empty(each.shape, dtype=dtype or each.dtype)
                    module._parameters[name] = nn.Parameter(made, requires_grad=each.requires_grad)
            for name, each in module._buffers.items():
                if each is not None:
                    module._buffers[name] = torch.empty(each.shape, dtype=each.dtype)
    return model


def new_mode() -> FakeTensorMode:
    """Mode for fake tensors, among which real ones are taken as inputs, too: masks, and rotary tables."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace_step(
    family: ModelFamily,
    model: nn.Module,
    mode: FakeTensorMode,
    shapes: Mapping[str, tuple[int, ...]],
    samples: int,
    execution: Execution,
    learns: bool = False,
) -> StepTrace:
    """Trace a model with fake parameters; `shapes` are those of the inputs of one sample.

    `learns` where blocks keep nothing in their first forward pass (`SelectiveRecomputation`).
    """
    with mode:
        inputs = {name: torch.empty(samples, *shape) for name, shape in shapes.items() if "mask" not in name}
        timesteps = torch.empty(samples)
        latents = inputs.pop("latents").to(execution.dtype)
    # Masks are real: their sums are lengths, which become shapes.
    masks = {name: torch.ones(samples, *shape, dtype=torch.long) for name, shape in shapes.items() if "mask" in name}
    memory = MemoryCounter(key_value_copies=execution.key_value_copies)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    memory.exclude(iter([*model.parameters(), *model.buffers(), latents, *inputs.values()]))
    points: list[tuple[int, float]] = []
    released: list[str] = []

    def casts() -> AbstractContextManager[object]:
        return CudaAutocast() if execution.on_gpu else nullcontext()

    if learns:
        with casts(), torch.autocast("cpu", execution.dtype, enabled=execution.autocast):
            family.predict(model, latents, timesteps, inputs | masks)
    with memory, casts(), gradients_released(trained, memory, points, released):
        with torch.autocast("cpu", execution.dtype, enabled=execution.autocast):
            with MetaMemory("meta") if execution.offloads else nullcontext():
                prediction = family.predict(model, latents, timesteps, inputs | masks)
            loss = prediction.float().square().mean()
        kept, on_host = memory.live, memory.on_host
        run_backward(loss)
        points.append((memory.restart_peak(), 1.0))
    attention = sum(memory.flops[each] for each in ATTENTION)
    products = memory.flops.total() - attention
    work = (products, attention, memory.moved, memory.launches)
    return StepTrace(samples, kept, on_host, tuple(points), *work, tuple(released))


@contextmanager
def gradients_released(
    trained: Mapping[str, nn.Parameter],
    memory: MemoryCounter,
    points: list[tuple[int, float]],
    released: list[str],
) -> Iterator[None]:
    """Free each gradient when it is there, and note the peak before: engines decide how they are kept."""
    total, done = sum(each.numel() for each in trained.values()), 0

    def release(name: str, parameter: Tensor) -> None:
        nonlocal done
        points.append((memory.restart_peak(), done / total))
        released.append(name)
        done += parameter.numel()
        parameter.grad = None

    hooks = [each.register_post_accumulate_grad_hook(partial(release, name)) for name, each in trained.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def trace_vae(model: nn.Module, dtype: torch.dtype, shape: Shape, samples: int, decodes: bool) -> int:
    """Most bytes, weights included, that a VAE on the meta device takes for samples of a shape in px."""
    mode = new_mode()
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


SHORT = 2
"""Blocks of each kind: a first and a last one. A third is one between others."""
NUMBERS = ("kept_bytes", "host_bytes", "product_flops", "attention_flops", "other_bytes", "launches")


def equal_blocks(model: nn.Module) -> dict[str, int]:
    """Number of equal blocks by the name of their list; none where shorter lists would save little."""
    found = {name: len(blocks) for name, blocks in lists_of_equals(model).items()}
    kinds = len(found)
    traced = SHORT * kinds * (kinds + 1) + kinds
    return found if sum(found.values()) > 2 * traced and min(found.values()) > SHORT else {}


def lists_of_equals(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of equal blocks by their names. The last one of SD3 and of Qwen-Image has no use for the text."""
    lists = {name: child for name, child in model.named_children() if isinstance(child, nn.ModuleList)}
    return {name: blocks for name, blocks in lists.items() if len(set(map(signature, blocks))) == 1}


def signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, each.shape, each.requires_grad) for name, each in block.named_parameters())


@contextmanager
def shortened(model: nn.Module, counts: Mapping[str, int]) -> Iterator[None]:
    """Leave only so many of the first blocks in each list."""
    whole = {name: getattr(model, name) for name in counts}
    try:
        for name, count in counts.items():
            setattr(model, name, nn.ModuleList(list(whole[name])[:count]))
        yield
    finally:
        for name, blocks in whole.items():
            setattr(model, name, blocks)


def trace_by_kinds(model: nn.Module, counts: Mapping[str, int], trace: Callable[[], StepTrace]) -> StepTrace:
    """Trace of a model with all of its equal blocks; `trace` is called for the model with fewer of them."""
    sizes = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
    short = dict.fromkeys(counts, SHORT)
    with shortened(model, short):
        base = trace()
    longer = {}
    for kind in counts:
        with shortened(model, short | {kind: SHORT + 1}):
            longer[kind] = trace()
    return Lengthened(base, longer, counts, sizes).trace()


class Lengthened:
    """A trace of few blocks, and for each kind one with a block more."""

    def __init__(
        self, base: StepTrace, longer: Mapping[str, StepTrace], counts: Mapping[str, int], sizes: Mapping[str, int]
    ) -> None:
        self.base, self.longer, self.sizes = base, longer, sizes
        self.more = {kind: count - SHORT for kind, count in counts.items()}
        self.live = live_bytes(base)
        self.live_longer = {kind: live_bytes(trace) for kind, trace in longer.items()}
        self.block = re.compile(rf"({'|'.join(map(re.escape, counts))})\.(\d+)\.(.+)")

    def trace(self) -> StepTrace:
        numbers = {name: self.line(lambda trace, name=name: getattr(trace, name)) for name in NUMBERS}
        points, done, total = [], 0, sum(self.sizes.values())
        for name, live in self.releases():
            points.append((live, done / total))
            done += self.sizes[name]
        end = self.line(lambda trace: trace.backward_points[-1][0])
        order = tuple(name for name, _ in self.releases())
        return replace(self.base, backward_points=(*points, (end, 1.0)), released=order, **numbers)

    def line(self, number_of: Callable[[StepTrace], int]) -> int:
        """Return a number of the whole model, to which each further block adds what the third one does."""
        first = number_of(self.base)
        return first + sum(more * (number_of(self.longer[kind]) - first) for kind, more in self.more.items())

    def releases(self) -> Iterator[tuple[str, int]]:
        """Yield the parameters in the order of their gradients, with the bytes of activations at that time."""
        pending = dict(self.more)
        for name in self.base.released:
            found = self.block.fullmatch(name)
            if found and found[2] == "0" and (count := pending.pop(found[1], 0)):
                yield from self.between(found[1], count)
            yield (name if found is None else self.renamed(found)), self.at(name)

    def renamed(self, found: re.Match[str]) -> str:
        kind, number, rest = found.groups()
        return f"{kind}.{int(number) + self.more[kind] if number != '0' else 0}.{rest}"

    def at(self, name: str) -> int:
        """Bytes at a parameter that the short model has; of a last block it is the longer model's last."""
        own = self.block.fullmatch(name)
        live = self.live[name]
        for kind, more in self.more.items():
            is_last = own is not None and own[1] == kind and own[2] != "0"
            there = f"{kind}.{SHORT}.{own[3]}" if own is not None and is_last else name
            live += more * (self.live_longer[kind][there] - self.live[name])
        return live

    def between(self, kind: str, count: int) -> Iterator[tuple[str, int]]:
        """Yield the parameters of blocks between the first and the last of a kind, the last ones first."""
        trace, live = self.longer[kind], self.live_longer[kind]
        names = [name for name in trace.released if name.startswith(f"{kind}.1.")]
        block_bytes = trace.kept_bytes - self.base.kept_bytes
        for number in range(count, 0, -1):
            for name in names:
                rest = name.removeprefix(f"{kind}.1.")
                first = f"{kind}.0.{rest}"
                others = sum(
                    more * (self.live_longer[other][first] - self.live[first])
                    for other, more in self.more.items()
                    if other != kind
                )
                yield f"{kind}.{number}.{rest}", live[name] + (number - 1) * block_bytes + others


def live_bytes(trace: StepTrace) -> dict[str, int]:
    points = trace.backward_points[:-1]
    return {name: live for name, (live, _) in zip(trace.released, points, strict=True)}
