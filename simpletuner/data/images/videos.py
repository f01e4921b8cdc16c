"""Read videos: facts from headers, and the frames of clips as images. A film is never in memory as a whole.

Frame `i` is the frame shown `i / rate` seconds after the beginning, at the mean rate, or one that begins
within half a mean frame after it. So films of variable rate keep their speed, and in all others frames have
their own numbers, even if a container rounds times.

Clips are chosen for whole columns of videos: arrays hold one number per video, and lengths count frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from PIL import Image

from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.images.colours import HDR
from simpletuner.data.images.image_formats import demuxer_of, is_webp
from simpletuner.data.images.images import DOUBT, MAX_PIXELS, ImageHeader, open_image, read_orientation, to_rgb
from simpletuner.data.images.orientation import turned_upright
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from av import AudioFrame, VideoFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

UNREADABLE = "is not a video in a known format, or is damaged"
DAMAGED_SOUND = "has a damaged sound track"
# Of FFmpeg's enums: matrix coefficients that a file does not name; transfer curves of PQ and HLG.
UNSPECIFIED, HDR_CURVES = 2, (16, 18)
# Height from which files without a matrix get BT.709, as in players.
HD_HEIGHT = 720


# Width of a pixel by its height, or the other way round; DV, DVDs and anamorphic lenses have at most 2.
MOST_STRETCHED = 16
UNTIMED_MS, UNTIMED_FPS = 10, 10.0
"""Frames that are to be shown no longer are shown ten per second, as browsers and FFmpeg do."""

# Bytes that are read at once of headers and of frames, each a request where the file is in a bucket.
HEADER_BYTES, READ_BYTES = 1 << 15, 1 << 18


class Film(Protocol):
    def header(self) -> ImageHeader: ...

    def images(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Yield frames by ascending number, upright in RGB. Raises ValueError if one is missing."""
        ...


def read_video_header(file: BinaryIO) -> ImageHeader:
    """Read a video's header and first frame. Raises one of DECODE_ERRORS."""
    with opened_film(file) as film:
        return film.header()


def read_frames(file: BinaryIO, numbers: Sequence[int], original: Shape) -> Iterator[Image.Image]:
    """Yield the frames with these ascending numbers of a video that has the shape `original`.

    Raises one of DECODE_ERRORS, also where the sizes differ for which bucket and crop were chosen.
    """
    with opened_film(file, READ_BYTES) as film:
        for image in film.images(numbers):
            if image.size != original.size:
                found = "{}x{}".format(*image.size)
                size = "{}x{}".format(*original.size)
                raise ValueError(f"has frames of {found} px, not {size}: the table is wrong, or the file changed")
            yield image


@contextmanager
def opened_film(file: BinaryIO, read_bytes: int = HEADER_BYTES) -> Iterator[Film]:
    """Open a video by its content, whatever its name says. Raises one of DECODE_ERRORS, also within the
    block.

    `read_bytes` are read at once.
    """
    head = file.read(16)
    file.seek(0)
    if is_webp(head):
        with open_image(file) as image:
            yield WebPFilm(image)
        return
    if not (demuxer := demuxer_of(head)):
        raise ValueError("is empty" if not head else UNREADABLE)
    import av

    # Titles and the like may be in any encoding. av 19 takes them as they are, and no longer has the option.
    is_strict = int(av.__version__.partition(".")[0]) < 19
    options: dict[str, Any] = {"metadata_errors": "ignore"} if is_strict else {}
    try:
        with av.open(file, "r", format=demuxer, buffer_size=read_bytes, **options) as container:
            yield DecodedFilm(container)
    except av.FFmpegError:  # its own message names the stream object, and FFmpeg's function
        raise ValueError(UNREADABLE) from None


class WebPFilm:
    """An animated WebP; its frames count as equally long."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    def header(self) -> ImageHeader:
        count = getattr(self._image, "n_frames", 1)
        self._image.load()  # which reads the time of the first frame
        duration_ms = self._image.info.get("duration", 0)
        size = turned_upright(self._image, read_orientation(self._image)).size
        fps = 1000 / duration_ms if duration_ms > UNTIMED_MS else UNTIMED_FPS
        return ImageHeader(size, count > 1, count, fps if count > 1 else 0)

    def images(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        count = getattr(self._image, "n_frames", 1)
        if numbers[-1] >= count:
            raise too_short(count, numbers[-1] + 1)
        for number in numbers:
            self._image.seek(number)
            self._image.load()
            image = to_rgb(turned_upright(self._image, read_orientation(self._image)))
            image.info[DOUBT] = ""
            yield image


class DecodedFilm:
    """A film that PyAV decodes from the last key frame before the clip, one frame after the other."""

    def __init__(self, container: InputContainer) -> None:
        self._container, self._stream = container, film_stream(container)
        # Other clips are decoded by other threads at the same time.
        self._stream.codec_context.thread_count = 1
        self.track = sound_track(container)
        self._start = self._stream.start_time or 0
        assert self._stream.time_base
        self._is_gif = container.format.name == "gif"
        rate = self._gif_rate(self._stream.time_base) if self._is_gif else self._stream.average_rate
        self._rate = rate or self._stream.guessed_rate or Fraction(1)
        self._ticks = 1 / (self._rate * self._stream.time_base)
        """Ticks of the stream's clock per frame."""

    def header(self) -> ImageHeader:
        first = next(self._container.decode(self._stream), None)
        if first is None:
            raise ValueError("has no frame that can be decoded")
        width, height = displayed_size(first, self._stream)
        is_turned = first.rotation % 180 != 0
        frames = self._count_frames()
        is_untimed = self._is_gif and self._rate * UNTIMED_MS >= 1000
        fps = UNTIMED_FPS if is_untimed else float(self._rate)
        size = (height, width) if is_turned else (width, height)
        return ImageHeader(size, frames > 1, frames, fps, self.track is not None)

    def time_of_frame(self, number: float) -> Fraction:
        """Return when a frame is shown, in seconds of the container's clock."""
        assert self._stream.time_base
        return (self._start + Fraction(number) * self._ticks) * self._stream.time_base

    def sound_from(self, begin: Fraction) -> Iterator[AudioFrame]:
        """Yield the sound from a time in seconds, or from earlier. Raises ValueError for a damaged track."""
        import av

        assert self.track is not None and self.track.time_base
        try:
            if begin > 0:
                self._container.seek(int(begin / self.track.time_base), stream=self.track)
            for frame in self._container.decode(self.track):
                if frame.is_corrupt or frame.pts is None:
                    raise ValueError(DAMAGED_SOUND)
                yield frame
        except av.FFmpegError:
            raise ValueError(DAMAGED_SOUND) from None

    def images(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        waiting = [self._start + number * self._ticks for number in numbers]
        half, shown = self._ticks / 2, None
        for frame in self._decoded_from(waiting[0]):
            while waiting and shown is not None and time_of(frame) > waiting[0] + half:
                waiting.pop(0)
                yield self._image(shown)
            shown = frame
            if not waiting:
                return
        if shown is None:
            raise ValueError("has no frame that can be decoded")
        end = time_of(shown) + max(shown.duration or 0, self._ticks)
        while waiting and waiting[0] + half <= end:
            waiting.pop(0)
            yield self._image(shown)
        if waiting:
            raise too_short(round((end - self._start) / self._ticks), numbers[-1] + 1)

    def _decoded_from(self, moment: Fraction) -> Iterable[VideoFrame]:
        """Return the frames from the one that is shown at a moment, or from an earlier one."""
        if moment > self._start:
            self._container.seek(int(moment), stream=self._stream)
        frames = self._container.decode(self._stream)
        first = next(frames, None)
        if first is not None and time_of(first) > moment + self._ticks / 2:  # the index has no key frame before it
            self._container.seek(self._start, stream=self._stream)
            return self._container.decode(self._stream)
        return chain([first], frames) if first is not None else ()

    def _image(self, frame: VideoFrame) -> Image.Image:
        if frame.is_corrupt:
            number = round((time_of(frame) - self._start) / self._ticks)
            raise ValueError(f"is damaged at frame {number}")
        has_alpha = any(each.is_alpha for each in frame.format.components)
        # Unnamed, FFmpeg takes SD's matrix for all: greens and reds of HD would be off by some levels.
        is_hd = frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT
        matrix = "ITU709" if is_hd else None
        converted = frame.reformat(format="rgba" if has_alpha else "rgb24", src_colorspace=matrix)
        image = to_rgb(Image.fromarray(converted.to_ndarray()))
        if (size := displayed_size(frame, self._stream)) != image.size:
            image = image.resize(size, Image.Resampling.LANCZOS)
        image = image.rotate(frame.rotation, expand=True) if frame.rotation else image
        is_hdr = frame.color_trc in HDR_CURVES
        image.info[DOUBT] = HDR if is_hdr else ""
        return image

    def _gif_rate(self, time_base: Fraction) -> Fraction | None:
        # In FFmpeg's own rate, a last frame without a time is not shown at all.
        packets = [each for each in self._container.demux(self._stream) if each.size and each.pts is not None]
        self._container.seek(self._start, stream=self._stream)
        ticks = sum(each.duration or 0 for each in packets)
        return Fraction(len(packets)) / (ticks * time_base) if ticks else None

    def _count_frames(self) -> int:
        """Number of frames that the container states; of Matroska and WebM, by the length of the track."""
        seconds = seconds_of(self._stream.metadata.get("DURATION", ""))
        frames = self._stream.frames or (0 if seconds is None else max(1, round(seconds * self._rate)))
        if 0 < frames <= self._container.size:  # each takes at least a byte: a table may claim 4,294,967,295
            return frames
        # The film's length may be its sound's. Nothing is decoded, but the whole file is read.
        self._container.seek(self._start, stream=self._stream)
        return sum(packet.size > 0 for packet in self._container.demux(self._stream))


def film_stream(container: InputContainer) -> VideoStream:
    """Moving images of a file, which may also have a cover. Raises ValueError where it has none."""
    from av.stream import Disposition

    for stream in container.streams.video:
        # FFmpeg has no decoder for a stream without a codec context, which PyAV's types leave out.
        has_decoder = getattr(stream, "codec_context", None) is not None
        if has_decoder and not stream.disposition & Disposition.attached_pic:
            return stream
    raise ValueError("has no video track that can be decoded")


def sound_track(container: InputContainer) -> AudioStream | None:
    """Return the track that players choose: the default, else the best; None if none can be decoded."""
    found = container.streams.best("audio")
    # FFmpeg has no decoder for a stream without a codec context.
    return found if getattr(found, "codec_context", None) is not None else None  # pyright: ignore[reportReturnType]


def time_of(frame: VideoFrame) -> int:
    """Presentation time of a frame, in ticks. Raises ValueError if it has none."""
    if frame.pts is None:
        raise ValueError("has frames without a time")
    return frame.pts


def displayed_size(frame: VideoFrame, stream: VideoStream) -> tuple[int, int]:
    """Return width and height with square pixels, before the frame is turned; DV and DVDs have others.

    Raises ValueError for what no film has, before anything takes memory for it.
    """
    aspect = stream.sample_aspect_ratio or Fraction(1)
    if not 1 / MOST_STRETCHED <= aspect <= MOST_STRETCHED:
        raise ValueError(f"has pixels of {aspect.numerator:,} : {aspect.denominator:,} in its header, which is damaged")
    width, height = max(round(frame.width * aspect), 1), frame.height
    if width * height > MAX_PIXELS:
        limit = f"at most {MAX_PIXELS / 1e6:,.0f} megapixels are read"
        raise ValueError(f"has frames of {width:,} x {height:,} px; {limit}")
    return width, height


def seconds_of(text: str) -> Fraction | None:
    """Seconds that `00:01:02.500000000` means, as FFmpeg writes a track's length; None for anything else."""
    try:
        hours, minutes, seconds = map(Fraction, text.strip("\0 ").split(":"))
    except ValueError:
        return None
    return hours * 3600 + minutes * 60 + seconds


def too_short(found: int, needed: int) -> ValueError:
    return ValueError(
        f"ends after {found} frames, and {needed} are needed: it is cut short, or its header or the table is wrong"
    )


@dataclass(frozen=True, slots=True)
class Clip:
    """Place of a clip in its video: first frame, and frames of the video per frame of the clip."""

    start: int
    stride: float

    def frame_numbers(self, count: int) -> list[int]:
        return [self.start + int(number * self.stride) for number in range(count)]


def strides_of(video: VideoSettings, rates: np.ndarray) -> np.ndarray:
    # Nothing is invented where a video is slower than asked for.
    return np.maximum(1.0, rates / (video.fps or np.inf))


def usable_frames(lengths: np.ndarray, strides: np.ndarray) -> np.ndarray:
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
    """Mask of videos within min_frames and max_frames that fill the shortest of frame_buckets."""
    usable = usable_frames(lengths, strides_of(video, rates))
    if video.frame_buckets is not None:
        usable = np.where(usable < bucket_lengths(video.frame_buckets, step)[0], 0, usable)
        return (usable >= (video.min_frames or 1)) & (usable <= (video.max_frames or np.inf))
    # A video of 81 frames is enough for the 81 that are left of num_frames=84.
    least = video.min_frames or ((video.wanted_frames or 1) - 1) // step * step + 1
    return (usable >= least) & (usable <= (video.max_frames or np.inf))


def clip_of(video: VideoSettings, sample_id: str, length: int, frames: int, stride: float, seed: int) -> Clip:
    """Start and stride of the clip that is cut from one video."""
    room = length - 1 - int((frames - 1) * stride)
    if video.clip_position == "random":
        # Not of the step, as a crop's: latents are cached.
        digest = hashlib.blake2b(f"{seed}/{sample_id}/clip".encode(), digest_size=8).digest()
        return Clip(int.from_bytes(digest) % (room + 1), stride)
    return Clip(room // 2 if video.clip_position == "middle" else 0, stride)
