"""Keys of a dataset about cropping: shape, position and size (geometry.py computes them)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.sections import DatasetSettings

ASPECTS = (0.5, 9 / 16, 2 / 3, 0.75, 0.8, 1.0, 1.25, 4 / 3, 1.5, 16 / 9, 2.0)
"""Aspects (width / height) that crop_aspect chooses from by default (crop_aspect_buckets)."""


def parse_aspects(value: Any) -> Any:
    """Raises ValueError for what is not a list of aspects."""
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= 64:
        raise ValueError("use a list of 1 to 64 aspects (width / height), such as [0.5, 1.0, 2.0]")
    if not all(type(each) in (int, float) and 0.1 <= each <= 10 for each in value):
        raise ValueError("use numbers from 0.1 to 10 (width / height)")
    return tuple(sorted({float(each) for each in value}))


class CropKeys(DatasetSettings):
    """Keys of a dataset about resizing and cropping."""

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
