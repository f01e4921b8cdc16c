"""The data of a run before anything is encoded: multiples of which buckets are, references that fit the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simpletuner.counting.clip_lengths import frame_step_of
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.embeds import TextEmbeds
from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.samples.buckets import Buckets
from simpletuner.data.samples.samples import Samples
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import AUTO
from simpletuner.models.catalog.support import check_clips
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.malformed import read_config, translate_load_errors
from simpletuner.models.opening.loading import fetch_files, local_folder
from simpletuner.models.single_file.source import named_file
from simpletuner.parallel.world import World
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.values.shape import SampleShape, Shape
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


def with_first_frames(plan: Plan, family: ModelFamily) -> Plan:
    """Return the plan with clips whose first frame the model is given, where the model or a dataset says so.

    Raises SettingsError where they do not agree.
    """
    pipeline, mode = family.pipeline_name, family.image_to_video
    for part in plan.samples.parts:
        dataset, asked = part.dataset, part.dataset.clips.is_i2v if part.dataset.clips else False
        if asked and mode == "never":
            raise refused(dataset, f"video.is_i2v, but {pipeline} is given no first frame")
        if mode == "always" and asked is False:
            raise refused(dataset, f"{pipeline} continues the first frame of clips")
        if (asked or mode == "always") and (part.sizes.frames[part.sizes.index] == 1).any():
            raise refused(dataset, "some clips have one frame, after which nothing follows")
    return plan.with_first_frames() if mode == "always" else plan


def refused(dataset: ImageDataset, why: str) -> SettingsError:
    return SettingsError(
        f"dataset `{dataset.id}`: {why}",
        "docs/dataset-file.md says which models are given a first frame, and which clips they need",
    )


EDITS = "take a model that edits images, such as FLUX.1 Kontext, FLUX.2 or Qwen-Image-Edit"


def check_references(
    family: ModelFamily, settings: Settings, datasets: Sequence[ImageDataset], prompts: Sequence[ValidationPrompt]
) -> None:
    """Raise SettingsError for more or fewer references than the pipeline takes."""
    pipeline, least, taken = family.pipeline_name, family.least_references, family.most_references
    given = [(f"dataset `{dataset.id}`", len(dataset.encoded) - 1, taken) for dataset in datasets]
    first = 0 if family.image_to_video == "never" else 1
    given += [("validation_images", len(prompt.images), max(taken, first)) for prompt in prompts if prompt.images]
    for name, count, most in given:
        if count > most:
            says = f"{name}: {count_noun(count, 'reference image')}, and {pipeline} takes "
            raise SettingsError(says + (f"at most {most}" if most else "none"), f"leave them out, or {EDITS}")
        if count < least:
            raise SettingsError(
                f"{name}: no reference image, and {pipeline} edits images",
                "name a dataset of references in conditioning_data (docs/dataset-file.md, Pairs)",
            )
    if least and settings.data.reference_dropout_probability:
        raise SettingsError(
            f"reference_dropout_probability: {pipeline} makes no image without a reference", "leave it out"
        )


VAE_CONFIG = "vae/config.json"


def bucket_alignment(
    settings: Settings, datasets: Iterable[ImageDataset], world: World, stop: Callable[[], None]
) -> Shape:
    """Collective: return what sides of buckets, and frames of clips but one, are multiples of.

    Raises SettingsError for videos and a family that cannot train them.
    """
    datasets = list(datasets)
    alignment = check_clips(settings, datasets)
    if settings.model.model_family != AUTO or not any(dataset.clips for dataset in datasets):
        return alignment
    step = world.from_first("lengths of clips", lambda: str(step_of_vae(settings.model)), stop)
    return alignment._replace(frames=int(step))


def step_of_vae(model: Model) -> int:
    """Frame step of clips in a base model; only the config of its VAE is fetched."""
    is_file = named_file(model) is not None
    folder = model.single_file_config if is_file else local_folder(model) or fetch_files(model, [VAE_CONFIG])
    assert folder is not None
    with translate_load_errors(folder / VAE_CONFIG):
        return frame_step_of(read_config(folder / VAE_CONFIG))
