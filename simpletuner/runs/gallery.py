"""Validation images of all rounds by prompt, as thumbnails that are embedded in the report."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from simpletuner.runs.images import (
    MP4,
    QUALITY,
    SHOWN_PIXELS,
    WEBP,
    ImageInfo,
    Thumbnail,
    clip_thumbnail,
    read_info,
    read_rgb,
    round_folders,
    thumbnail,
)

# In the report. Of more rounds some evenly chosen ones are shown, the first and the last among them.
MAX_IMAGES = 600
# Of all thumbnails, which base64 makes a third larger.
MAX_BYTES = 12 << 20
# Longer sides of thumbnails: the first at which all together are within MAX_BYTES.
EDGES_PX = (384, 256, 160, 96)
WEIGHTS = ("base", "trained", "ema")
FILE = re.compile(rf"(?P<weights>{'|'.join(WEIGHTS)})-(?P<name>\d+(-\d+x\d+(@\d+)?)?)\.png")


@dataclass(frozen=True)
class GalleryImage:
    """An image of a round: its file below output_dir, how it was made, and as a thumbnail."""

    path: Path
    href: str
    info: ImageInfo
    data: str = ""
    """`data:` URI."""
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PromptRounds:
    """Images of one prompt, seed and size: the one before training, and by step those of all weights.

    No image of step 0 is the one before training again.
    """

    prompt: str
    negative_prompt: str
    note: str
    before: GalleryImage | None
    rounds: list[tuple[int, list[GalleryImage]]]


class Gallery:
    """Collect the images of a run, again and again as rounds are added; thumbnails are kept in memory."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.infos: dict[Path, ImageInfo] = {}
        self.encoded: dict[tuple[Path, int], Thumbnail] = {}
        self.digests: dict[Path, bytes] = {}

    def collect(self) -> tuple[list[PromptRounds], str]:
        """Return the prompts, and a sentence about what is left out, if anything is."""
        kept, note = self.choose()
        return self._with_thumbnails(kept), note

    def collect_last(self) -> list[PromptRounds]:
        """Return the prompts with the images of their last round alone."""
        kept, _ = self.choose()
        return self._with_thumbnails([replace(each, before=None, rounds=each.rounds[-1:]) for each in kept])

    def choose(self) -> tuple[list[PromptRounds], str]:
        """Return the same without thumbnails."""
        return limit(self._group())

    def thumbnail(self, path: Path, edge: int) -> bytes:
        """Return an image of the run as WebP, at most so many pixels on its longer side."""
        return self._thumbnail(path, edge)[0]

    def _group(self) -> list[PromptRounds]:
        """Group images by what they are made from: a start may have changed prompts, not numbers."""
        groups: dict[tuple[object, ...], dict[int, dict[str, GalleryImage]]] = {}
        for step, path in self._files():
            try:
                info = self._info(path, step)
            except OSError:  # damaged, or removed meanwhile
                continue
            size = (info.size, info.frames)
            key = (info.prompt, info.negative_prompt, info.seed, size, info.guidance, info.num_inference_steps)
            opened = path.with_suffix(MP4) if info.frames > 1 else path
            shown = GalleryImage(path, opened.relative_to(self.output).as_posix(), info)
            groups.setdefault(key, {}).setdefault(step, {})[info.weights] = shown
        return [prompt_rounds(rounds, self._is_same) for rounds in groups.values()]

    def _is_same(self, one: GalleryImage, two: GalleryImage) -> bool:
        return one.path == two.path or self._digest(one.path) == self._digest(two.path)

    def _digest(self, path: Path) -> bytes:
        """Return a hash of an image's pixels; a unique one if it is damaged."""
        if path not in self.digests:
            content = str(path).encode()
            with suppress(OSError):
                content = read_rgb(path, SHOWN_PIXELS).tobytes()
            self.digests[path] = xxhash.xxh3_128_digest(content)
        return self.digests[path]

    def _files(self) -> Iterator[tuple[int, Path]]:
        for folder in round_folders(self.output / "validation"):
            files = {path: found for path in folder.iterdir() if (found := FILE.fullmatch(path.name))}
            files = {path: found for path, found in files.items() if not path.is_symlink()}
            yield from ((int(folder.name[5:]), path) for path in sorted(files, key=lambda path: order(files[path])))

    def _info(self, path: Path, step: int) -> ImageInfo:
        """Read an image's metadata; without any, take prompt number and weights from its name."""
        if path not in self.infos:
            (width, height), info = read_info(path)
            weights, _, name = path.stem.partition("-")
            unknown = ImageInfo(f"prompt {int(name[:2])}", "", 0, 0, 0, width, height, step, weights)
            self.infos[path] = info or unknown
        return self.infos[path]

    def _with_thumbnails(self, prompts: Sequence[PromptRounds]) -> list[PromptRounds]:
        images = [image for prompt in prompts for image in images_of(prompt)]
        shown = {image.path for image in images}
        self.encoded = {key: made for key, made in self.encoded.items() if key[0] in shown}
        edge = next((edge for edge in EDGES_PX if self._bytes_at(images, edge) <= MAX_BYTES), EDGES_PX[-1])
        return [
            replace(
                prompt,
                before=next(self._embedded([prompt.before] if prompt.before else [], edge), None),
                rounds=[(step, [*self._embedded(shown, edge)]) for step, shown in prompt.rounds],
            )
            for prompt in prompts
        ]

    def _bytes_at(self, images: Sequence[GalleryImage], edge: int) -> int:
        total = 0
        for _, (content, _) in self._decodable(images, edge):
            total += len(content)
            if total > MAX_BYTES:  # do not encode the others for nothing
                break
        return total

    def _embedded(self, images: Iterable[GalleryImage], edge: int) -> Iterator[GalleryImage]:
        for image, (content, size) in self._decodable(images, edge):
            yield replace(image, data=f"data:image/webp;base64,{base64.b64encode(content).decode()}", size=size)

    def _decodable(self, images: Iterable[GalleryImage], edge: int) -> Iterator[tuple[GalleryImage, Thumbnail]]:
        # Damaged and too large ones are left out.
        for image in images:
            with suppress(OSError):
                yield image, self._thumbnail(image.path, edge)

    def _thumbnail(self, path: Path, edge: int) -> Thumbnail:
        if (path, edge) not in self.encoded:
            if (clip := path.with_suffix(WEBP)).is_file() and not clip.is_symlink():
                self.encoded[path, edge] = clip_thumbnail(clip, edge, "WEBP", quality=QUALITY)
            else:
                self.encoded[path, edge] = thumbnail(read_rgb(path, SHOWN_PIXELS), edge, quality=82)
        return self.encoded[path, edge]


def order(found: re.Match[str]) -> tuple[str, int]:
    """Sort by prompt, and then as in the grids."""
    return found["name"], WEIGHTS.index(found["weights"])


def prompt_rounds(
    rounds: dict[int, dict[str, GalleryImage]], is_same: Callable[[GalleryImage, GalleryImage], bool]
) -> PromptRounds:
    """Images of one prompt; before training are those without the LoRA, or else those of step 0.

    Whatever of step 0 differs from them is a round, as of a LoRA that continues another (lora_init).
    """
    [*_, last] = rounds.values()
    info = next(iter(last.values())).info
    at_start = rounds.get(0, {})
    start = at_start.get("base") or at_start.get("trained")
    before = last.get("base") or start
    made = f"seed {info.seed} · guidance {info.guidance:g} · {info.num_inference_steps} denoising steps"
    known = info.num_inference_steps > 0
    shown = {step: [each for weights, each in images.items() if weights != "base"] for step, images in rounds.items()}
    if start is not None:
        shown[0] = [image for image in shown[0] if not is_same(start, image)]
    trained = [(step, images) for step, images in shown.items() if images]
    size = f"{info.width}×{info.height}" + (f" · {info.frames} frames" if info.frames > 1 else "")
    return PromptRounds(info.prompt, info.negative_prompt, f"{made} · {size}" if known else size, before, trained)


def images_of(prompt: PromptRounds) -> list[GalleryImage]:
    return [*([prompt.before] if prompt.before else []), *(image for _, shown in prompt.rounds for image in shown)]


def limit(prompts: list[PromptRounds]) -> tuple[list[PromptRounds], str]:
    """Leave out rounds, and where that is not enough prompts, until there are at most MAX_IMAGES images."""
    if sum(len(images_of(prompt)) for prompt in prompts) <= MAX_IMAGES:
        return prompts, ""
    # So many that each of them has eight images at least.
    kept = prompts[: MAX_IMAGES // 8]
    per_prompt = MAX_IMAGES // len(kept)
    rounds = max(len(prompt.rounds) for prompt in kept)
    fewer = [replace(prompt, rounds=evenly(prompt.rounds, per_prompt)) for prompt in kept]
    shown = max(len(prompt.rounds) for prompt in fewer)
    notes = [f"{shown} of {rounds:,} rounds"] if shown < rounds else []
    notes += [f"the first {len(kept)} of {len(prompts):,} prompts"] if len(kept) < len(prompts) else []
    return fewer, f"Shown are {' and '.join(notes)}; all images are in validation/."


def evenly(rounds: list[tuple[int, list[GalleryImage]]], images: int) -> list[tuple[int, list[GalleryImage]]]:
    """Choose rounds with at most so many images: every second, fourth, ... and the last.

    So most of those that are chosen stay so while rounds are added, and few thumbnails are made again.
    """
    most = max(2, (images - 1) // max((len(shown) for _, shown in rounds), default=1))
    stride = 1
    while len(chosen := rounds[:-1:stride]) + 1 > most:
        stride *= 2
    return [*chosen, *rounds[-1:]]
