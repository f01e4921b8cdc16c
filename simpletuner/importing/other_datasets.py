"""Dataset files of kohya's sd-scripts and of diffusion-pipe as entries of ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.data.config.places import id_of_folder
from simpletuner.importing.original import Effect
from simpletuner.importing.other_trainers import UNKNOWN

Lost = tuple[str, Any, str, Effect]
"""A name there, its value, why it has no place here, and what that changes."""
KOHYA_IDLE = ("batch_size", "enable_bucket", "cache_info", "bucket_reso_steps")
KOHYA_MEANT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("shuffle_caption", "flip_aug", "color_aug", "random_crop", "is_reg", "bucket_no_upscale"), (False,)
    ),
    **dict.fromkeys(("alpha_mask", "enable_wildcard"), (False,)),
    **dict.fromkeys(("caption_tag_dropout_rate", "caption_dropout_every_n_epochs", "token_warmup_step"), (0, 0.0)),
    **dict.fromkeys(("caption_prefix", "caption_suffix", "keep_tokens_separator", "secondary_separator"), ("", None)),
    "keep_tokens": (0,),
    "caption_extension": (".txt",),
}
"""Values with which a name asks for what happens here anyway."""
KOHYA_KEYS = {"caption_dropout_rate": "caption_dropout_probability"}
OF_ALL = ("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "caption_extension")
"""Names of a training file that hold for datasets which are silent about them."""
LONG = math.sqrt(2)
"""Longer side of a bucket of 2:1 by the edge of its square; few pictures are longer."""
PIPE_IDLE = ("enable_ar_bucket", "resolutions", "frame_buckets")
PIPE_BUCKETS = ("min_ar", "max_ar", "num_ar_buckets", "ar_buckets")
CAPTIONS = "captions.json"
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".jxl", ".avif", ".heic", ".tif", ".tiff", ".gif")
VIDEOS = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
"""Files that both of them, or we, read."""


def kohya_entries(
    values: Mapping[str, Any], lost: list[Lost], training: Mapping[str, object] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield an entry for each subset, after adding to `lost` what has no place here.

    Values of the training file hold where the dataset file has none.
    """
    of_run = {name: value for name, value in (training or {}).items() if name in OF_ALL}
    general = {**of_run, **(values.get("general") or {})}
    for dataset in values["datasets"]:
        seen = set()
        for subset in dataset.get("subsets") or [{}]:
            merged = {**general, **dataset, **subset}
            merged.pop("subsets", None)
            path, repeats = merged.get("image_dir"), merged.get("num_repeats", 1)
            if path is not None and (path in seen or not repeats):
                why = "with 0 repeats" if not repeats else "that is there twice in a dataset"
                lost.append(("image_dir", path, f"sd-scripts leaves out a folder {why}, and so is it here", "look"))
                continue
            seen.add(path)
            yield kohya_entry(merged, lost)


def kohya_entry(given: dict[str, Any], lost: list[Lost]) -> dict[str, Any]:
    path = given.pop("image_dir", None)
    entry = folder(path, given.pop("num_repeats", 1))
    resolution, is_bucketed = given.pop("resolution", 512), bool(given.get("enable_bucket"))
    if isinstance(resolution, str):
        resolution = [int(side) if side.strip().isdigit() else side for side in resolution.split(",")]
        resolution = resolution[0] if len(resolution) == 1 else resolution
    if isinstance(resolution, list) and len(set(resolution)) > 1 and not is_bucketed:
        lost.append(("resolution", resolution, "without buckets all images are cropped to squares here", "lost"))
    entry |= size(resolution, is_bucketed)
    limits = [
        ("min_bucket_reso", given.pop("min_bucket_reso", 256)),
        ("max_bucket_reso", given.pop("max_bucket_reso", 1024)),
    ]
    lost += bucket_limits(entry["resolution"], dict(limits)) if is_bucketed else []
    entry |= kohya_captions(given, path, lost)
    lost += subfolders(path)
    for name, value in given.items():
        is_meant = value in KOHYA_MEANT.get(name, ()) or (name == "keep_tokens" and not given.get("shuffle_caption"))
        if name in KOHYA_KEYS:
            entry[KOHYA_KEYS[name]] = value
        elif name not in KOHYA_IDLE and not is_meant:
            reason = "captions are read from .txt files" if name == "caption_extension" else UNKNOWN
            lost.append((name, value, reason, "lost"))
    return entry


def kohya_captions(given: dict[str, Any], path: object, lost: list[Lost]) -> dict[str, Any]:
    """Translate the keys that say where captions come from, and remove them from `given`."""
    extension = str(given.pop("caption_extension", "") or "")
    # sd-scripts adds the dot, and has .caption by itself.
    suffix = f".{extension.lstrip('.')}" if extension else ".caption"
    tokens = given.pop("class_tokens", None)
    files = [file for file in files_in(path) if file.suffix == suffix]
    if tokens is not None and (files or (suffix == ".txt" and not files_in(path))):
        lost.append(
            (
                "class_tokens",
                tokens,
                f"images with a {suffix} file have that caption there, and the others this phrase",
                "lost",
            )
        )
    elif tokens is not None:
        if not files_in(path):
            lost.append(
                ("class_tokens", tokens, f"the caption of all images here; there {suffix} files go before it", "look")
            )
        return {"caption_strategy": "instanceprompt", "instance_prompt": tokens}
    if suffix != ".txt":
        given["caption_extension"] = suffix
    if given.get("enable_wildcard"):
        return {"caption_lines": "alternatives"}
    if any(len(file.read_bytes().split()) and file.read_bytes().strip().count(b"\n") for file in files[:EXAMPLES]):
        lost.append(
            (
                "enable_wildcard",
                False,
                "of a caption file only the first line is read, as there (caption_lines = first)",
                "look",
            )
        )
    return {"caption_lines": "first"}


EXAMPLES = 100
"""Caption files that are read to find one of several lines."""


def bucket_limits(edge: object, limits: Mapping[str, object]) -> Iterator[Lost]:
    """Yield the limits that a bucket of 2:1 passes: sides within them are another set of sizes."""
    if (
        isinstance(edge, int)
        and isinstance(limits["max_bucket_reso"], int)
        and isinstance(limits["min_bucket_reso"], int)
    ):
        reason = "there no side of a bucket passes it; here buckets have the area of resolution, whatever their sides"
        if edge * LONG > limits["max_bucket_reso"]:
            yield "max_bucket_reso", limits["max_bucket_reso"], reason, "look"
        if edge / LONG < limits["min_bucket_reso"]:
            yield "min_bucket_reso", limits["min_bucket_reso"], reason, "look"


def files_in(path: Any) -> list[Path]:
    """Return the files of a folder that is here, relative to the current one."""
    try:
        return sorted(each for each in Path(path).iterdir() if each.is_file())
    except (OSError, TypeError, ValueError):
        return []


def subfolders(path: Any) -> Iterator[Lost]:
    """Yield the images below a folder that are trained here alone."""
    with suppress(OSError, ValueError, TypeError):
        inner = (each for each in Path(path).rglob("*") if each.parent != Path(path))
        if found := next((each for each in inner if each.suffix.lower() in IMAGES), None):
            reason = f"images in subfolders, such as {found}, are not read there, but here: move them out of it"
            yield "image_dir", path, reason, "lost"


def pipe_entries(
    values: Mapping[str, Any], lost: list[Lost], training: Mapping[str, object] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield entries for each folder and resolution, after adding to `lost` what has no place here."""
    is_middle = (training or {}).get("video_clip_mode") == "single_middle"
    general = {name: value for name, value in values.items() if name != "directory"}
    for directory in values["directory"]:
        given = {**general, **directory}
        path, repeats = given.pop("path", None), given.pop("num_repeats", 1)
        if repeats == 0:
            lost.append(
                ("path", path, "with 0 repeats nothing of it is trained there, and it is left out here", "look")
            )
            continue
        if isinstance(repeats, float) and not repeats.is_integer():
            lost.append(
                ("num_repeats", repeats, "passes are whole here: another number of them is not offered", "lost")
            )
        # Images without a caption are left out there (dataset.py:484).
        base = folder(path, repeats) | {"caption_lines": "one", "skip_uncaptioned": True}
        resolutions = given.get("resolutions") or [512]
        for resolution in resolutions:
            shown = "x".join(map(str, resolution)) if isinstance(resolution, list) else resolution
            more = {"id": f"{base['id']}-{shown}"} if len(resolutions) > 1 else {}
            entry = base | more | size(resolution, is_bucketed=bool(given.get("enable_ar_bucket")))
            for kind in pipe_kinds(path, given, is_middle):
                yield entry | kind
        lost += pipe_remarks(path, given)
        unknown = (name for name in given if name not in (*PIPE_IDLE, *PIPE_BUCKETS))
        lost.extend((name, given[name], UNKNOWN, "lost") for name in unknown)


def pipe_kinds(path: object, given: Mapping[str, object], is_middle: bool) -> Iterator[dict[str, Any]]:
    """Yield the additions to a folder's entry, for its stills and for its clips, which are two datasets here.

    Videos are never of the bucket of 1 frame there (dataset.py, `_find_closest_ar_bucket`).
    """
    lengths, suffixes = clip_lengths(given), {file.suffix.lower() for file in files_in(path)}
    has_clips = bool(lengths) and (not suffixes or not suffixes.isdisjoint(VIDEOS))
    if not has_clips or not suffixes or not suffixes.isdisjoint(IMAGES):
        yield {}
    if has_clips:
        place = {"clip_position": "middle"} if is_middle else {}
        yield {"dataset_type": "video", "video": {"frame_buckets": lengths, **place}}


def clip_lengths(given: Mapping[str, object]) -> list[Any]:
    lengths = given.get("frame_buckets") or []
    if not isinstance(lengths, list) or not all(type(each) in (int, float) for each in lengths):
        return [lengths]  # which the dataset refuses, with what it takes
    return sorted(size for size in lengths if size != 1)


def pipe_remarks(path: object, given: Mapping[str, object]) -> Iterator[Lost]:
    """Yield remarks on a folder that is read differently here: buckets, clips, captions, subfolders."""
    yield from subfolders(path)
    files = files_in(path)
    if any(file.name == CAPTIONS for file in files):
        yield (
            CAPTIONS,
            str(path),
            f"{path}/{CAPTIONS} goes before .txt files there, and is not read here: the .txt files are",
            "look",
        )
    if clip_lengths(given):
        if not files:
            reason = "one dataset is of its stills and one of its clips: remove that of which the folder has none"
            yield "frame_buckets", given["frame_buckets"], reason, "look"
        if not files or any(file.suffix.lower() in VIDEOS for file in files):
            reason = "clips are brought to the model's frames per second there: set video.fps, or they keep their own"
            yield "frame_buckets", given["frame_buckets"], reason, "look"
    if given.get("enable_ar_bucket"):
        sizes = {name: given[name] for name in PIPE_BUCKETS if name in given}
        reason = (
            "an image takes the nearest of a few aspects there, sides multiples of 16; here any aspect, cropping least"
        )
        yield "enable_ar_bucket", sizes or True, reason, "look"


def folder(path: object, repeats: object) -> dict[str, Any]:
    # `repeats` are passes besides the first.
    passes = int(repeats) if isinstance(repeats, int | float) else 1
    more = {"repeats": passes - 1} if passes > 1 else {}
    return {
        "id": id_of_folder(str(path).rstrip("/").rpartition("/")[2]),
        "type": "local",
        "instance_data_dir": path,
        **more,
    }


def size(resolution: object, is_bucketed: bool) -> dict[str, Any]:
    """Return the keys of a size: the edge of a square, or width and height, whose area counts."""
    if isinstance(resolution, list) and len(resolution) == 2 and all(isinstance(side, int) for side in resolution):
        resolution = math.isqrt(math.prod(resolution))
    crop = {} if is_bucketed else {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    return {"resolution": resolution, "resolution_type": "pixel_area", **crop}


def of_all_datasets(
    values: Mapping[str, Any], name: str, default: Any, training: Mapping[str, Any], lost: list[Lost]
) -> Any:
    """Return the value that all datasets of sd-scripts have by a name, a setting of the run here; None, as
    lost, if they differ.

    What the dataset file says goes before the training file (config_util.py, `search_value`).
    """
    general = values.get("general") or {}
    found = {each.get(name, general.get(name, training.get(name, default))) for each in values["datasets"]}
    if len(found) > 1:
        lost.append((name, sorted(found), "here one value holds for all datasets", "lost"))
        return None
    return found.pop()


def with_different_ids(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of folders of the same name with a number behind it."""
    counts: Counter[str] = Counter()
    different = []
    for entry in entries:
        counts[entry["id"]] += 1
        number = counts[entry["id"]]
        different.append(entry if number == 1 else {**entry, "id": f"{entry['id']}-{number}"})
    return different
