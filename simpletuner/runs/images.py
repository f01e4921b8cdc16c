"""Validation images as PNG files, and clips as MP4, as animated WebP and as a picture of three frames.

Their metadata say how they were made.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageSequence, PngImagePlugin
from pydantic import TypeAdapter, ValidationError

from simpletuner.data.images.image_formats import INSTALL_VIDEO
from simpletuner.data.images.images import DECODE_ERRORS, open_image
from simpletuner.data.storage.storage import MAX_BYTES
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.cache_files import is_plain_folder
from simpletuner.system.files.regular_files import open_regular, read_file

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.data.images.sounds import Sound

OWN_CHUNK = "simpletuner"
"""Name of the text chunk that holds an ImageInfo as JSON."""
COMMON_CHUNK = "parameters"
"""Name of the text chunk in which image viewers and web interfaces for diffusion models look for a prompt."""


REFERENCE = "reference"


@dataclass(frozen=True)
class ImageInfo:
    """Parameters with which an image was generated."""

    prompt: str
    negative_prompt: str
    seed: int
    num_inference_steps: int
    guidance: float
    width: int
    height: int
    step: int
    """Optimizer steps taken before."""
    weights: str
    """`trained`, `ema`, or `base`: without the LoRA; `reference` of an image that was given to the model."""
    frames: int = 1
    fps: float = 0.0
    """Frame rate of a clip, whose PNG has three frames side by side."""
    made_from: str = ""
    """Hash of all that an image of the base model depends on."""
    given: str = ""
    """Hash of the images that it was made from."""

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def png_width(self) -> int:
        return self.width * (3 if self.frames > 1 else 1)

    def captions(self) -> tuple[str, str]:
        """Return the lines under an image: weights and step; seed, guidance and size."""
        if self.weights == REFERENCE:
            return REFERENCE, f"{self.width}×{self.height}"
        clip = f" · {self.frames} frames" if self.frames > 1 else ""
        return (
            f"{self.weights} · step {self.step}",
            f"seed {self.seed} · guidance {self.guidance:g} · {self.width}×{self.height}{clip}",
        )

    def as_parameters(self) -> str:
        """Format as other tools do, so that their viewers show it."""
        negative = f"Negative prompt: {self.negative_prompt}\n" if self.negative_prompt else ""
        return (
            f"{self.prompt}\n{negative}Steps: {self.num_inference_steps}, CFG scale: {self.guidance:g}, "
            f"Seed: {self.seed}, Size: {self.size}"
        )


def to_image(pixels_1CHW: Tensor) -> Image.Image:
    """Convert pixels in [-1, 1] to an 8-bit image."""
    values = ((pixels_1CHW[0].permute(1, 2, 0).numpy() + 1) * 127.5).round().clip(0, 255)
    return Image.fromarray(values.astype(np.uint8))


def write_image(path: Path, image: Image.Image, info: ImageInfo) -> None:
    write_png(path, image, {COMMON_CHUNK: info.as_parameters(), OWN_CHUNK: json.dumps(asdict(info))})


def write_png(path: Path, image: Image.Image, texts: Mapping[str, str]) -> None:
    chunks, content = PngImagePlugin.PngInfo(), BytesIO()
    for name, text in texts.items():
        # iTXt, since tEXt holds Latin-1 only (PNG, section 11.3.3).
        chunks.add_itxt(name, text, zip=len(text) > 1024)
    image.save(content, "PNG", pnginfo=chunks)
    write_file(path, content.getvalue())


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open a validation image. Raises OSError for any fault of the file, also while it is decoded."""
    try:
        with open_regular(path, MAX_BYTES) as file, open_image(file) as image:
            yield image
    except OSError as error:
        raise OSError(error.errno or errno.EINVAL, error.strerror or str(error), str(path)) from None
    except DECODE_ERRORS as error:
        raise OSError(errno.EINVAL, f"cannot be decoded: {error}", str(path)) from None


# Most pixels of an image that is decoded to be shown: 8192x8192 px take 200 MB.
SHOWN_PIXELS = 1 << 26


def read_rgb(path: Path, max_pixels: int | None = None) -> Image.Image:
    """Decode a validation image. Raises OSError for a damaged one, and for one of more pixels."""
    with opened(path) as image:
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise ValueError(f"it has {image.width}x{image.height} px")
        return image.convert("RGB")


def read_info(path: Path) -> tuple[tuple[int, int], ImageInfo | None]:
    """Image's (width, height), and how it was made; None for one without metadata, or with damaged ones.

    Raises OSError for what is no image.
    """
    with opened(path) as image:
        text = image.text.get(OWN_CHUNK, "") if isinstance(image, PngImagePlugin.PngImageFile) else ""
        size = image.size
    try:
        return size, TypeAdapter(ImageInfo).validate_json(text, strict=True)
    except ValidationError:
        return size, None


# Quality of the WebP, from 0 to 100: what is lost of a frame is hardly seen while it moves.
QUALITY = 80
# All GIFs of a run are in TensorBoard's event file, and none is compressed as a video is.
GIF_EDGE_PX = 384
MP4, WEBP = ".mp4", ".webp"


def require_video_writer() -> None:
    """Raise EnvironmentNotReady where nothing can write an MP4."""
    if find_spec("av") is None:
        raise EnvironmentNotReady("validation clips need PyAV, which is not installed", INSTALL_VIDEO)


def write_sample(path: Path, pixels: Tensor, info: ImageInfo, sound: Sound | None = None) -> None:
    """Write what the VAE decoded, in -1..1: an image (1CHW), or files of one stem for a clip (1CFHW).

    Sound is in the MP4. The PNG is last: where it is, all are.
    """
    if pixels.ndim == 4:
        write_image(path, to_image(pixels), info)
        return
    frames = [to_image(pixels[:, :, number]) for number in range(pixels.shape[2])]
    write_file(path.with_suffix(MP4), as_mp4(frames, info.fps, sound))
    write_file(path.with_suffix(WEBP), as_webp(frames, info.fps))
    write_image(path, side_by_side(frames), info)


def copy_round(wanted: Mapping[Path, ImageInfo], folder: Path) -> bool:
    """Write files of another round again, if it has all, made from the same; return whether it has."""
    try:
        sources = {folder / path.name: path for path in wanted}
        if any(
            (was := read_info(source)[1]) is None or was.made_from != wanted[path].made_from
            for source, path in sources.items()
        ):
            return False
        for source, path in sources.items():
            if source == path:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            for suffix in (MP4, WEBP) if wanted[path].frames > 1 else ():
                write_file(path.with_suffix(suffix), read_file(source.with_suffix(suffix)))
            write_image(path, read_rgb(source), wanted[path])
    except OSError:  # removed or damaged: it is sampled again
        return False
    return True


def side_by_side(frames: Sequence[Image.Image]) -> Image.Image:
    """Return the first, the middle and the last frame in one image."""
    shown = [frames[0], frames[len(frames) // 2], frames[-1]]
    width, height = frames[0].size
    sheet = Image.new("RGB", (width * len(shown), height))
    for number, frame in enumerate(shown):
        sheet.paste(frame, (number * width, 0))
    return sheet


def as_mp4(frames: Sequence[Image.Image], fps: float, sound: Sound | None = None) -> bytes:
    """Encode as H.264 in yuv420p, and sound as AAC: the formats that all browsers and players have."""
    import av

    content = BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = frames[0].size
        # By default as many threads as CPUs, which changes the bits: a resumed run on another machine, or
        # under another `taskset`, wrote another file of equal frames. x264's macroblock tree reads memory
        # that it never wrote: 1 of 300 encodings of equal frames had other bytes.
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "18", "threads": "4", "mbtree": "0"}
        # Both tracks before anything is written, which begins with the header.
        track: Any = container.add_stream("aac", rate=sound.rate, layout=layout_of(sound)) if sound else None
        for frame in frames:
            picture = av.VideoFrame.from_image(frame).reformat(format="yuv420p")
            for plane in picture.planes:  # x264 reads beyond the width, where memory is what it was before
                np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:, plane.width :] = 0
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if sound is not None:
            for packet in encoded_sound(track, sound, len(frames) / fps):
                container.mux(packet)
    return content.getvalue()


def layout_of(sound: Sound) -> str:
    return "mono" if len(sound.waveform) == 1 else "stereo"


def encoded_sound(track: Any, sound: Sound, seconds: float) -> Iterator[Any]:
    """Yield the packets of sound, cut where the frames end."""
    import av

    part = np.ascontiguousarray(sound.waveform[:, : round(seconds * sound.rate)])
    whole: Any = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout_of(sound))
    whole.sample_rate, whole.pts, whole.time_base = sound.rate, 0, Fraction(1, sound.rate)
    cut = av.AudioResampler("fltp", layout_of(sound), sound.rate, frame_size=track.codec_context.frame_size)
    for given in (whole, None):
        for frame in cut.resample(given):
            yield from track.encode(frame)
    yield from track.encode(None)


def as_webp(frames: Sequence[Image.Image], fps: float) -> bytes:
    content = BytesIO()
    frames[0].save(
        content,
        "WEBP",
        save_all=True,
        append_images=frames[1:],
        duration=round(1000 / fps),
        loop=0,
        quality=QUALITY,
    )
    return content.getvalue()


Thumbnail = tuple[bytes, tuple[int, int]]
"""An encoded image, and its (width, height)."""


def thumbnail(image: Image.Image, edge_px: int, kind: str = "WEBP", **options: object) -> Thumbnail:
    """Shrink an image in place to a longer side of `edge_px`, and encode it."""
    image.thumbnail((edge_px, edge_px))
    content = BytesIO()
    image.save(content, kind, **options)
    return content.getvalue(), image.size


def clip_thumbnail(path: Path, edge_px: int = GIF_EDGE_PX, kind: str = "GIF", **options: object) -> Thumbnail:
    """The same of all frames of a run's WebP, animated. Raises OSError for a damaged one."""
    with opened(path) as image:
        first, *others = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
        duration = image.info.get("duration") or 100
    for frame in others:
        frame.thumbnail((edge_px, edge_px))
    return thumbnail(first, edge_px, kind, save_all=True, append_images=others, duration=duration, loop=0, **options)


def grid_file(validation: Path, step: int) -> Path:
    return validation / f"grid-{step:06d}.png"


def round_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def round_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and is_plain_folder(path)]
    return sorted(found, key=step_of_round)


def step_of_round(folder: Path) -> int:
    return int(folder.name[5:])


def clips_of_round(folder: Path, suffix: str) -> list[Path]:
    """Return the clips of a round of validation, as one kind of file."""
    return sorted(folder.glob(f"*{suffix}"))
