"""Folders of numbered images as clips: `clip_01/0001.png`, `clip_01/0002.png`, ...

Such a folder is known by its name with a slash at the end, which no file has.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import PurePosixPath
from typing import BinaryIO

from PIL import Image

from simpletuner.data.images.image_formats import VIDEO_SUFFIXES, read_suffixes
from simpletuner.data.images.images import DECODE_ERRORS, ImageHeader, read_header, read_rgb
from simpletuner.settings.values.shape import Shape

READ_FRAMES = "folders of numbered JPEG, PNG, AVIF, TIFF or BMP images"
NUMBER = re.compile(r"([0-9]+)[^0-9]*$")
"""The last number of a name without its suffix."""
Opener = Callable[[str], BinaryIO]


def is_frame_folder(name: str) -> bool:
    return name.endswith("/")


def frame_suffixes() -> frozenset[str]:
    # WebP and GIF are videos of their own.
    return read_suffixes() - VIDEO_SUFFIXES


def in_order(names: Sequence[str]) -> list[str]:
    """Sort frames by their numbers. Raises ValueError if one has none, or one is missing or there twice."""
    found: dict[int, str] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        number = NUMBER.search(path.stem)
        if number is None:
            raise ValueError(f"has an image without a number, {path.name}")
        if (twice := found.setdefault(int(number[1]), name)) != name:
            raise ValueError(
                f"has two images with the number {int(number[1])}, {PurePosixPath(twice).name} and {path.name}"
            )
    if not found:
        raise ValueError("has no image that is read")
    first, last = min(found), max(found)
    if missing := last - first + 1 - len(found):
        gap = next(number for number in range(first, last) if number not in found)
        raise ValueError(f"lacks frame {gap} of {first} to {last}" + f" and {missing - 1:,} more" * (missing > 1))
    return [found[number] for number in range(first, last + 1)]


def read_folder_header(names: Sequence[str], open_file: Opener) -> ImageHeader:
    """Return the size of the first frame, and how many there are; the files do not say how many are shown per
    second.

    Raises one of DECODE_ERRORS.
    """
    frames = in_order(names)
    with opened(frames[0], open_file) as file:
        return ImageHeader(read_header(file).size, len(frames) > 1, len(frames))


def read_folder_frames(
    names: Sequence[str],
    open_file: Opener,
    numbers: Sequence[int],
    original: Shape,
    smallest: tuple[int, int],
    at_once: int = 1,
) -> Iterator[Image.Image]:
    """Yield the frames with these numbers, counted from 0, as `read_rgb` does; `at_once` are opened at the
    same time.

    Raises one of DECODE_ERRORS.
    """
    frames = in_order(names)
    if len(frames) != original.frames:
        raise ValueError(f"has {len(frames)} frames, not {original.frames}: the table is wrong, or the folder changed")
    chosen = [frames[number] for number in numbers]
    with prefetched_openers(chosen, open_file, at_once) as open_next:
        for frame in chosen:
            with opened(frame, open_next) as file:
                if (size := read_header(file).size) != original.size:
                    raise ValueError("has {}x{} px, and the folder {}x{}".format(*size, *original.size))
                file.seek(0)
                image = read_rgb(file, smallest)
            yield image


@contextmanager
def prefetched_openers(frames: Sequence[str], open_file: Opener, at_once: int) -> Iterator[Opener]:
    """Yield an opener of these frames, in order, with `at_once` of them being opened in threads."""
    if at_once == 1:
        yield open_file
        return
    left, running = iter(frames), deque[Future[BinaryIO]]()
    with ThreadPoolExecutor(at_once, thread_name_prefix="frame") as pool:

        def open_next(_: str) -> BinaryIO:
            running.extend(pool.submit(open_file, each) for each in islice(left, at_once - len(running)))
            return running.popleft().result()

        yield open_next


@contextmanager
def opened(frame: str, open_file: Opener) -> Iterator[BinaryIO]:
    """Open a frame; what is wrong with it becomes a ValueError that names it."""
    try:
        with open_file(frame) as file:
            yield file
    except DECODE_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"frame {PurePosixPath(frame).name}: {reason or type(error).__name__}") from None
