"""Video files for tests, written by PyAV and Pillow: each frame of one grey that says its number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

CODECS = {".mp4": "libx264", ".mov": "libx264", ".mkv": "libx264", ".webm": "libvpx-vp9", ".avi": "mpeg4"}
SIZE = (64, 48)
STEP = 12
"""Levels of grey from one frame to the next: more than compression changes."""


def frame_of(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Return a frame whose left upper quarter is white, so that turning it shows."""
    pixels = np.full((size[1], size[0], 3), STEP * number % 256, np.uint8)
    pixels[: size[1] // 2, : size[0] // 2] = 255
    return pixels


def write_video(
    path: Path,
    frames: int = 20,
    size: tuple[int, int] = SIZE,
    rate: int = 25,
    codec: str = "",
    pixel_format: str = "yuv420p",
    times_ms: Sequence[int] = (),
    gop: int = 5,
    **stream_values: Any,
) -> Path:
    """Write a video with a key frame at every fifth frame; `times_ms` are those of a variable rate."""
    if path.suffix in (".webp", ".gif"):
        images = [Image.fromarray(frame_of(number, size)) for number in range(frames)]
        images[0].save(path, save_all=True, append_images=images[1:], duration=1000 // rate, lossless=True)
        return path
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec or CODECS[path.suffix], rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt, stream.codec_context.gop_size = pixel_format, gop
        for name, value in stream_values.items():
            setattr(stream, name, value)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(frame_of(number, size), format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def tone(hertz: float, seconds: float, rate: int = 48000) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype(np.float32)


def write_film(
    path: Path,
    *tracks: np.ndarray,
    frames: int = 24,
    rate: int = 24,
    sound_rate: int = 48000,
    layout: str = "stereo",
    codec: str = "pcm_s16le",
) -> Path:
    """Write a video with sound tracks, each of one wave (samples,) on all its channels."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=rate)
        (stream.width, stream.height), stream.pix_fmt = SIZE, "yuv420p"
        sounds: list[Any] = [container.add_stream(codec, rate=sound_rate, layout=layout) for _ in tracks]
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_of(number), format="rgb24")))
        container.mux(stream.encode(None))
        for wave, sound in zip(tracks, sounds, strict=True):
            of_all = np.tile(wave, (sound.codec_context.channels, 1))
            whole: Any = av.AudioFrame.from_ndarray(of_all, format="fltp", layout=layout)
            whole.sample_rate, whole.pts, whole.time_base = sound_rate, 0, Fraction(1, sound_rate)
            context = sound.codec_context
            convert = av.AudioResampler(context.format, layout, sound_rate, context.frame_size or None)
            for given in (whole, None):
                for frame in convert.resample(given):
                    container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return path


def damage_sound(path: Path) -> Path:
    """Overwrite each packet of a film's sound with noise."""
    noise, content = np.random.default_rng(0), bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        for packet in container.demux(audio=0):
            if packet.size and packet.pos is not None:
                content[packet.pos : packet.pos + packet.size] = noise.bytes(packet.size)
    path.write_bytes(content)
    return path


def write_films(folder: Path, videos: int, folders: int, frames: int = 9) -> Path:
    """Write videos and folders of frames, each with a caption."""
    folder.mkdir()
    for number in range(videos):
        path = folder / f"film {number}{('.mp4', '.mkv', '.webm')[number % 3]}"
        write_video(path, frames + number % 2, rate=16)
        path.with_suffix(".txt").write_text(f"a film that brightens, {number}\n")
    for number in range(folders):
        own = folder / f"frames {number}"
        own.mkdir()
        own.with_suffix(".txt").write_text(f"frames that brighten, {number}\n")
        for place in range(frames):
            Image.fromarray(frame_of(place + number)).save(own / f"{place:04}.png")
    return folder


def film_entry(folder: str) -> dict[str, Any]:
    """Return the entry of a dataset file for a folder of `write_films`."""
    video = {"num_frames": 9, "min_frames": 9, "frame_folders_fps": 16}
    return {"id": "films", "dataset_type": "video", "instance_data_dir": folder, "video": video}


def numbers_of(images: Sequence[Image.Image]) -> list[int]:
    """Return which frame each image is, by the grey of its right lower corner."""
    return [round(np.asarray(image)[-4:, -4:].mean() / STEP) for image in images]
