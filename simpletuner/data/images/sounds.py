"""The sound of a clip: a track of its video, cut with its frames, in the rate and layout that a model takes.

Time is that of the frames: sound that begins after them, ends before them or has holes is silent there.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from simpletuner.data.images.videos import READ_BYTES, Clip, DecodedFilm, opened_film

# Telephones have 8 kHz, studios 192; a damaged header may say four billion, for which there is no memory.
LEAST_RATE, HIGHEST_RATE = 1_000, 768_000
# What is decoded before a clip: frames right after a place that was sought may not decode alone.
LEAD_SECONDS = Fraction(1, 5)
LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True)
class SoundFormat:
    """Form of the sound that a model takes: samples per second, channels, and the frame rate of its clips."""

    rate: int
    channels: int
    frame_rate: float

    def samples(self, frames: int) -> int:
        return round(frames / self.frame_rate * self.rate)


class Sound(NamedTuple):
    """Sound (channels, samples), float32 in -1..1, and its samples per second."""

    waveform: np.ndarray
    rate: int


def read_sound(file: BinaryIO, clip: Clip, frames: int, wanted: SoundFormat) -> np.ndarray:
    """Return the sound of a clip's frames, (channels, samples) float32, as long as the model shows them.

    Where the model shows frames faster or slower than the video does, their sound is as much higher or lower.
    Mono is on both channels, and more channels than two are mixed.

    Raises one of DECODE_ERRORS for a track that is damaged.
    """
    with opened_film(file, READ_BYTES) as film:
        if not isinstance(film, DecodedFilm) or film.track is None:
            raise ValueError("has no sound track that can be decoded")
        rate = film.track.codec_context.sample_rate
        if not LEAST_RATE <= rate <= HIGHEST_RATE:
            raise ValueError(f"has {rate:,} samples of sound per second in its header, which is damaged")
        start, end = (film.time_of_frame(number) for number in (clip.start, clip.start + frames * clip.stride))
        whole = decoded(film, rate, start, end, wanted.channels)
    # FFmpeg's rates are whole numbers: after 10 seconds, sound at 16 kHz is off by at most 0.3 ms.
    new_rate = round(wanted.rate * frames / wanted.frame_rate / (end - start))
    return resampled(whole, rate, new_rate, wanted.samples(frames))


def decoded(film: DecodedFilm, rate: int, start: Fraction, end: Fraction, channels: int) -> np.ndarray:
    """Return the sound between two times in seconds, (channels, samples) float32, at its own rate."""
    import av

    # FFmpeg would put mono on two channels at 0.7 of its level.
    given = 1 if film.track and film.track.codec_context.channels == 1 else channels
    convert = av.AudioResampler(format="fltp", layout=LAYOUTS[given], rate=rate)
    sound, begin, is_heard = np.zeros((channels, round((end - start) * rate)), np.float32), start - LEAD_SECONDS, False
    for frame in film.sound_from(begin):
        is_heard = True
        assert frame.pts is not None and frame.time_base is not None  # as sound_from has checked
        time = frame.pts * frame.time_base
        if time >= end:
            break
        for each in convert.resample(frame):
            put(sound, each.to_ndarray(), round((time - start) * rate))
            time += Fraction(each.samples, rate)
    if not is_heard and begin <= 0:
        raise ValueError("has a sound track without any sound")
    return sound


def put(sound: np.ndarray, part: np.ndarray, place: int) -> None:
    """Write what is within `sound` of a part that begins at `place`, which may be before its beginning."""
    first, last = max(place, 0), min(place + part.shape[1], sound.shape[1])
    if first < last:
        sound[:, first:last] = part[:, first - place : last - place].clip(-1, 1)  # mixed channels add up


def resampled(sound: np.ndarray, rate: int, new_rate: int, count: int) -> np.ndarray:
    """Return `count` samples at a new rate, silent behind the last one."""
    import av

    if new_rate == rate:
        parts = [sound]
    else:
        layout = LAYOUTS[len(sound)]
        frame: Any = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        convert = av.AudioResampler(format="fltp", layout=layout, rate=new_rate)
        parts = [each.to_ndarray() for given in (frame, None) for each in convert.resample(given)]
    found = np.zeros((len(sound), count), np.float32)
    put(found, np.concatenate(parts, axis=1), 0)
    return found
