"""The block `video` of a dataset: how long its clips are, and where they are cut out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.knob import Section

BLOCK = "video"
DEFAULT_FRAMES = 125
"""5 s at the 25 frames per second of LTX-Video, as other trainers have it; Wan's 4n + 1 and LTX's 8n + 1 round it."""


def parse_lengths(value: Any) -> Any:
    """Raises ValueError for what is not a list of lengths."""
    if not isinstance(value, list | tuple) or not value or not all(type(each) is int and each > 0 for each in value):
        raise ValueError("use a list of lengths in frames, such as [17, 33, 65]")
    return tuple(sorted({*value}))


class VideoSettings(Section):
    """Lengths are frames of the clip that is trained on: with `fps`, after frames in between are left out."""

    num_frames: int | None = Field(None, ge=1)
    """None: DEFAULT_FRAMES, or with `resolution_frames` as long as each video is."""
    min_frames: int | None = Field(None, ge=1)
    """None: shorter than `num_frames` is left out."""
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
