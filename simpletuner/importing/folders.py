"""Folders of images and files of prompts of several trainers: their keys, captions, sizes and lines."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any

from simpletuner.data.config.places import id_of_folder
from simpletuner.data.storage.storage import is_system_folder
from simpletuner.errors import SettingsError
from simpletuner.importing.foreign_trainer import CACHES, Translation, first_existing
from simpletuner.settings.files.config_files import NotParsed
from simpletuner.settings.files.formats import read_text

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".jxl", ".avif", ".heic", ".tif", ".tiff", ".gif")
VIDEOS = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
"""Files that these trainers, or we, read."""
EXAMPLES = 100
"""Caption files that are read to find one of several lines."""


def folder_entry(found: Translation, path_key: str, repeats_key: str) -> None:
    """Take the folder of a dataset and its passes: `repeats` are passes besides the first here."""
    path, passes = found.values.pop(path_key, None), found.number(repeats_key, 1)
    name = str(path or "").replace("{env:", "").replace("}", "").rstrip("/\\")
    found.defaults |= {
        "id": id_of_folder(re.split(r"[/\\]", name)[-1]),
        "type": "local",
        "instance_data_dir": path,
    }
    if isinstance(path, str) and PureWindowsPath(path).drive:
        found.remark(path_key, "a path of Windows: write where the folder is on this machine")
    if not passes.is_integer():
        found.lose(repeats_key, "passes are whole here: another number of them is not offered")
    elif passes > 1:
        found.put("repeats", repeats_key, int(passes) - 1)
    found.values.pop(repeats_key, None)


def condition(found: Translation, path: object, kind: str, **keys: object) -> None:
    """Add a folder of masks or references to a dataset, `kind` being its conditioning_type."""
    other = Translation(found.trainer, found.file, {}, found.lines)
    other.defaults = {"id": "", "type": "local", "instance_data_dir": path, "dataset_type": "conditioning"}
    other.defaults |= {"conditioning_type": kind, **keys}
    found.conditions.append(other)


def size_of(resolution: object, is_bucketed: bool) -> dict[str, object]:
    """Return the keys of a size: the edge of a square, or width and height, whose area counts.

    Without buckets all images are cropped to that shape.
    """
    crop: dict[str, Any] = {} if is_bucketed else {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    if isinstance(resolution, list) and len(resolution) == 2 and all(type(side) is int and side for side in resolution):
        width, height = resolution
        if crop and width != height:
            crop |= {"crop_aspect": "closest", "crop_aspect_buckets": [round(width / height, 4)]}
        resolution = math.isqrt(abs(width * height))
    return {"resolution": resolution, "resolution_type": "pixel_area", **crop}


def closest(sizes: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Return the keys of a dataset whose images take the nearest of these sizes, cropped in the centre.

    Aspects beyond 10 are left out: no dataset here has such.
    """
    aspects = sorted({round(width / height, 4) for width, height in sizes if 0.1 < width / height < 10})
    return {"crop": True, "crop_style": "center", "crop_aspect": "closest", "crop_aspect_buckets": aspects}


def sizes_of_area(area: int, step: int, widths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the buckets of sd-scripts (model_util.py:1316) and musubi-tuner: widths with the height that
    fits, and both turned."""
    for width in widths:
        height = area // width // step * step
        if width > 0 < height:
            yield from ((width, height), (height, width))


def files_in(path: Any) -> list[Path]:
    """Return the files of a folder that is here, relative to the current one."""
    try:
        return sorted(each for each in Path(path).iterdir() if each.is_file()) if path else []
    except (OSError, TypeError, ValueError):
        return []


# Suffixes of latents and text embeddings that other programs have cached.
CACHED = (".pt", ".npz", ".safetensors", ".arrow")


def has_caches(path: object) -> bool:
    """True if one of the first files below a folder is a cache of another program."""
    with suppress(OSError, TypeError, ValueError):
        return any(each.suffix in CACHED for each in islice(Path(str(path)).rglob("*") if path else (), EXAMPLES))
    return False


def caches(found: Translation, key: str) -> None:
    """Say of a folder of caches that it is not read: as something to look at where it is here."""
    found.look(key, CACHES) if has_caches(found.get(key)) else found.drop([key], CACHES)


def images_of(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in IMAGES]


def captioned(image: Path, suffix: str) -> bool:
    """True if an image has a caption file of its name that is not empty."""
    with suppress(OSError):
        return bool(image.with_suffix(suffix).read_bytes().strip())
    return False


def stills_and_clips(path: object, video: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the additions to a folder's entry, for its stills and for its clips, which are two datasets here.

    Without a block `video` all of its files are stills; both are yielded for a folder that is not here.
    """
    suffixes = {file.suffix.lower() for file in files_in(path)}
    has_clips = bool(video) and (not suffixes or not suffixes.isdisjoint(VIDEOS))
    if not has_clips or not suffixes or not suffixes.isdisjoint(IMAGES):
        yield {}
    if has_clips:
        yield {"dataset_type": "video", "video": dict(video)}


def subfolders(found: Translation, key: str) -> None:
    """Name images below a folder of a trainer that does not read subfolders."""
    path = found.defaults["instance_data_dir"]
    with suppress(OSError, ValueError, TypeError):
        inner = (each for each in Path(path).rglob("*") if path and each.parent != Path(path))
        inner = (each for each in inner if not any(map(is_system_folder, each.relative_to(path).parts)))
        if image := next((each for each in inner if each.suffix.lower() in IMAGES), None):
            reason = f"images in subfolders, such as {image}, are not read there, but here: move them out of it"
            found.remark(key, reason, path, "lost")


def elsewhere(run: Translation, key: str, otherwise: str) -> None:
    """Lose a path of Windows, which is nowhere on this machine."""
    path = run.get(key)
    if isinstance(path, str) and PureWindowsPath(path).drive and not Path(path).exists():
        run.lose(key, f"a path of Windows: write where it is on this machine; otherwise {otherwise}")


def choices_in(files: Sequence[Path]) -> Path | None:
    """Return one of the first caption files that has `{a|b}`, of which sd-scripts draws one."""
    for file in files[:EXAMPLES]:
        with suppress(OSError):
            if re.search(rb"\{[^{}]*\|[^{}]*\}", file.read_bytes()):
                return file
    return None


def has_several_lines(files: Sequence[Path]) -> bool:
    """True if one of the first caption files has more than one line."""
    for file in files[:EXAMPLES]:
        with suppress(OSError):
            if file.read_bytes().strip().count(b"\n"):
                return True
    return False


BLANKS_MATTER = ("qwen_image", "z_image", "flux2", "krea2", "ernie", "lumina2", "ltxvideo2")
"""Families whose tokenizers tell one blank from two."""


def blanks(run: Translation, found: Translation, key: str) -> None:
    """Name a caption file that is one text there; here its empty lines and outer blanks are left out."""
    if run.defaults.get("model_family") not in BLANKS_MATTER:
        return
    texts = [file for file in files_in(found.defaults["instance_data_dir"]) if file.suffix == ".txt"]
    for file in texts[:EXAMPLES]:
        with suppress(OSError, UnicodeDecodeError):
            text = file.read_text("utf-8").strip()
            if text != "\n".join(line.strip() for line in text.split("\n") if line.strip()):
                found.remark(key, f"empty lines, and blanks around a line, are left out here, such as those of {file}")
                return


def rule(pattern: str, text: str) -> str:
    """Return a rule of caption_filter_list that puts a text in the place of a pattern."""
    return f"s/{pattern}/{text.replace(chr(92), chr(92) * 2).replace('/', f'{chr(92)}/')}/"


def put_around(found: Translation, key: str, before: str, behind: str = "") -> None:
    """Put texts in front of captions and behind them, or of the phrase that all images have."""
    if (phrase := found.defaults.get("instance_prompt")) is not None:
        found.put("instance_prompt", key, f"{before}{phrase}{behind}")
        return
    rules = [rule("^", before)] if before else []
    found.put("caption_filter_list", key, rules + ([rule("$", behind)] if behind else []))


NEAREST = "an image takes the size of the nearest w/h there, and of the nearest ratio here: one between two may differ"
"""A remark on buckets of sd-scripts and musubi-tuner."""

# Options behind a prompt of sd-scripts and musubi-tuner (train_util.py, line_to_prompt_dict) by our keys.
FLAGS = {
    "n": "negative_prompt",
    "d": "seed",
    "s": "num_inference_steps",
    "l": "guidance",
}
FLAG = re.compile(r" --(\w+) ?")


def prompt_of_line(line: str, flags: Mapping[str, str] = FLAGS) -> tuple[dict[str, object], list[str]]:
    """Return a prompt with our keys, and the options that have none here: `a cat --w 768 --h 512 --d 1`."""
    parts = FLAG.split(line.strip())
    prompt: dict[str, Any] = {"prompt": parts[0]}
    given = dict(zip(parts[1::2], (each.strip() for each in parts[2::2]), strict=True))
    with suppress(ValueError):
        if "w" in given or "h" in given:
            width, height = int(given.pop("w", 512)), int(given.pop("h", 512))
            prompt["resolution"] = f"{width}x{height}" + (f"@{given.pop('f')}" if "f" in given else "")
    for name in list(given):
        if key := flags.get(name):
            prompt[key] = given.pop(name) if key == "negative_prompt" else as_number(given.pop(name))
    return prompt, sorted(given)


def as_number(text: str) -> object:
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text


def prompts_of_lines(run: Translation, key: str, lines: Sequence[str]) -> None:
    """Take prompts, one a line; lines that begin with # are comments."""
    others: set[str] = set()
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            prompt, unknown = prompt_of_line(line)
            run.prompts.append(prompt)
            others |= set(unknown)
    if others:
        run.remark(key, f"{shlex.join(f'--{name}' for name in sorted(others))} of its prompts have no place here")
    run.drop([key], "its prompts are those of validation_prompt_file")


def prompts_of_file(run: Translation, key: str) -> None:
    name = run.get(key)
    if not isinstance(name, str) or not name:
        run.drop([key], "no prompts")
        return
    file = None
    with suppress(SettingsError):  # a prompt, which can be no path
        file = first_existing(name, (Path(), run.file.parent))
    if file is None or file.suffix.lower() != ".txt":
        why = "is not here" if file is None else "is no text file of a prompt per line"
        run.look(key, f"{name} {why}: write its prompts as validation_prompt")
        return
    try:
        lines = read_text(file).splitlines()
    except (OSError, NotParsed) as error:
        raise SettingsError(f"cannot read {file}: {error}", "correct that path") from None
    prompts_of_lines(run, key, lines)
