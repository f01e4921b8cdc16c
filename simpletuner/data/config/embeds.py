"""Caches of latents and text embeddings that datasets name: entries of a dataset file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from simpletuner.data.config.places import WITH_REFERENCES, AzurePlace, BucketPlace, GcsPlace, S3Place
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.values.spelling import OF_A_DATASET, only_placeholders

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset
    from simpletuner.settings.declared.sections import Data


class Embeds(Section):
    """A cache folder that datasets name: an entry of the dataset file."""

    id: str
    type: Literal["local", "aws", "gcs", "azure"] = "local"
    disabled: bool = False
    cache_dir: Annotated[Path, AfterValidator(only_placeholders(*OF_A_DATASET))]


class TextEmbeds(Embeds):
    """A cache of text embeddings; the default one also holds validation prompts."""

    dataset_type: Literal["text_embeds"]
    default: bool | None = None
    compress_cache: bool = False

    def of_pairs(self, dataset: ImageDataset) -> TextEmbeds:
        """Return the entry of the cache of texts that are encoded with the references of a dataset."""
        return self


def default_texts(data: Data) -> TextEmbeds:
    """Return the text cache of a run whose dataset file names none."""
    folder = data.cache_dir_text or Path("{output_dir}/cache/text")
    return TextEmbeds(id="text", dataset_type="text_embeds", cache_dir=folder, **compression(data))


def compression(data: Data) -> dict[str, Any]:
    return {"compress_cache": data.compress_disk_cache}


class ImageEmbeds(Embeds):
    """A cache of latents."""

    dataset_type: Literal["image_embeds"]


class BucketEmbeds(BucketPlace):
    """A cache in a bucket. Its local copy is below output_dir, private to the run, and bounded in size."""

    cache_size_limit_gb: float = Field(100, gt=0)


class BucketTextEmbeds(BucketEmbeds, TextEmbeds):
    cache_dir: Path = Path("{output_dir}/cache/text_embeds/{id}")

    def of_pairs(self, dataset: ImageDataset) -> BucketTextEmbeds:
        return self.below(f"{WITH_REFERENCES}/{dataset.id}")


class BucketImageEmbeds(BucketEmbeds, ImageEmbeds):
    cache_dir: Path = Path("{output_dir}/cache/image_embeds/{id}")


class S3TextEmbeds(S3Place, BucketTextEmbeds):
    """Text embeddings cached in S3."""


class GcsTextEmbeds(GcsPlace, BucketTextEmbeds):
    """Text embeddings cached in Google Cloud Storage."""


class AzureTextEmbeds(AzurePlace, BucketTextEmbeds):
    """Text embeddings cached in Azure Blob Storage."""


class S3ImageEmbeds(S3Place, BucketImageEmbeds):
    """Latents cached in S3."""


class GcsImageEmbeds(GcsPlace, BucketImageEmbeds):
    """Latents cached in Google Cloud Storage."""


class AzureImageEmbeds(AzurePlace, BucketImageEmbeds):
    """Latents cached in Azure Blob Storage."""


EMBEDS: dict[str, dict[str, type[Embeds]]] = {
    "text_embeds": {"local": TextEmbeds, "aws": S3TextEmbeds, "gcs": GcsTextEmbeds, "azure": AzureTextEmbeds},
    "image_embeds": {"local": ImageEmbeds, "aws": S3ImageEmbeds, "gcs": GcsImageEmbeds, "azure": AzureImageEmbeds},
}
"""Caches by `dataset_type` and `type`."""
