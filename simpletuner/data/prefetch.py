"""Turn the global order into batches for one rank, some steps ahead, in threads of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from simpletuner.data.batch_sampler import GlobalBatch, GlobalBatchSampler, SamplerState, rank_slices
from simpletuner.data.discovery import Sample
from simpletuner.data.sample_rng import sample_noise

Conditioning = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One forward pass of one rank. Latents and noise are BCHW float32; `u` is B, uniform in [0, 1)."""

    latents: Tensor
    noise: Tensor
    u: Tensor
    conditioning: Conditioning
    ids: tuple[str, ...]

    def pinned(self) -> Batch:
        """Return the batch in memory that a GPU can copy from by itself."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, without waiting for the copy."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        conditioning = {name: change(value) for name, value in self.conditioning.items()}
        return Batch(change(self.latents), change(self.noise), change(self.u), conditioning, self.ids)


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank: its forward passes, and the position in the data after it."""

    micro_batches: list[Batch]
    next_state: SamplerState


@dataclass(frozen=True)
class SampleReader:
    """Where a sample's tensors come from: by sample its latents and picture conditioning, by caption its embedding."""

    samples: Sequence[Sample]
    latents: Callable[[Sample], Tensor]
    picture: Callable[[Sample], Conditioning]
    text: Callable[[str], Conditioning]
    no_caption: Conditioning


@dataclass(frozen=True)
class RankSlice:
    """Which part of each global batch is this rank's, and what decides its randomness."""

    data_rank: int
    data_size: int
    accumulation: int
    seed: int
    caption_dropout: float
    pin: bool = False
    """Whether batches go to a GPU."""


def prefetch(
    source: SampleReader, order: GlobalBatchSampler, position: SamplerState, step: int, share: RankSlice, ahead: int
) -> Iterator[StepBatch]:
    """Yield the steps after `step`, each made while earlier ones train; `ahead` steps are in memory."""
    steps = enumerate(order.batches(position), start=step)
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="feed") as pool:
        waiting: deque[Future[StepBatch]] = deque()
        try:
            while True:
                while len(waiting) <= ahead:
                    number, (batch, after) = next(steps)
                    waiting.append(pool.submit(prepare, source, batch, after, number, share))
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def prepare(source: SampleReader, batch: GlobalBatch, after: SamplerState, step: int, share: RankSlice) -> StepBatch:
    """Read and draw one rank's part of a global batch; `step` counts optimizer steps before this one."""
    slices = rank_slices(batch, share.data_rank, share.data_size, share.accumulation)
    return StepBatch([assemble(source, batch, places, step, share) for places in slices], after)


def assemble(source: SampleReader, batch: GlobalBatch, places: Sequence[int], step: int, share: RankSlice) -> Batch:
    """Stack the samples at these places of the global batch."""
    latents, noise, times, conditionings, ids = [], [], [], [], []
    for place in places:
        sample = source.samples[batch.samples[place]]
        clean = source.latents(sample)
        drawn = sample_noise(share.seed, sample.id, step, batch.occurrences[place], tuple(clean.shape))
        caption = sample.captions[int(drawn.caption * len(sample.captions))]
        text = source.no_caption if drawn.dropout < share.caption_dropout else source.text(caption)
        latents.append(clean)
        noise.append(torch.from_numpy(drawn.noise))
        times.append(drawn.time)
        conditionings.append({**text, **source.picture(sample)})
        ids.append(sample.id)
    made = Batch(torch.stack(latents), torch.stack(noise), torch.tensor(times), stacked(conditionings), tuple(ids))
    return made.pinned() if share.pin else made


def stacked(conditionings: Sequence[Mapping[str, Tensor]]) -> Conditioning:
    """Stack each kind of conditioning along a new batch axis; shorter texts are padded with zeros at the end."""
    return {name: pad_sequence([each[name] for each in conditionings], batch_first=True) for name in conditionings[0]}
