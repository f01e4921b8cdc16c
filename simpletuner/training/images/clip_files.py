"""Validation clips: an MP4, an animated WebP for places that play no video, and a picture of three frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageSequence

from simpletuner.data.images.video_formats import INSTALL
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.cache_files import is_plain_folder
from simpletuner.system.files.regular_files import read_file
from simpletuner.training.images.image_files import ImageInfo, opened, read_info, read_rgb, to_image, write_image

if TYPE_CHECKING:
    from torch import Tensor

QUALITY = 80
"""Quality of the WebP, from 0 to 100: what is lost of a frame is hardly seen while it moves."""
# All GIFs of a run are in TensorBoard's event file, and none is compressed as a video is.
GIF_EDGE_PX = 384
MP4, WEBP = ".mp4", ".webp"


def require_video_writer() -> None:
    """Raise EnvironmentNotReady where nothing can write an MP4."""
    if find_spec("av") is None:
        raise EnvironmentNotReady("validation clips need PyAV, which is not installed", INSTALL)


def write_sample(path: Path, pixels: Tensor, info: ImageInfo) -> None:
    """Write what the VAE decoded, in -1..1: an image (1CHW), or a clip (1CFHW) whose files have the same stem.

    The PNG is last: where it is, all are.
    """
    if pixels.ndim == 4:
        write_image(path, to_image(pixels), info)
        return
    frames = [to_image(pixels[:, :, number]) for number in range(pixels.shape[2])]
    write_file(path.with_suffix(MP4), as_mp4(frames, info.fps))
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


def as_mp4(frames: Sequence[Image.Image], fps: float) -> bytes:
    """Encode as H.264 in yuv420p, the format that all browsers and players have."""
    import av

    content = BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = frames[0].size
        # By default as many threads as CPUs, which changes the bits: a resumed run on another machine, or under another
        # `taskset`, wrote another file of equal frames.
        # x264's macroblock tree reads memory that it never wrote: 1 of 300 encodings of equal frames had other bytes.
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "18", "threads": "4", "mbtree": "0"}
        for frame in frames:
            picture = av.VideoFrame.from_image(frame).reformat(format="yuv420p")
            for plane in picture.planes:  # x264 reads beyond the width, where memory is what it was before
                np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:, plane.width :] = 0
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return content.getvalue()


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


def clip_thumbnail(path: Path, edge: int) -> tuple[bytes, tuple[int, int]]:
    """Return a WebP of a run smaller, all of its frames, and its size. Raises OSError for a damaged one."""
    frames, duration = read_webp(path)
    for frame in frames:
        frame.thumbnail((edge, edge))
    return as_webp(frames, 1000 / duration), frames[0].size


def as_gif(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return a WebP of a run as a GIF of moderate size, and its size. Raises OSError for a damaged one."""
    (first, *others), duration = read_webp(path)
    for frame in (first, *others):
        frame.thumbnail((GIF_EDGE_PX, GIF_EDGE_PX))
    content = BytesIO()
    first.save(content, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
    return content.getvalue(), first.size


def read_webp(path: Path) -> tuple[list[Image.Image], int]:
    """Return the frames of a clip, and the milliseconds that each is shown. Raises OSError for a damaged one."""
    with opened(path) as image:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
        return frames, image.info.get("duration") or 100


def grid_file(validation: Path, step: int) -> Path:
    """Return the file of the grid of a round, which may not be there."""
    return validation / f"grid-{step:06d}.png"


def round_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def round_folders(folder: Path) -> list[Path]:
    """Return the folders of all rounds that are there, in the order of their steps."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and is_plain_folder(path)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def clips_of_round(folder: Path, suffix: str) -> list[Path]:
    """Return the clips of a round of validation, as one kind of file."""
    return sorted(folder.glob(f"*{suffix}"))
