"""Clips of videos: how many frames, at which distance, and where they are cut out.

Arrays have one number per video; all lengths count frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpletuner.data.config.videos import VideoSettings


@dataclass(frozen=True, slots=True)
class Clip:
    """Place of a clip in its video: the first frame, and how many frames of the video one of the clip stands for."""

    start: int
    stride: float

    def frame_numbers(self, count: int) -> list[int]:
        return [self.start + int(number * self.stride) for number in range(count)]


def strides_of(video: VideoSettings, rates: np.ndarray) -> np.ndarray:
    """Return the distances at which frames are taken: nothing is invented where a video is slower than asked for."""
    return np.maximum(1.0, rates / (video.fps or np.inf))


def usable_frames(lengths: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """Return how many frames of each video can be taken at these distances."""
    return np.floor((lengths - 1) / strides).astype(np.int64) + 1


def clip_frames(video: VideoSettings, lengths: np.ndarray, rates: np.ndarray, step: int) -> np.ndarray:
    """Return the frames of each clip: a multiple of `step` and one more, as the family's VAE takes them."""
    frames = usable_frames(lengths, strides_of(video, rates))
    if video.frame_buckets is not None:
        buckets = bucket_lengths(video.frame_buckets, step)
        return buckets[np.maximum(0, np.searchsorted(buckets, frames, side="right") - 1)]
    if video.wanted_frames is not None:
        frames = np.minimum(frames, video.wanted_frames)
    if video.frame_interval is not None:
        frames = np.maximum(1, frames // video.frame_interval * video.frame_interval)
    return (frames - 1) // step * step + 1


def bucket_lengths(buckets: Sequence[int], step: int) -> np.ndarray:
    """Return the lengths that the family takes, shortest first."""
    return np.unique((np.array(buckets) - 1) // step * step + 1)


def are_long_enough(video: VideoSettings, lengths: np.ndarray, rates: np.ndarray, step: int) -> np.ndarray:
    """Return whether videos are within min_frames and max_frames, and fill the shortest of frame_buckets."""
    usable = usable_frames(lengths, strides_of(video, rates))
    if video.frame_buckets is not None:
        usable = np.where(usable < bucket_lengths(video.frame_buckets, step)[0], 0, usable)
        return (usable >= (video.min_frames or 1)) & (usable <= (video.max_frames or np.inf))
    # A video of 81 frames is enough for the 81 that are left of num_frames=84.
    least = video.min_frames or ((video.wanted_frames or 1) - 1) // step * step + 1
    return (usable >= least) & (usable <= (video.max_frames or np.inf))


def clip_of(video: VideoSettings, sample_id: str, length: int, frames: int, stride: float, seed: int) -> Clip:
    """Return where the clip of one video is cut out."""
    room = length - 1 - int((frames - 1) * stride)
    if video.clip_position == "random":
        # Not of the step, as a crop's: latents are cached.
        digest = hashlib.blake2b(f"{seed}/{sample_id}/clip".encode(), digest_size=8).digest()
        return Clip(int.from_bytes(digest) % (room + 1), stride)
    return Clip(room // 2 if video.clip_position == "middle" else 0, stride)
