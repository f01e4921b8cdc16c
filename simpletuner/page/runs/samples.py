"""Prompts that are tried on a run from its page: `simpletuner sample` as a process, and its images."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from simpletuner.data.images.images import DECODE_ERRORS, read_header
from simpletuner.errors import SettingsError
from simpletuner.page.rendering import field, fields, folders_of
from simpletuner.page.runs.results import Exporting
from simpletuner.page.runs.watching import Watched
from simpletuner.runs.folder import RunFolder, open_run
from simpletuner.runs.gallery import WEIGHTS
from simpletuner.runs.images import MP4, ImageInfo, read_info
from simpletuner.runs.settings_record import HISTORY, images_of_sample
from simpletuner.settings.declared.errors import shorten
from simpletuner.system.numbers import count_noun
from simpletuner.training.validation.sample_requests import SAMPLES

FILE = re.compile(
    rf"(step-\d{{6,12}}-({'|'.join(WEIGHTS)})-\d{{1,20}}(-\d{{1,5}})?|[0-9a-f]{{24}}-({'|'.join(WEIGHTS)}))\.png"
)
"""Names that `simpletuner sample` gives."""
MOST_FILES, MOST_SHOWN = 2000, 12
EDGES_PX = ("160", "512")
OPTIONS = ("seed", "size", "strength", "checkpoint", "steps", "guidance")
LONGEST = 2000
# Of all images of a request.
MOST_IMAGE_BYTES = 32 << 20


@dataclass(frozen=True)
class TriedImage:
    """An image that was asked for: its name, how it was made, and when, which its address has."""

    name: str
    info: ImageInfo
    written: int

    @property
    def label(self) -> str:
        return "base" if self.info.weights == "base" else f"{self.info.weights}, step {self.info.step:,}"


def tried_images(run: RunFolder) -> list[list[TriedImage]]:
    """Return the images of the folder, newest first; those of one prompt, seed and size stand together."""
    if not run.holds_folder(SAMPLES):
        return []
    with os.scandir(run.path / SAMPLES) as entries:
        named = [each for each in islice(entries, MOST_FILES) if FILE.fullmatch(each.name)]
    files = [each for each in named if each.is_file(follow_symlinks=False)]
    found = [(each.stat(follow_symlinks=False).st_mtime_ns, each.name) for each in files]
    groups: dict[tuple[object, ...], list[TriedImage]] = {}
    for written, name in sorted(found, reverse=True)[:MOST_SHOWN]:
        if (info := info_of(run.path / SAMPLES / name)) is not None:
            key = (info.prompt, info.negative_prompt, info.seed, info.size, info.guidance, info.num_inference_steps)
            key = (*key, info.frames, info.given)
            groups.setdefault(key, []).append(TriedImage(name, info, written))
    return [sorted(each, key=lambda image: (image.info.weights != "base", -image.written)) for each in groups.values()]


def info_of(path: Path) -> ImageInfo | None:
    try:
        return read_info(path)[1]
    except OSError:  # damaged, or removed meanwhile
        return None


def try_prompt(request: Request) -> Response:
    """Begin to sample a prompt; the page of the run shows the images."""
    run = open_run(folders_of(request), field(request, "run"))
    prompt = field(request, "prompt").strip()
    if not prompt:
        raise SettingsError("which prompt?", "write what the image should show")
    images = given_images(request, run)
    sampling: Exporting = request.app.state.sampling
    sampling.begin(run, shorten(prompt), ["sample", str(run.path), *arguments(request, prompt)], images)
    return HTMLResponse(headers={"HX-Trigger": json.dumps({"attend": {"id": "tried-title"}})})


def arguments(request: Request, prompt: str) -> Sequence[str]:
    """Return the command's options, each with its value in one word: none is taken for another option."""
    given = {name: field(request, name).strip() for name in OPTIONS}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    if base := field(request, "base"):  # as the user was shown it, and agreed
        flags.append(f"--pretrained_model_name_or_path={base}")
    if longest := next((each for each in (prompt, *flags) if len(each) > LONGEST), ""):
        raise SettingsError(f"{shorten(longest)} has {len(longest):,} letters", f"up to {LONGEST:,} are taken here")
    return [f"--prompt={prompt}", *flags, *["--with_base"] * (field(request, "with_base") == "on")]


def images_taken(run: RunFolder) -> tuple[int, int]:
    """Return the fewest and most images that the model of a run samples from."""
    return images_of_sample(run.path / HISTORY) if run.file(HISTORY) is not None else (0, 0)


def given_images(request: Request, run: RunFolder) -> list[bytes]:
    """Return the images of a form, each in URL-safe base64. Raises SettingsError for other headers.

    They are decoded in a process of its own: an image may take gigabytes.
    """
    texts, (least, most) = fields(request, "image"), images_taken(run)
    if not least <= len(texts) <= most:
        takes = f"{least} to {most}" if least < most else str(most) if most else "none"
        given = count_noun(len(texts), "image")
        raise SettingsError(f"{given} given, and the model of {run.name} takes {takes}", "choose others")
    if sum(map(len, texts)) * 3 // 4 > MOST_IMAGE_BYTES:
        raise SettingsError(f"more than {MOST_IMAGE_BYTES >> 20} MiB of images", "make them smaller")
    images = []
    for number, text in enumerate(texts, 1):
        try:
            images.append(base64.b64decode(text + "=" * (-len(text) % 4), altchars="-_", validate=True))
            read_header(BytesIO(images[-1]))
        except (binascii.Error, *DECODE_ERRORS) as error:
            raise SettingsError(f"image {number} cannot be read: {error}", "choose one that opens elsewhere") from None
    return images


def show_image(request: Request) -> Response:
    """Send an image as WebP; a clip's moves."""
    edge = field(request, "edge")
    if edge not in EDGES_PX:
        raise no_image()
    run, path = image_of(request)
    watched: Watched = request.app.state.watched
    known = watched.of(run)
    with known.lock:
        content = known.gallery.thumbnail(path, int(edge))
    return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})


def play_clip(request: Request) -> Response:
    run, path = image_of(request)
    return send_clip(run, f"{SAMPLES}/{path.with_suffix(MP4).name}")


def image_of(request: Request) -> tuple[RunFolder, Path]:
    """The PNG that a request names, at a place put together here: its name cannot lead elsewhere."""
    run, name = open_run(folders_of(request), field(request, "run")), field(request, "name")
    path = run.file(f"{SAMPLES}/{name}") if FILE.fullmatch(name) else None
    if path is None:
        raise no_image()
    return run, path


def send_clip(run: RunFolder, name: str) -> Response:
    """Send an MP4 of a run, with its sound where it has one; a player asks for ranges of it."""
    if (clip := run.file(name)) is None:
        raise no_image()
    return FileResponse(clip, media_type="video/mp4", headers={"Cache-Control": "private, max-age=3600"})


def no_image() -> SettingsError:
    return SettingsError("there is no such image", "the page of the run shows those there are")


ROUTES = [
    Route("/runs/sample", try_prompt, methods=["POST"]),
    Route("/runs/sample/image", show_image),
    Route("/runs/sample/clip", play_clip),
]
