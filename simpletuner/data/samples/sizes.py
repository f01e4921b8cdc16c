"""The sizes that occur among images and videos, the bucket of each, and which one each image has."""


# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.geometry import bucket_sizes, resized_sizes
from simpletuner.data.images.videos import are_long_enough, clip_frames, strides_of
from simpletuner.data.sampler.stable_choice import hash_names
from simpletuner.settings.values.shape import Shape
from simpletuner.system.processes.threads import map_in_threads

# Sizes per block of bucket computation, within a core's caches: twice as fast as all at once.
BLOCK_SIZES = 1 << 15
LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Sizes:
    """The distinct sizes of images, the target of each, and the size of each image.

    `originals`, `resized` and `targets` are (sizes, 2), `index` is (images,), all int32. A video's size also
    has the length of the video and of the clip, the distance of frames (`strides`, float64; 1 for an image),
    and 1 where the sound of its clips is trained.
    """

    originals: np.ndarray
    resized: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray
    frames: np.ndarray
    strides: np.ndarray
    sounds: np.ndarray
    index: np.ndarray

    def of(self, image: int) -> tuple[Shape, Shape, Shape]:
        """Return the original shape of one image, its resized shape and its target."""
        size = self.index[image]
        sides, clip = (self.originals, self.resized, self.targets), int(self.frames[size])
        lengths = int(self.lengths[size]), clip, clip
        original, resized, target = (
            Shape(frames, *own[size, ::-1].tolist()) for frames, own in zip(lengths, sides, strict=True)
        )
        return original, resized, target

    def stride_of(self, image: int) -> float:
        return float(self.strides[self.index[image]])

    def has_sound(self, image: int) -> bool:
        return bool(self.sounds[self.index[image]])

    @property
    def target_codes(self) -> np.ndarray:
        """Return sound << 63 | frames << 48 | width << 24 | height of each size's target, (sizes,) int64."""
        codes = self.targets @ np.array([1 << 24, 1]) + (self.frames.astype(np.int64) << 48)
        return codes | (self.sounds.astype(np.int64) << 63)

    def images_where(self, mask: np.ndarray) -> np.ndarray:
        """Mask of images from a mask of sizes (sizes,), which is mostly false."""
        return mask[self.index] if mask.any() else np.zeros(len(self.index), bool)

    def where(self, mask: np.ndarray) -> Sizes:
        return replace(self, index=self.index[mask])


def different_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values in order of first appearance, and the index of each element's value.

    Arrow's hashing takes a tenth of the time of `np.unique`, which sorts.
    """
    encoded = pa.array(values).dictionary_encode()
    return encoded.dictionary.to_numpy(), encoded.indices.to_numpy()


def sizes_of(
    dataset: ImageDataset, table: pa.Table, rows: np.ndarray, alignment: Shape, seed: int
) -> tuple[Sizes, np.ndarray]:
    """Find the bucket of each size that occurs, and whether videos of this size are as long as they must be.

    There are far fewer sizes than images.
    """
    width, height = (table[side].to_numpy() for side in ("width", "height"))
    if len(rows) < len(table):
        width, height = width[rows], height[rows]
    codes, index = different_sizes(width, height)
    choices = None
    if dataset.crop and dataset.crop_aspect == "random":
        count = np.uint64(len(dataset.aspects))
        drawn = hash_names(table["name"], seed, dataset.id, "aspect")[rows] % count
        of_both, index = np.unique(index.astype(np.uint64) * count + drawn, return_inverse=True)
        codes, choices, index = codes[of_both // count], of_both % count, index.astype(np.int32)

    def block(start: int) -> tuple[np.ndarray, ...]:
        part = slice(start, start + BLOCK_SIZES)
        originals = np.stack([codes[part] >> 32, codes[part] & LOW], axis=1)
        targets = bucket_sizes(dataset, originals, alignment.width, None if choices is None else choices[part])
        resized = resized_sizes(dataset, originals, targets)
        return tuple(each.astype(np.int32) for each in (originals, resized, targets))

    blocks = map_in_threads(block, range(0, max(len(codes), 1), BLOCK_SIZES))
    originals, resized, targets = map(np.concatenate, zip(*blocks, strict=True))
    if not (video := dataset.clips):
        ones = np.ones(len(codes), np.int32)
        sizes = Sizes(originals, resized, targets, ones, ones, np.ones(len(codes)), 0 * ones, index)
        return sizes, np.ones(len(codes), bool)
    of_sizes, lengths, rates, index = different_lengths(index, *lengths_of(video, table, rows))
    of_clips, index = different_sizes(index, sounds_of(video, table, rows))
    of_sizes, lengths, rates = (each[of_clips >> 32] for each in (of_sizes, lengths, rates))
    frames, strides = clip_frames(video, lengths, rates, alignment.frames).astype(np.int32), strides_of(video, rates)
    originals, resized, targets = (each[of_sizes] for each in (originals, resized, targets))
    sounds = ((of_clips & LOW) * (frames > 1)).astype(np.int32)
    sizes = Sizes(originals, resized, targets, lengths, frames, strides, sounds, index)
    return sizes, are_long_enough(video, lengths, rates, alignment.frames)


def lengths_of(video: VideoSettings, table: pa.Table, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames of each video, and how many of them are shown per second."""
    frames, fps = (table[name].to_numpy()[rows] for name in ("frames", "fps"))
    if video.frame_folders_fps:
        is_folder = pc.ends_with(table["name"], "/").to_numpy()[rows]
        fps = np.where(is_folder & (fps == 0), video.frame_folders_fps, fps)
    return frames, fps


def sounds_of(video: VideoSettings, table: pa.Table, rows: np.ndarray) -> np.ndarray:
    """Return 1 for each video whose sound is trained, (videos,) int32."""
    return table["sound"].to_numpy()[rows].astype(np.int32) if video.sound else np.zeros(len(rows), np.int32)


def different_lengths(index: np.ndarray, lengths: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, ...]:
    """Tell sizes, by their `index`, with other lengths or rates apart.

    Return which size each of these has, its length and rate, and which of them each video has.
    """
    known, of_rates = different_values(rates)
    pairs, of_pairs = different_sizes(lengths, of_rates)
    found, of_videos = different_sizes(index, of_pairs)
    own = pairs[found & LOW]
    return found >> 32, (own >> 32).astype(np.int32), known[own & LOW].astype(np.float64), of_videos


def different_sizes(width: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes that occur, as width << 32 | height, and which of them each image has; also of other pairs."""
    if not len(width):
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    (left, right), (low, high) = ((int(each.min()), int(each.max())) for each in (width, height))
    columns, rows = right - left + 1, high - low + 1
    if columns * rows > max(len(width), BLOCK_SIZES):
        return different_values(width.astype(np.int64) << 32 | height)
    # A flag per possible size takes a quarter of hashing's time if there are fewer sizes than images.
    place = (width - left) * rows + (height - low)  # fits into the columns' 32 bits, as fewer than images
    occurs = np.zeros(columns * rows, bool)
    occurs[place] = True
    found = np.flatnonzero(occurs)
    numbers = np.cumsum(occurs, dtype=np.int32) - 1
    return (found // rows + left) << 32 | (found % rows + low), numbers[place]
