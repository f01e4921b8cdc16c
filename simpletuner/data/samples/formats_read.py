"""Sentences about the formats of files that datasets are read from."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.frame_folders import READ_FRAMES, frame_suffixes
from simpletuner.data.images.image_formats import READ
from simpletuner.data.images.video_formats import READ_VIDEOS


def formats_read(dataset: ImageDataset) -> str:
    if not dataset.clips:
        return READ
    return f"{READ_VIDEOS}, and {READ_FRAMES}" if dataset.clips.frame_folders_fps else READ_VIDEOS


def frames_hint(datasets: Iterable[ImageDataset], not_read: Collection[str]) -> str:
    """Say how images, among the suffixes that are not read, would be read as frames of clips; else nothing."""
    has_none = any(dataset.clips and not dataset.clips.frame_folders_fps for dataset in datasets)
    if not has_none or frame_suffixes().isdisjoint(not_read):
        return ""
    return "; folders of numbered images are clips with `frame_folders_fps` in the block `video`"
