"""Entry types of a dataset file: images and videos by storage, masks and references of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.data.config.caption_rules import CaptionKeys
from simpletuner.data.config.dataset_parts import (
    PARQUET,
    TABLE_STRATEGIES,
    ClassImageKeys,
    CropKeys,
    ParticipationKeys,
    TableSettings,
    VideoSettings,
    as_list,
    check_format,
    check_table,
)
from simpletuner.data.config.embeds import BucketImageEmbeds, ImageEmbeds
from simpletuner.data.config.places import AzurePlace, BucketPlace, GcsPlace, S3Place, check_id
from simpletuner.settings.values.parsed import no_address
from simpletuner.settings.values.spelling import OF_A_DATASET, fill, only_placeholders

LARGEST_PIXELS = 1 << 28
SMALLEST_PIXELS = 64


def as_backend(value: object) -> object:
    """A table of sizes may be called as one of captions is, by its format."""
    return PARQUET if value == "csv" else value


class ImageDataset(CaptionKeys, CropKeys, ParticipationKeys, ClassImageKeys):
    """Images or videos, wherever they are, and how they are captioned, resized and cropped."""

    id: Annotated[str, AfterValidator(check_id)]
    type: Literal["local", "aws", "gcs", "azure", "csv", "huggingface"] = "local"
    dataset_type: Literal["image", "video", "eval", "conditioning"] = "image"
    conditioning_type: Literal["mask", "reference_strict", "reference_loose"] | None = None
    conditioning_data: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    """Datasets of type conditioning that have a mask or a reference of each image, under the same name."""
    source_dataset_id: str | None = None
    """For a dataset of type conditioning: id of its images' dataset, instead of `conditioning_data` there."""
    name_ending: str = ""
    """For a dataset of type conditioning: end of its files' names, such as `-masklabel` of
    NAME-masklabel.png, the mask of NAME.png. Datasets of images that name it leave such files out."""
    video: VideoSettings | None = None
    text_embeds: str | None = None
    image_embeds: str | None = None
    disabled: bool = False
    caption_strategy: Literal["textfile", "filename", "instanceprompt", "parquet", "csv"] = "textfile"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Caption source; tables require a dataset file."""
    metadata_backend: Annotated[Literal["discovery", "parquet"], BeforeValidator(as_backend)] = "discovery"
    parquet: TableSettings | None = None
    cache_dir_vae: Annotated[Path | None, AfterValidator(only_placeholders(*OF_A_DATASET))] = None
    compress_cache: bool = False
    minimum_aspect_ratio: float | None = Field(default=None, gt=0)
    maximum_aspect_ratio: float | None = Field(default=None, gt=0)
    max_num_samples: int | None = Field(default=None, ge=1)
    is_regularisation_data: bool = False
    _embeds: ImageEmbeds | None = PrivateAttr(None)
    _conditioning: tuple[ImageDataset, ...] = PrivateAttr(())

    other_captions: ClassVar[str] = "set another caption_strategy: textfile, filename, instanceprompt or parquet"
    """A hint at other places of captions."""

    @property
    def captions_are_in(self) -> str:
        if self.parquet and self.caption_strategy in TABLE_STRATEGIES:
            return f"the table {self.parquet.path}"
        return "the file name" if self.caption_strategy == "filename" else "a .txt file of the same name"

    @property
    def are_masks(self) -> bool:
        return self.conditioning_type == "mask"

    @property
    def are_references(self) -> bool:
        return self.conditioning_type is not None and not self.are_masks

    @property
    def conditioning_noun(self) -> str:
        return "mask" if self.are_masks else "reference"

    @property
    def conditioning(self) -> tuple[ImageDataset, ...]:
        """The datasets that `conditioning_data` names, in its order, once the whole file is read."""
        return self._conditioning

    @property
    def encoded(self) -> tuple[ImageDataset, ...]:
        # References have cached latents, too.
        return (self, *(each for each in self._conditioning if each.are_references))

    def paired_with(self, conditioning: Sequence[ImageDataset]) -> ImageDataset:
        """Return this dataset with the masks and references of others; captions of masks are not read."""
        new = self.model_copy()
        new._conditioning = tuple(
            each.model_copy(update={"caption_strategy": "filename"}) if each.are_masks else each
            for each in conditioning
        )
        return new

    @property
    def latents_bucket(self) -> BucketImageEmbeds | None:
        """The cache in a bucket that `image_embeds` names, once the whole file is read."""
        return self._embeds if isinstance(self._embeds, BucketImageEmbeds) else None

    def cached_in(self, embeds: ImageEmbeds) -> ImageDataset:
        """Return this dataset with its latents in a cache that `image_embeds` names."""
        new = self.model_copy(update={"cache_dir_vae": fill(embeds.cache_dir, {"id": embeds.id})})
        new._embeds = embeds
        return new

    @property
    def clips(self) -> VideoSettings | None:
        """Clip settings; None for a dataset of images."""
        return VideoSettings.model_validate({}) if self.dataset_type == "video" and self.video is None else self.video

    @property
    def is_i2v(self) -> bool:
        """True if the model is given the first frame of each clip; known once the model is."""
        return self.clips is not None and bool(self.clips.is_i2v)

    def has_file(self, stem: str) -> bool:
        """Return whether a file of this name, without suffix, is of this dataset or of its masks."""
        others = tuple(each.name_ending for each in self.conditioning if each.name_ending)
        return stem.endswith(self.name_ending) and not (others and stem.endswith(others))

    @property
    def noun(self) -> str:
        return "video" if self.clips else "image"

    @model_validator(mode="after")
    def check_conditioning(self) -> ImageDataset:
        if (self.dataset_type == "conditioning") != (self.conditioning_type is not None):
            message = "dataset_type conditioning has conditioning_type mask, reference_strict or reference_loose"
            raise PydanticCustomError("conditioning_type", message)
        if self.dataset_type == "conditioning" and self.type in ("csv", "huggingface"):
            raise PydanticCustomError("dataset_type", "masks and references are of type local, aws, gcs or azure")
        if self.conditioning_data and (self.clips or self.dataset_type == "conditioning"):
            raise PydanticCustomError("conditioning_data", "it is for images, which have masks and references")
        if self.name_ending and (self.dataset_type != "conditioning" or "/" in self.name_ending):
            raise PydanticCustomError("name_ending", "it is the end of the names of masks or references")
        if self.source_dataset_id is not None and self.dataset_type != "conditioning":
            raise PydanticCustomError("source_dataset_id", "it is for dataset_type conditioning")
        return self

    @model_validator(mode="after")
    def check_videos(self) -> ImageDataset:
        if self.video and self.dataset_type in ("image", "conditioning"):
            raise PydanticCustomError("video", "it is for dataset_type video, or eval")
        if self.video and self.video.frame_folders_fps and self.type in ("csv", "huggingface"):
            raise PydanticCustomError("video.frame_folders_fps", "folders are of type local, aws, gcs or azure")
        return self

    @model_validator(mode="after")
    def check_place_of_class_images(self) -> ImageDataset:
        if self.prior_images is not None and (self.type != "local" or self.dataset_type != "image"):
            message = "class images are of type local and dataset_type image: instance_data_dir names their folder"
            raise PydanticCustomError("prior_images", message)
        if self.prior_images is not None and (self.conditioning_data or self.parquet):
            raise PydanticCustomError("prior_images", "class images have no masks, references or table")
        return self

    @model_validator(mode="after")
    def check_latents_folder(self) -> ImageDataset:
        if self.image_embeds is not None and self.cache_dir_vae is not None:
            raise PydanticCustomError("cache_dir_vae", "image_embeds names another folder: leave one of them out")
        return self

    @model_validator(mode="after")
    def check_table(self) -> ImageDataset:
        if self.type != "csv":  # which makes its own table
            check_table(self.parquet, self.caption_strategy, self.metadata_backend)
        return self

    @property
    def may_have_sizes_from_table(self) -> bool:
        # Text files are read together with image headers, so a table would save nothing.
        return self.metadata_backend == PARQUET and self.caption_strategy != "textfile"

    @model_validator(mode="after")
    def check_resolution(self) -> ImageDataset:
        area = self.resolution * (1_000_000 if self.resolution_type == "area" else self.resolution)  # `**` raises
        said = f"resolution={self.resolution:g} ({self.resolution_type})"
        if area > LARGEST_PIXELS:
            raise PydanticCustomError("resolution", "{said} is too large: at most 16384x16384 px", {"said": said})
        if area < SMALLEST_PIXELS:
            message = "{said} is less than 8x8 px; megapixels have resolution_type area"
            raise PydanticCustomError("resolution", message, {"said": said})
        return self

    @model_validator(mode="after")
    def check_aspects(self) -> ImageDataset:
        if (self.minimum_aspect_ratio or 0) > (self.maximum_aspect_ratio or math.inf):
            raise PydanticCustomError("minimum_aspect_ratio", "it is above maximum_aspect_ratio: no image is left")
        return self


class LocalImages(ImageDataset):
    instance_data_dir: Annotated[Path, AfterValidator(no_address)]


class BucketImages(BucketPlace, ImageDataset):
    """Images in a bucket."""


class S3Images(S3Place, BucketImages):
    """Images in a bucket of an S3-compatible store."""


class GcsImages(GcsPlace, BucketImages):
    """Images in a bucket of Google Cloud Storage."""


class AzureImages(AzurePlace, BucketImages):
    """Images in a container of Azure Blob Storage."""


class UrlImages(ImageDataset):
    """Images or videos by their addresses, which are downloaded once into a folder."""

    csv_file: Annotated[Path, AfterValidator(check_format)]
    csv_cache_dir: Path
    csv_url_column: str = "url"
    csv_caption_column: str | None = None

    @property
    def captions_are_in(self) -> str:
        return f"the table {self.csv_file}"

    @model_validator(mode="after")
    def check_list(self) -> UrlImages:
        if self.parquet or self.metadata_backend == PARQUET:
            key = PARQUET if self.parquet else "metadata_backend"
            raise PydanticCustomError(key, "images of type csv have their table in csv_file: leave it out")
        if self.caption_strategy in TABLE_STRATEGIES and not self.csv_caption_column:
            raise PydanticCustomError("csv_caption_column", "is missing: caption_strategy takes captions from it")
        if self.caption_strategy not in (*TABLE_STRATEGIES, "instanceprompt"):
            raise PydanticCustomError("caption_strategy", "images of type csv have csv or instanceprompt")
        return self


def belongs_to_split(file: PurePath, split: str) -> bool:
    """True if a split's name equals or begins the file's name, or that of a folder above it."""
    return file.name.startswith(split) or split in file.parts[:-1]


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class SnapshotImages(ImageDataset):
    """Images or videos of a Hugging Face dataset: Parquet files of a folder, or a dataset id on the hub."""

    dataset_name: Path
    revision: str | None = None
    """Hub revision: a branch, tag or commit."""
    split: str = "train"
    image_column: str = "image"
    video_column: str = "video"
    caption_column: str | None = None
    other_captions: ClassVar[str] = "name another caption_column"

    @property
    def captions_are_in(self) -> str:
        return f"the column `{self.caption_column}`"

    @property
    def content_key(self) -> str:
        """The key that names the column with the files."""
        return "video_column" if self.clips else "image_column"

    @property
    def content_column(self) -> str:
        return self.video_column if self.clips else self.image_column

    @property
    def is_on_hub(self) -> bool:
        """True if `dataset_name` must be downloaded: no local folder has that name."""
        return HUB_ID.fullmatch(str(self.dataset_name)) is not None and not self.dataset_name.is_dir()

    @model_validator(mode="before")
    @classmethod
    def read_as_folder(cls, values: Any) -> object:
        """The original's `huggingface` for captions and metadata is what happens anyway."""
        anyway = {"caption_strategy": "textfile", "metadata_backend": "discovery"}
        return {**values, **{key: own for key, own in anyway.items() if values.get(key) == "huggingface"}}

    @model_validator(mode="after")
    def check_columns(self) -> SnapshotImages:
        if self.caption_strategy == "textfile" and not self.caption_column:
            raise PydanticCustomError("caption_column", "is missing: captions come from it")
        if self.caption_strategy not in ("textfile", "instanceprompt"):
            message = "images of type huggingface have huggingface or instanceprompt"
            raise PydanticCustomError("caption_strategy", message)
        if self.parquet or self.metadata_backend == PARQUET:
            key = PARQUET if self.parquet else "metadata_backend"
            raise PydanticCustomError(key, "images of type huggingface have their own table: leave it out")
        if "video_column" in self.model_fields_set and not self.clips:
            raise PydanticCustomError("video_column", "it is for dataset_type video, or eval with a block `video`")
        return self


PLACES: dict[str, type[ImageDataset]] = {
    "local": LocalImages,
    "aws": S3Images,
    "gcs": GcsImages,
    "azure": AzureImages,
    "csv": UrlImages,
    "huggingface": SnapshotImages,
}
"""Datasets of images by `type`."""
