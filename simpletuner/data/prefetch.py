"""Make one rank's batches from the global order in threads, some steps ahead of training.

Latents of reference images are part of a sample's conditioning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.sampler.batch_sampler import GlobalBatch, GlobalBatchSampler, SamplerState, split_for_rank
from simpletuner.data.sampler.epoch_order import hash_key, sample_noise
from simpletuner.data.samples.samples import Sample

PREFIX = "reference."
FIRST_FRAME = "first_frame"
"""Name in conditioning of what a model is given of a clip's first frame."""
# Names of what is noised of a sample: its image or video, and the sound of a clip.
LATENTS, SOUND = "latents", "sound"

T = TypeVar("T")


def named_references(references: Iterable[T]) -> dict[str, T]:
    """Return references under the names that they have in conditioning."""
    return {f"{PREFIX}{number}": each for number, each in enumerate(references)}


def references_in(conditioning: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the latents of references, (B, C, H, W) each, in their order."""
    count = sum(name.startswith(PREFIX) for name in conditioning)
    return [conditioning[f"{PREFIX}{number}"] for number in range(count)]


def without_references(conditioning: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in conditioning.items() if not name.startswith(PREFIX)}


# Two, so that one reads from the disk while the other hashes and stacks; both release the GIL there.
THREADS = 2

Conditioning = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """A micro batch of one rank. Latents and noise are (B, C, H, W) float32, of clips (B, C, F, H, W).

    `u` is (B,), uniform in [0, 1).
    """

    latents: Tensor
    noise: Tensor
    u: Tensor
    conditioning: Conditioning
    ids: tuple[str, ...]
    from_base: Tensor | None = None
    """(B,) bool: the samples whose target is the prediction of the base model. None, on all ranks alike,
    where no sample of the global batch is one of them."""
    loss_mask: Tensor | None = None
    """(B, 1, H, W), of clips (B, 1, F, H, W), in 0..1: by how much the loss of a latent cell counts. None,
    on all ranks alike, where no sample of the global batch has a mask."""
    streams: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Latents and noise that are denoised together with those above, by name; all samples of a bucket have
    the same."""

    @property
    def clean_streams(self) -> dict[str, Tensor]:
        return {name: clean for name, (clean, _) in self.streams.items()}

    def pinned(self) -> Batch:
        """Return the batch in page-locked memory, from which a GPU copies asynchronously."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, host_inputs: Collection[str] = ()) -> Batch:
        """Return the batch on a device, but for some conditioning by name, without waiting for the copy."""
        kept = {name: self.conditioning[name] for name in host_inputs}
        others = {name: value for name, value in self.conditioning.items() if name not in kept}
        moved = replace(self, conditioning=others)._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, conditioning=moved.conditioning | kept)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        conditioning = {name: fn(value) for name, value in self.conditioning.items()}
        from_base, mask = (each if each is None else fn(each) for each in (self.from_base, self.loss_mask))
        streams = {name: (fn(clean), fn(noise)) for name, (clean, noise) in self.streams.items()}
        return Batch(fn(self.latents), fn(self.noise), fn(self.u), conditioning, self.ids, from_base, mask, streams)


@dataclass(frozen=True)
class StepBatch:
    """The batch of one rank for an optimizer step: its micro batches, and the sampler's state after them."""

    micro_batches: list[Batch]
    next_state: SamplerState
    samples: Sequence[int] = ()
    """Numbers of the samples of the whole global batch."""


@dataclass(frozen=True)
class SampleReader:
    """Readers of a sample's tensors, without batch axis: latents (C, H, W) and image conditioning by sample,
    text embeddings by sample and caption, and the embedding for dropped captions. `dataset` returns the
    dataset of the sample at an index.

    `threads` prepare a step each; `map_samples` reads the samples of one step, where each waits for a network
    at once.
    """

    samples: Sequence[Sample]
    dataset: Callable[[int], ImageDataset]
    latents: Callable[[Sample], Tensor]
    image: Callable[[Sample], Conditioning]
    text: Callable[[Sample, str], Conditioning]
    no_caption: Callable[[Sample], Conditioning]
    mask: Callable[[Sample], Tensor | None] = lambda sample: None
    """Mask of the loss (1, H, W)."""
    streams: Callable[[Sample], Mapping[str, Tensor]] = lambda sample: {}
    """Latents of a sample's further streams, by name."""
    skips_first_frame: bool = True
    """True if the first latent frame of clips that continue it has no loss."""
    threads: int = THREADS
    map_samples: Callable[..., Iterable[object]] = map


@dataclass(frozen=True)
class RankSlice:
    """This data rank's slice of each global batch, and the seed of its randomness."""

    data_rank: int
    data_size: int
    accumulation: int
    seed: int
    drops_captions: bool = True
    reference_dropout: float = 0.0
    masked_loss: float = 1.0
    """Probabilities of steps without references, and of those in which masks count."""
    pin: bool = False
    """True if batches go to a GPU."""


def prefetch(
    reader: SampleReader,
    sampler: GlobalBatchSampler,
    state: SamplerState,
    step: int,
    rank_slice: RankSlice,
    steps_ahead: int,
) -> Iterator[StepBatch]:
    """Yield the batches after `step`, reading up to `steps_ahead` more in the background.

    An error in a thread is raised at the step that it belongs to, so the steps before it still train.
    """
    steps = enumerate(sampler.batches(state), start=step)
    with reading_threads(reader.threads, "prefetch") as pool:
        waiting: deque[Future[StepBatch]] = deque()
        try:
            while True:
                while len(waiting) <= steps_ahead:
                    number, (batch, next_state) = next(steps)
                    waiting.append(pool.submit(read_step, reader, batch, next_state, number, rank_slice))
                yield waiting.popleft().result()
        finally:  # a caller that stops early must not wait for steps that nothing will use
            for future in waiting:
                future.cancel()


def reading_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Started threads with one core each for torch's operations, and no OpenMP teams.

    Stacking texts would start a team in each. Once a process has more OpenMP threads than cores, libgomp lets
    all of them sleep between operations, also in training: on 2 cores a step of a tiny SD3 takes 0.18 instead
    of 0.10 s.
    """
    # Where a thread cannot be started, those that were must not wait for it forever.
    all_cores, started = torch.get_num_threads(), Barrier(count, timeout=60)

    def start(_: int) -> None:
        torch.set_num_threads(1)
        started.wait()
        torch.get_num_threads()  # takes over what was set last, which each thread does once

    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    list(pool.map(start, range(count)))
    torch.set_num_threads(all_cores)  # what threads take over that are started later
    return pool


def read_step(
    reader: SampleReader, batch: GlobalBatch, next_state: SamplerState, step: int, rank_slice: RankSlice
) -> StepBatch:
    """Read one rank's part of a global batch; `step` counts the optimizer steps before it."""
    parts = split_for_rank(batch, rank_slice.data_rank, rank_slice.data_size, rank_slice.accumulation)
    micro_batches = [collate(reader, batch, indices, step, rank_slice) for indices in parts]
    return StepBatch(micro_batches, next_state, batch.samples)


def collate(
    reader: SampleReader, batch: GlobalBatch, indices: Sequence[int], step: int, rank_slice: RankSlice
) -> Batch:
    datasets = [reader.dataset(sample) for sample in batch.samples]

    def read(index: int) -> tuple[Tensor, Tensor, float, Conditioning, str, Mapping[str, tuple[Tensor, Tensor]]]:
        dropout = datasets[index].caption_dropout_probability * rank_slice.drops_captions
        return read_sample(reader, batch, index, step, rank_slice.seed, dropout)

    latents, noise, us, conditionings, ids, streams = zip(*reader.map_samples(read, indices), strict=True)
    conditioning = stack_conditioning(conditionings)
    # Of the whole global batch, whose samples have as many tokens, on any number of ranks.
    if happens(rank_slice.reference_dropout, rank_slice.seed, step, "references"):
        conditioning = without_references(conditioning)
    from_base = None
    if any(dataset.is_regularisation_data for dataset in datasets):
        from_base = torch.tensor([datasets[index].is_regularisation_data for index in indices])
    mask = loss_masks(reader, datasets, [batch.samples[index] for index in indices], latents, rank_slice, step)
    stacked = {
        name: (torch.stack([each[name][0] for each in streams]), torch.stack([each[name][1] for each in streams]))
        for name in streams[0]
    }
    made = Batch(
        torch.stack(latents), torch.stack(noise), torch.tensor(us), conditioning, ids, from_base, mask, stacked
    )
    # In this thread: pinning copies the batch, and the step need not wait for it.
    return made.pinned() if rank_slice.pin else made


def loss_masks(
    reader: SampleReader,
    datasets: Sequence[ImageDataset],
    numbers: Sequence[int],
    latents: Sequence[Tensor],
    rank_slice: RankSlice,
    step: int,
) -> Tensor | None:
    """Weight of each latent cell in the loss; None if no sample of the global batch has a mask.

    `datasets` belong to the global batch, `numbers` of samples to the micro batch.
    """
    has_masks = any(each.are_masks for dataset in datasets for each in dataset.conditioning)
    has_masks = has_masks and happens(rank_slice.masked_loss, rank_slice.seed, step, "masks")
    skips = reader.skips_first_frame and any(dataset.is_i2v for dataset in datasets)
    if not (has_masks or skips):
        return None
    masks: list[Tensor] = []
    for sample, clean in zip((reader.samples[number] for number in numbers), latents, strict=True):
        own = reader.mask(sample) if has_masks else None
        mask = torch.ones_like(clean[:1]) if own is None else own
        if skips and sample.is_i2v:
            mask[:, 0] = 0  # it is given without noise
        masks.append(mask)
    return torch.stack(masks)


def happens(probability: float, *key: object) -> bool:
    """Draw an event of this probability, determined by `key`."""
    return hash_key(*key) < probability * 2.0**64


def read_sample(
    reader: SampleReader, batch: GlobalBatch, index: int, step: int, seed: int, dropout: float
) -> tuple[Tensor, Tensor, float, Conditioning, str, Mapping[str, tuple[Tensor, Tensor]]]:
    """Return latents, noise, `u`, conditioning and id of one sample, and its further streams with noise."""
    sample = reader.samples[batch.samples[index]]
    clean = reader.latents(sample)
    occurrence = batch.occurrences[index]
    random = sample_noise(seed, sample.id, step, occurrence, tuple(clean.shape))
    streams = {
        name: (
            own,
            torch.from_numpy(sample_noise(seed, f"{sample.id}/{name}", step, occurrence, tuple(own.shape)).noise),
        )
        for name, own in reader.streams(sample).items()
    }
    # A uniform number chooses, not random.choice: adding a caption to one image changes no other sample.
    caption = sample.captions[int(random.caption * len(sample.captions))]
    text = reader.no_caption(sample) if random.dropout < dropout else reader.text(sample, caption)
    return clean, torch.from_numpy(random.noise), random.u, {**text, **reader.image(sample)}, sample.id, streams


def stack_conditioning(conditionings: Sequence[Mapping[str, Tensor]]) -> Conditioning:
    """Stack each kind of conditioning along a new batch axis, padding shorter sequences with zeros."""
    return {name: pad_sequence([each[name] for each in conditionings], batch_first=True) for name in conditionings[0]}
