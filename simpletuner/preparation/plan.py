"""The data of a run, before anything is encoded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.embeds import TextEmbeds
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.samples.buckets import Buckets
from simpletuner.data.samples.samples import Samples
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.numbers import count_noun


@dataclass(frozen=True)
class Plan:
    """Datasets, buckets and sampler, before any latents or embeddings are computed."""

    datasets: list[ImageDataset]
    texts: list[TextEmbeds]
    """Caches of text embeddings, the default one first."""
    samples: Samples
    buckets: Buckets
    sampler: GlobalBatchSampler
    digest: str
    """Identity of seed, buckets and order: a saved position is valid only for the same ones."""
    held_out: np.ndarray
    """Indices of the samples that are not trained on."""

    def with_first_frames(self) -> Plan:
        """Return the same plan of clips whose first frame the model is given."""
        parts = [part.of(as_i2v(part.dataset)) for part in self.samples.parts]
        return replace(self, datasets=list(map(as_i2v, self.datasets)), samples=Samples(parts))


def as_i2v(dataset: ImageDataset) -> ImageDataset:
    assert dataset.clips is not None
    return dataset.model_copy(update={"video": dataset.clips.model_copy(update={"is_i2v": True})})


def samples_by_shape(plan: Plan) -> Counter[SampleShape]:
    """Count the samples of an epoch by their shape, and those of their references, in px."""
    counts: Counter[SampleShape] = Counter()
    for bucket in plan.buckets.values():
        first = next(iter(bucket.groups.values()))[0]
        counts[plan.samples[first].shape] += len(bucket)
    return counts


def describe_buckets(plan: Plan) -> str:
    """Return the number of images of each bucket, and how often an epoch shows repeated ones."""
    counts = {name: (bucket.num_samples, len(bucket)) for name, bucket in plan.buckets.items()}
    each = [f"{name}: {own}{f' shown {shown} times' if shown != own else ''}" for name, (own, shown) in counts.items()]
    held_out = f"; {len(plan.held_out):,} held out" if len(plan.held_out) else ""
    trained = len(plan.samples) - len(plan.held_out)
    return f"{trained:,} in {count_noun(len(counts), 'bucket')} ({', '.join(each)}){held_out}"
