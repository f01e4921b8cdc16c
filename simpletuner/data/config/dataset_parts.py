"""Blocks of a dataset entry: crops, video clips, shares and times, tables of captions or sizes, class images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.errors import shorten
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.declared.sections import DatasetSettings

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset


ASPECTS = (0.5, 9 / 16, 2 / 3, 0.75, 0.8, 1.0, 1.25, 4 / 3, 1.5, 16 / 9, 2.0)
"""Aspects (width / height) that crop_aspect chooses from by default (crop_aspect_buckets)."""


def parse_aspects(value: object) -> object:
    """Raises ValueError for what is not a list of aspects."""
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= 256:
        raise ValueError("use a list of 1 to 256 aspects (width / height), such as [0.5, 1.0, 2.0]")
    if not all(type(each) in (int, float) and 0.1 <= each <= 10 for each in value):
        raise ValueError("use numbers from 0.1 to 10 (width / height)")
    return tuple(sorted({float(each) for each in value}))


class CropKeys(DatasetSettings):
    maximum_image_size: float | None = Field(default=None, gt=0)
    target_downsample_size: float | None = Field(default=None, gt=0)
    max_upscale_threshold: float | None = Field(default=None, ge=0)
    crop_aspect_buckets: Annotated[tuple[float, ...] | None, BeforeValidator(parse_aspects)] = None

    @model_validator(mode="after")
    def check_downsampling(self) -> CropKeys:
        largest, target = self.maximum_image_size, self.target_downsample_size
        if (largest is None) != (target is None):
            missing = "maximum_image_size" if largest is None else "target_downsample_size"
            other = "target_downsample_size" if largest is None else "maximum_image_size"
            raise PydanticCustomError(missing, "is missing: it belongs to {other}", {"other": other})
        if largest is not None and target is not None and not self.resolution <= target <= largest:
            message = "must be from resolution={low} to maximum_image_size={high}"
            raise PydanticCustomError(
                "target_downsample_size", message, {"low": f"{self.resolution:g}", "high": f"{largest:g}"}
            )
        return self

    @model_validator(mode="after")
    def check_aspect_buckets(self) -> CropKeys:
        if self.crop_aspect_buckets and not (self.crop and self.crop_aspect in ("closest", "random")):
            message = "only crop_aspect closest and random choose from it, with crop true"
            raise PydanticCustomError("crop_aspect_buckets", message)
        return self

    @property
    def aspects(self) -> tuple[float, ...]:
        return self.crop_aspect_buckets or ASPECTS


VIDEO = "video"
# 5 s at LTX-Video's 25 frames per second, as in other trainers; Wan's 4n + 1 and LTX's 8n + 1 round it.
DEFAULT_FRAMES = 125


def parse_lengths(value: Any) -> object:
    """Raises ValueError for what is not a list of lengths."""
    # Below 2^63, as NumPy computes with them.
    are_lengths = isinstance(value, list | tuple) and all(type(each) is int and 0 < each < 1 << 63 for each in value)
    if not are_lengths or not value:
        raise ValueError("use a list of lengths in frames, such as [17, 33, 65]")
    return tuple(sorted({*value}))


class VideoSettings(Section):
    """Lengths are frames of the clip that is trained on: with `fps`, after frames in between are left out."""

    num_frames: int | None = Field(None, ge=1)
    """Clip length. None: DEFAULT_FRAMES, or the video's own length with `resolution_frames`."""
    min_frames: int | None = Field(None, ge=1)
    """Shortest video. None: `num_frames`."""
    max_frames: int | None = Field(None, ge=1)
    frame_buckets: Annotated[tuple[int, ...] | None, BeforeValidator(parse_lengths)] = None
    """Lengths; each clip has the longest that its video fills. diffusion-pipe has the same key."""
    bucket_strategy: Literal["aspect_ratio", "resolution_frames"] = "aspect_ratio"
    frame_interval: int | None = Field(None, ge=1)
    fps: float | None = Field(None, gt=0)
    frame_folders_fps: float | None = Field(None, gt=0)
    """Folders of numbered images are clips, too, of so many frames per second. None: they are not."""
    clip_position: Literal["start", "middle", "random"] = "start"
    is_i2v: bool | None = None
    """True if the model is given the first frame of a clip; None: where it always is."""
    sound: bool | None = None
    """False for clips that train on video alone; None: as sound_loss_weight says, which makes it True."""

    @model_validator(mode="after")
    def check_lengths(self) -> VideoSettings:
        if self.frame_buckets and (self.num_frames or self.bucket_strategy != "aspect_ratio"):
            message = "it says how long clips are: leave num_frames and bucket_strategy out"
            raise PydanticCustomError("video.frame_buckets", message)
        if self.max_frames is not None and self.max_frames < max(
            self.min_frames or self.num_frames or 1, min(self.frame_buckets or (1,))
        ):
            asks = "min_frames, num_frames or frame_buckets asks for"
            raise PydanticCustomError("video.max_frames", f"is below what {asks}")
        if self.frame_interval is not None and self.bucket_strategy != "resolution_frames":
            message = "rounds the lengths of bucket_strategy resolution_frames: set it, or leave this out"
            raise PydanticCustomError("video.frame_interval", message)
        return self

    @property
    def wanted_frames(self) -> int | None:
        """Frames of a clip where the video has so many; None: all of them."""
        return self.num_frames or (DEFAULT_FRAMES if self.bucket_strategy == "aspect_ratio" else None)

    @property
    def length_limits(self) -> str:
        """Keys that leave videos out by their length, with their values."""
        keys = {"min_frames": self.min_frames, "frame_buckets": [*(self.frame_buckets or ())]}
        least = {name: value for name, value in keys.items() if value} or {"num_frames": self.wanted_frames}
        limits = {**least, "max_frames": self.max_frames, "fps": self.fps}
        return ", ".join(f"{name} = {shorten(value)}" for name, value in limits.items() if value)


Copies = int | Fraction

# More steps or epochs than any run has.
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Window:
    """Steps and epochs of a dataset's participation, counted from 0; ends are excluded."""

    start_step: int = 0
    end_step: int = NO_LIMIT
    start_epoch: int = 0
    end_epoch: int = NO_LIMIT

    def contains(self, step: int, epoch: int) -> bool:
        return self.start_step <= step < self.end_step and self.start_epoch <= epoch < self.end_epoch


class ParticipationKeys(DatasetSettings):
    """Keys of a dataset about its share. Epochs count from 1; end_epoch and end_step still have it."""

    probability: float = Field(default=1.0, gt=0, le=1_000_000)
    start_epoch: int = Field(default=1, ge=1)
    end_epoch: int | None = Field(default=None, ge=1)
    start_step: int = Field(default=0, ge=0)
    end_step: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def check_ends(self) -> ParticipationKeys:
        if (self.end_epoch or NO_LIMIT) < self.start_epoch:
            raise PydanticCustomError("end_epoch", "it is before start_epoch: the dataset would never take part")
        if (self.end_step or NO_LIMIT) <= self.start_step:
            raise PydanticCustomError("end_step", "it is not after start_step: the dataset would never take part")
        return self

    @property
    def window(self) -> Window:
        # Keys count epochs from 1 and name the last one; windows count from 0 and exclude their end, so
        # both ends are the same number.
        return Window(self.start_step, self.end_step or NO_LIMIT, self.start_epoch - 1, self.end_epoch or NO_LIMIT)


def copies_per_epoch(datasets: Sequence[ImageDataset]) -> list[Copies]:
    """Repeats of each dataset's samples per epoch; the largest probability in training counts as 1."""
    # Exact, and from the text: 0.1 as a float is no tenth, and copies of a group decide the order of samples.
    weights = [Fraction(str(dataset.probability)) for dataset in datasets]
    # Data of type eval is not trained on, so its probability must not scale that of the others.
    trained = [weight for dataset, weight in zip(datasets, weights, strict=True) if dataset.dataset_type != "eval"]
    largest = max(trained, default=Fraction(1))
    copies = [(1 + dataset.repeats) * weight / largest for dataset, weight in zip(datasets, weights, strict=True)]
    # Whole copies are int: their epochs are permuted independently, those of a fraction are parts of one row.
    return [each.numerator if each.denominator == 1 else each for each in copies]


FORMATS = {".parquet": "Parquet", ".csv": "CSV", ".jsonl": "JSON lines", ".json": "JSON lines"}
"""Names of table formats, by the suffix of the file."""
# Values of caption_strategy that mean the table, whatever its format.
TABLE_STRATEGIES = ("parquet", "csv")

PARQUET = "parquet"


def as_list(value: object) -> Any:
    # The original writes one id or column alone, and several as a list.
    return [value] if isinstance(value, str) else value


def check_format(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        hint = f'; many, such as shards, are named together as "{path}/*.parquet"' if path.is_dir() else ""
        raise ValueError(f"use a file that ends with {', '.join(FORMATS)}{hint}")
    return path


def table_files(path: Path) -> list[Path]:
    """Files that a path names: itself, or those that its last part is a pattern of (`*`, `?`, `[0-9]`)."""
    return sorted(path.parent.glob(path.name)) if has_magic(path.name) and not path.exists() else [path]


class TableSettings(Section):
    """The path of the table, and the meaning of its columns."""

    path: Annotated[Path, AfterValidator(check_format)]
    """Path of a table, or a pattern of several: img2dataset writes a table per shard."""
    filename_column: str = Field("filename", min_length=1)
    caption_column: Annotated[list[str], BeforeValidator(as_list)] = []
    """The first one that is not empty in a row gives its captions. None named: `caption`."""
    fallback_caption_column: str | None = None
    width_column: str | None = None
    height_column: str | None = None
    """Column of heights in px. None: `width` and `height`, if they hold numbers."""
    num_frames_column: str | None = None
    fps_column: str | None = None
    """Column of frame rates. None: `num_frames` and `fps`, if they hold numbers."""
    identifier_includes_extension: bool | None = None
    """None: the choice that finds more files."""

    @model_validator(mode="after")
    def check_sizes(self) -> TableSettings:
        if (self.width_column is None) != (self.height_column is None):
            missing = "height_column" if self.width_column else "width_column"
            raise PydanticCustomError(PARQUET, "{missing} is missing: both sides are needed", {"missing": missing})
        return self

    @property
    def caption_columns(self) -> list[str]:
        return [*self.caption_column, *([self.fallback_caption_column] if self.fallback_caption_column else [])]

    @property
    def size_columns(self) -> list[str]:
        return [self.width_column, self.height_column] if self.width_column and self.height_column else []


def check_table(table: TableSettings | None, caption_strategy: str, metadata_backend: str) -> None:
    """Raise PydanticCustomError, whose type is the key to change, if a dataset and its table do not fit."""
    captions = caption_strategy in TABLE_STRATEGIES
    if not table and (captions or metadata_backend == PARQUET):
        asks = f"caption_strategy {caption_strategy}" if captions else "metadata_backend parquet"
        raise PydanticCustomError(PARQUET, "is missing: {asks} reads the table that it describes", {"asks": asks})
    if table and not captions and metadata_backend != PARQUET:
        raise PydanticCustomError(PARQUET, "nothing reads it: set caption_strategy or metadata_backend to parquet")


def read_prompts(value: object) -> object:
    """Raises ValueError for what is no prompt, and no list of them."""
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list | tuple) or not all(isinstance(each, str) and each.strip() for each in prompts):
        raise ValueError('use a prompt, or a list of them, such as ["a photo of a dog", "a dog in a park"]')
    return tuple(" ".join(each.split()) for each in prompts)


def read_class_words(value: Any) -> object:
    """Raises ValueError for what is not a class word for each trigger word."""
    words = [each for pair in value.items() for each in pair] if isinstance(value, Mapping) else []
    if not words or not all(isinstance(each, str) for each in words) or not all(map(str.strip, value)):
        raise ValueError('use the class word of each trigger word, such as {"sks dog": "dog"}')
    return {" ".join(key.split()): " ".join(word.split()) for key, word in value.items()}


class ClassImageKeys(DatasetSettings):
    """Keys of a dataset about the images that the base model makes for it."""

    prior_images: int | None = Field(default=None, ge=1, le=100_000)
    prior_prompt: Annotated[tuple[str, ...], BeforeValidator(read_prompts)] = ()
    """Prompts, one image after the other."""
    prior_captions_of: str | None = None
    """Dataset with the captions that are the prompts, instead of `prior_prompt`."""
    class_words: Annotated[dict[str, str], BeforeValidator(read_class_words)] = {}
    """Words in place of trigger words in those captions."""
    prior_seed: int | None = Field(default=None, ge=0, lt=1 << 62)
    prior_num_inference_steps: int | None = Field(default=None, ge=1, le=1000)
    prior_guidance: float | None = Field(default=None, ge=0, le=1000)

    @model_validator(mode="after")
    def check_class_images(self) -> ClassImageKeys:
        if self.prior_images is None:
            keys = [
                name for name in CLASS_IMAGE_KEYS if getattr(self, name) != ClassImageKeys.model_fields[name].default
            ]
            if keys:
                raise PydanticCustomError("prior_images", "is missing: {keys} belongs to it", {"keys": keys[0]})
            return self
        if bool(self.prior_prompt) == (self.prior_captions_of is not None):
            raise PydanticCustomError("prior_prompt", "prior_images takes one of prior_prompt and prior_captions_of")
        if bool(self.class_words) != (self.prior_captions_of is not None):
            message = "prior_captions_of and class_words belong together: the captions without their trigger words"
            raise PydanticCustomError("class_words", message)
        said = "captions of class images are their prompts: leave it out"
        if self.caption_strategy != "textfile":
            raise PydanticCustomError("caption_strategy", said)
        if self.prepend_instance_prompt:
            raise PydanticCustomError("prepend_instance_prompt", said)
        return self


CLASS_IMAGE_KEYS = tuple(name for name in ClassImageKeys.model_fields if name not in DatasetSettings.model_fields)
OF_CAPTIONS: dict[str, object] = {"caption_strategy": "textfile", "prepend_instance_prompt": False}
"""Values of a dataset of class images in place of the settings that other datasets fall back to."""


def with_class_words(caption: str, class_words: Mapping[str, str]) -> str:
    """Return a caption with class words in place of trigger words, any case, the longest first."""
    found = "|".join(re.escape(each) for each in sorted(class_words, key=len, reverse=True))
    by_lower = {trigger.lower(): word for trigger, word in class_words.items()}
    text = " ".join(caption.split())
    replaced = re.sub(rf"(?<!\w)(?:{found})(?!\w)", lambda each: by_lower[each[0].lower()], text, flags=re.IGNORECASE)
    return " ".join(replaced.split())


def has_trigger_word(captions: Sequence[str], class_words: Mapping[str, str]) -> bool:
    return any(with_class_words(each, class_words) != " ".join(each.split()) for each in captions)
