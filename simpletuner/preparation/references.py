"""Checks that references of datasets and of prompts fit the model."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.preparation.plan import Plan
from simpletuner.settings import Settings
from simpletuner.system.numbers import count_noun


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
