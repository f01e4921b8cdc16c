"""Concepts of OneTrainer (23df3832, mgds 3a6994ad): folders with their captions, sizes and balance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.importing.folders import (
    captioned,
    closest,
    condition,
    files_in,
    folder_entry,
    has_several_lines,
    images_of,
    size_of,
    subfolders,
)
from simpletuner.importing.foreign_trainer import FASTER, Translation, first_existing, key_table
from simpletuner.settings.files.config_files import NotParsed
from simpletuner.settings.files.formats import read_list, read_text
from simpletuner.system.numbers import count_noun

CONCEPT = key_table(
    maps={},
    converted={},
    idle={
        FASTER: "__version name seed enabled concept_stats",
        "used only with what is refused": (
            "image.random_rotate_max_angle image.random_brightness_max_strength image.random_contrast_max_strength "
            "image.random_saturation_max_strength image.random_hue_max_strength text.tag_dropout_mode "
            "text.tag_dropout_probability text.tag_dropout_special_tags_mode text.tag_dropout_special_tags "
            "text.tag_dropout_special_tags_regex text.caps_randomize_mode text.caps_randomize_probability "
            "text.caps_randomize_lowercase"
        ),
    },
    look={},
    lost={
        "it has no place here": (
            "loss_weight=1 image.enable_random_rotate image.enable_fixed_rotate image.enable_random_brightness "
            "image.enable_fixed_brightness image.enable_random_contrast image.enable_fixed_contrast "
            "image.enable_random_saturation image.enable_fixed_saturation image.enable_random_hue "
            "image.enable_fixed_hue image.enable_random_circular_mask_shrink image.enable_random_mask_rotate_crop "
            "text.tag_dropout_enable text.caps_randomize_enable"
        ),
        "images are never mirrored: put mirrored copies into a folder of their own": (
            "image.enable_random_flip image.enable_fixed_flip"
        ),
    },
)
# Aspects of buckets there, each in both directions (mgds AspectBucketing.py:16).
ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)
MASK = "-masklabel"
LABELS = (f"{MASK}.png", "-condlabel.png")


def list_of_file(run: Translation, name: object) -> list[object] | None:
    """Return the list in a JSON file that a configuration names; None if there is none."""
    path = first_existing(str(name), (Path(), run.file.parent))
    return read_list(path) if path else None


def entries(run: Translation, values: Mapping[str, object] | Sequence[object]) -> Iterator[Translation]:
    """Yield a dataset for each concept that takes part, of a configuration or of a list."""
    listed = values.get("concepts") if isinstance(values, Mapping) else values
    run.values.pop("concepts", None)
    for given in listed if isinstance(listed, list) else []:
        if not isinstance(given, Mapping):
            run.remark("concepts", "a concept is a table with a path", given, "lost")
            continue
        found = run.within(given)
        kind = found.word("type", "validation" if found.is_on("validation_concept") else "standard")
        if not found.is_on("enabled", True) or (kind == "validation" and not run.is_on("validation")):
            reason = "it takes no part in the training there, and is left out here"
            run.remark("concepts", reason, given.get("path"), "none")
            continue
        yield concept(run, found, kind)


def concept(run: Translation, found: Translation, kind: str) -> Translation:
    found.values.pop("validation_concept", None)
    found.values.pop("type", None)
    passes = "repeats" if found.get("balancing") is None else "balancing"
    if found.word("balancing_strategy") == "samples":
        found.lose(passes, "so many images of it are taken in turn in each epoch there")
    folder_entry(found, "path", passes)
    if found.number(passes, 1) < 1:
        found.lose(passes, "a part of the images is taken in turn there")
    found.drop(found.below("concept_stats"), FASTER)
    found.drop(["balancing", "repeats", "balancing_strategy"], "passes are repeats here")
    if kind == "validation":
        found.defaults["dataset_type"] = "eval"
    elif kind == "prior_prediction":
        found.defaults["is_regularisation_data"] = True
    elif kind != "standard":
        found.remark("type", "this version has no such concepts", kind, "lost")
    if not found.is_on("include_subdirectories"):
        subfolders(found, "path")
    found.drop(["include_subdirectories"], "its subfolders")
    sizes(run, found)
    captions(run, found)
    labels = [file for file in files_in(found.defaults["instance_data_dir"]) if file.name.endswith(LABELS)]
    if run.is_on("masked_training"):
        masks(run, found)
    elif labels:
        found.remark(
            "path", f"masks beside images, such as {labels[0]}, are not trained there, but here", effect="lost"
        )
    found.answer(CONCEPT)
    return found


def masks(run: Translation, found: Translation) -> None:
    """Masks beside the images, NAME-masklabel.png."""
    path = found.defaults["instance_data_dir"]
    stems = {file.name for file in files_in(path)}
    images = [file for file in images_of(files_in(path)) if not file.name.endswith(LABELS)]
    condition(found, path, "mask", name_ending=MASK)
    if bare := next((image for image in images if f"{image.stem}{MASK}.png" not in stems), None):
        found.remark("path", f"an image without a mask, such as {bare}, is trained whole there, and ends the run here")
    if other := next((name for name in sorted(stems) if name.endswith(LABELS[1])), ""):
        found.remark("path", f"{other} is no image there: move it out of the folder", effect="lost")


def sizes(run: Translation, found: Translation) -> None:
    """Size and buckets: a crop of the nearest of 17 shapes, at a place that is fixed for each image."""
    keys = ("enable_crop_jitter", "enable_resolution_override", "resolution_override")
    place = "random" if found.is_on("image.enable_crop_jitter", True) else "center"
    if place == "random" and not run.is_on("latent_caching", True):
        found.remark("image.enable_crop_jitter", "drawn each time there, and once for each image here", True)
    elif place == "random" and found.number("image_variations", 1) > 1:
        found.look("image_variations", "so many places of the crop are taken in turn there; one here")
    has_own = found.is_on("image.enable_resolution_override")
    given = found.get("image.resolution_override", 512) if has_own else run.get("resolution", 512)
    names = str(given).split(",")
    size: Any = int(names[0]) if names[0].strip().isdigit() else names[0].strip()
    if len(names) > 1:
        found.remark("resolution", "one of these sizes is drawn for each image there", str(given), "lost")
    elif not isinstance(size, int):
        found.remark("resolution", "images are cropped to this size there", str(given), "lost")
        size = found_edge(size)
    if run.only_datasets and not has_own:
        run.remark("resolution", "sizes are those of the configuration: import it, or set resolution", "")
    else:
        found.defaults |= size_of(size, is_bucketed=False)
        if run.is_on("aspect_ratio_bucketing", True) and isinstance(size, int):
            found.defaults |= closest(buckets(size, run))
        found.defaults |= {"crop_style": place}
    found.drop(["image_variations", *(f"image.{key}" for key in keys)], "it is crop_style or resolution here")


def found_edge(size: str) -> object:
    sides = [int(side) for side in size.lower().split("x") if side.strip().isdigit()]
    return math.isqrt(math.prod(sides)) if len(sides) == 2 else size


def buckets(edge: int, run: Translation) -> Iterator[tuple[int, int]]:
    """Yield the sizes of buckets, whose sides are multiples of the model's step."""
    step = run.of("aspect_bucket_alignment", 64)
    for aspect in {aspect for each in ASPECTS for aspect in (each, 1 / each)}:
        width, height = edge * math.sqrt(aspect), edge / math.sqrt(aspect)
        yield max(step, round(width / step) * step), max(step, round(height / step) * step)


SPLITS = {",": "comma", " ": "space", ".": "period"}


def captions(run: Translation, found: Translation) -> None:
    """Captions of text files, names, or one file; lines and orders are drawn once for each image where texts
    are cached."""
    source, path = found.word("text.prompt_source", "sample"), found.defaults["instance_data_dir"]
    is_cached = run.is_on("latent_caching", True)
    if source == "filename":
        found.defaults["caption_strategy"] = "filename"
        if name := next((image.name for image in images_of(files_in(path)) if "_" in image.stem), ""):
            found.remark("text.prompt_source", f"underscores of names, such as {name}, stay there; blanks here")
    elif source == "concept":
        of_one_file(run, found)
    else:
        found.defaults |= {"caption_strategy": "textfile", "caption_lines": "alternatives"}
        names = [image for image in images_of(files_in(path)) if not image.name.endswith(LABELS)]
        files = [text for image in names if (text := image.with_suffix(".txt")).is_file()]
        if bare := [image for image in names if not captioned(image, ".txt")]:
            which = f"{count_noun(len(bare), 'image')} without a caption, such as {bare[0]}"
            reason = f"{which}: trained with an empty one there, and they end the run here"
            found.remark("text.prompt_source", reason, "sample")
        if is_cached and has_several_lines(files):
            reason = "one line of a caption file is drawn for the whole run there; each time here"
            found.remark("text_variations", reason, found.get("text_variations", 1))
    if found.is_on("text.enable_tag_shuffling"):
        shuffled(found, is_cached)
    found.drop(
        ["text_variations", "text.prompt_source", "text.prompt_path", "text.enable_tag_shuffling"]
        + ["text.keep_tags_count", "text.tag_delimiter"],
        "of the captions",
    )


def shuffled(found: Translation, is_cached: bool) -> None:
    delimiter = str(found.get("text.tag_delimiter", ","))
    if (split := SPLITS.get(delimiter.strip() or " ")) is None:
        found.lose("text.tag_delimiter", "tags are split at commas, spaces or periods")
        return
    count = int(found.number("text_variations", 1)) if is_cached else 10
    orders = {"enable": True, "count": count, "include_original": False, "split_on": split}
    orders["position_start"] = int(found.number("text.keep_tags_count", 1))
    found.put("caption_shuffle", "text.enable_tag_shuffling", orders)
    if not is_cached:
        found.remark("text.enable_tag_shuffling", f"each order is drawn anew there; here one of {count}")


def of_one_file(run: Translation, found: Translation) -> None:
    """Take the phrase of a file of prompts, of which one line is drawn for each image."""
    name, lines = found.get("text.prompt_path", ""), []
    with suppress(OSError, NotParsed):
        if isinstance(name, str) and (path := first_existing(name, (Path(), run.file.parent))):
            lines = [line for line in read_text(path).splitlines() if line.strip()]
    if len(lines) == 1:
        found.defaults |= {"caption_strategy": "instanceprompt", "instance_prompt": lines[0].strip()}
    else:
        why = "one of its lines is drawn for each image there" if lines else "the file is not here"
        found.lose("text.prompt_path", f"{why}: write captions beside the images", name)
