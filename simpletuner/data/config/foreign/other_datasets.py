"""Dataset files of kohya's sd-scripts and of diffusion-pipe as entries of ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from simpletuner.data.config.folders import id_of_folder
from simpletuner.settings.importing.other_trainers import UNKNOWN

Lost = tuple[str, Any, str]
"""A name there, its value, and why it has no place here."""
KOHYA_IDLE = ("batch_size", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "cache_info", "bucket_reso_steps")
KOHYA_MEANT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("shuffle_caption", "flip_aug", "color_aug", "random_crop", "is_reg", "bucket_no_upscale"), (False,)
    ),
    **dict.fromkeys(("alpha_mask", "enable_wildcard"), (False,)),
    **dict.fromkeys(
        ("keep_tokens", "caption_tag_dropout_rate", "caption_dropout_every_n_epochs", "token_warmup_step"), (0, 0.0)
    ),
    "caption_extension": (".txt",),
}
"""Values with which a name asks for what happens here anyway."""
KOHYA_KEYS = {"caption_dropout_rate": "caption_dropout_probability"}
PIPE_IDLE = ("enable_ar_bucket", "min_ar", "max_ar", "num_ar_buckets", "ar_buckets", "resolutions", "frame_buckets")


def kohya_entries(values: Mapping[str, Any], lost: list[Lost]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each subset, after adding to `lost` what has no place here."""
    general = values.get("general") or {}
    for dataset in values["datasets"]:
        for subset in dataset.get("subsets") or [{}]:
            # The default of sd-scripts.
            merged = {"caption_extension": ".caption", **general, **dataset, **subset}
            merged.pop("subsets", None)
            yield kohya_entry(merged, lost)


def kohya_entry(given: dict[str, Any], lost: list[Lost]) -> dict[str, Any]:
    entry = folder(given.pop("image_dir", None), given.pop("num_repeats", 1))
    resolution, is_bucketed = given.pop("resolution", 512), bool(given.get("enable_bucket"))
    if isinstance(resolution, list) and len(set(resolution)) > 1 and not is_bucketed:
        lost.append(("resolution", resolution, "without buckets all images are cropped to squares here"))
    entry |= size(resolution, is_bucketed)
    if (tokens := given.pop("class_tokens", None)) is not None and given["caption_extension"] != ".txt":
        given.pop("caption_extension")
        entry |= {"caption_strategy": "instanceprompt", "instance_prompt": tokens}
    elif tokens is not None:
        lost.append(("class_tokens", tokens, "images have a caption file or one phrase, not whichever there is"))
    if "caption_strategy" not in entry:  # sd-scripts reads no line but the first without it
        entry["caption_lines"] = "alternatives" if given.get("enable_wildcard") else "first"
    for name, value in given.items():
        if name in KOHYA_KEYS:
            entry[KOHYA_KEYS[name]] = value
        elif name not in KOHYA_IDLE and value not in KOHYA_MEANT.get(name, ()):
            reason = "captions are read from .txt files" if name == "caption_extension" else UNKNOWN
            lost.append((name, value, reason))
    return entry


def pipe_entries(values: Mapping[str, Any], lost: list[Lost]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each folder and resolution, after adding to `lost` what has no place here."""
    general = {name: value for name, value in values.items() if name != "directory"}
    for directory in values["directory"]:
        given = {**general, **directory}
        base = folder(given.pop("path", None), given.pop("num_repeats", 1)) | {"caption_lines": "one"}
        resolutions = given.get("resolutions") or [512]
        for resolution in resolutions:
            shown = "x".join(map(str, resolution)) if isinstance(resolution, list) else resolution
            more = {"id": f"{base['id']}-{shown}"} if len(resolutions) > 1 else {}
            yield base | more | size(resolution, is_bucketed=bool(given.get("enable_ar_bucket")))
        lost += [(name, value, UNKNOWN) for name, value in given.items() if name not in PIPE_IDLE]


def folder(path: Any, repeats: Any) -> dict[str, Any]:
    # `repeats` are passes besides the first.
    more = {"repeats": repeats - 1} if isinstance(repeats, int) and repeats > 1 else {}
    return {
        "id": id_of_folder(str(path).rstrip("/").rpartition("/")[2]),
        "type": "local",
        "instance_data_dir": path,
        **more,
    }


def size(resolution: Any, is_bucketed: bool) -> dict[str, Any]:
    """Return the keys of a size: the edge of a square, or width and height, whose area counts."""
    if isinstance(resolution, list) and len(resolution) == 2 and all(isinstance(side, int) for side in resolution):
        resolution = math.isqrt(math.prod(resolution))
    crop = {} if is_bucketed else {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    return {"resolution": resolution, "resolution_type": "pixel_area", **crop}


def of_all_datasets(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return what all datasets of sd-scripts have by a name, a setting of the run here; None if they differ."""
    general = values.get("general") or {}
    found = {each.get(name, general.get(name, default)) for each in values["datasets"]}
    return found.pop() if len(found) == 1 else None


def with_different_ids(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of folders of the same name with a number behind it."""
    counts: Counter[str] = Counter()
    different = []
    for entry in entries:
        counts[entry["id"]] += 1
        number = counts[entry["id"]]
        different.append(entry if number == 1 else {**entry, "id": f"{entry['id']}-{number}"})
    return different
