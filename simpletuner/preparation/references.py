"""Whether references of datasets and of prompts fit the model."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.settings import Settings
from simpletuner.system.numbers import count_noun

EDITS = "take a model that edits images, such as FLUX.1 Kontext, FLUX.2 or Qwen-Image-Edit"


def check_references(
    family: ModelFamily, settings: Settings, datasets: Sequence[ImageDataset], prompts: Sequence[ValidationPrompt]
) -> None:
    """Raise SettingsError for more or fewer references than the pipeline takes."""
    given = [(f"dataset `{dataset.id}`", len(dataset.encoded) - 1) for dataset in datasets]
    given += [("validation_images", len(prompt.images)) for prompt in prompts if prompt.images]
    pipeline, least, most = family.pipeline_class.__name__, family.least_references, family.most_references
    for name, count in given:
        if count > most:
            says = f"{name}: {count_noun(count, 'reference image')}, and {pipeline} takes "
            raise SettingsError(says + (f"at most {most}" if most else "none"), f"leave them out, or {EDITS}")
        if count < least:
            raise SettingsError(
                f"{name}: no reference image, and {pipeline} edits images",
                "name a dataset of references in conditioning_data (docs/data.md, Pairs)",
            )
    if least and settings.data.reference_dropout_probability:
        raise SettingsError(
            f"reference_dropout_probability: {pipeline} makes no image without a reference", "leave it out"
        )
