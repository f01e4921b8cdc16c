"""Files that other programs put among the images of a dataset, and captions under names that are not read."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.storage.storage import CAPTION_SUFFIX, Storage, UnreadableFileError

CAPTION_SUFFIXES = frozenset({CAPTION_SUFFIX, ".caption", ".json"})
"""Suffixes of other trainers' caption files, one per image."""
TABLE_SUFFIXES = frozenset({".jsonl", ".csv", ".parquet"})
CAPTION_TABLES = frozenset(
    {"metadata.jsonl", "metadata.csv", "metadata.parquet", "captions.json", "captions.jsonl", "captions.csv"}
    | {"meta_cap.json", "meta_clean.json", "meta_lat.json", "metadata.json", "dataset.jsonl", "dataset.json"}
)
"""Caption files of a folder in Hugging Face's imagefolder, diffusion-pipe and sd-scripts."""
MAX_EXAMPLES = 3
MAX_HEADER_BYTES = 1 << 16
MAX_UNCAPTIONED = 1 << 16
"""Limit of uncaptioned images to search for similar caption names."""

SAMPLES, CLASS_IMAGES, REPEATS, MASKS, THUMBNAILS = "samples", "class images", "repeats", "masks", "thumbnails"
GENERATED = (
    r"(_e?\d{6}_\d{2}_\d{8,14}(_\d+)?|\d{10,}__\d{9}_\d+|training-sample-[\d-]+)\.\w+$|(^|/)model/samples?/"
    r"|(^|/)sample/|(^|/)validation/step-\d{6}/|(^|/)validation_images/"
)
"""Samples of sd-scripts, ai-toolkit, OneTrainer, this program and the original."""
# Patterns of image names; the first match counts. 20_cat means 20 repeats to sd-scripts.
BY_NAME = {
    SAMPLES: GENERATED,
    CLASS_IMAGES: r"(^|/)(regs?|reg_(images|data)|regulari[sz]ation(_images|_data)?|class(_images|_data))/",
    THUMBNAILS: r"(^|/)(thumbs|thumbnails|\.?thumb)/",
    REPEATS: r"(^|/)[1-9]\d{0,2}_[^/]+/[^/]+$",
    MASKS: r"(^|/)masks?/[^/]+$|[-_.](mask|masklabel|condlabel)\.\w+$",
}
MASK_ENDING = r"(?i)([-_.](mask|masklabel|condlabel))?\.[^./]*$"


def folders_of_others(names: pa.ChunkedArray) -> dict[str, dict[str, int]]:
    """Count images named as other programs do: by their role there, then by folder."""
    all_names, names = names, matching(names, "|".join(f"({pattern})" for pattern in BY_NAME.values()))
    found: dict[str, dict[str, int]] = {}
    for kind, pattern in BY_NAME.items():
        own = matching(names, pattern)
        names = names.filter(pc.invert(pc.is_in(names, value_set=own)))
        if kind == MASKS and len(own):
            images = base_names(all_names.filter(pc.invert(pc.is_in(all_names, value_set=own))))
            own = own.filter(pc.is_in(base_names(own), value_set=images))
        if len(own):
            folders = pc.value_counts(pc.replace_substring_regex(own, r"[^/]*$", ""))
            found[kind] = {each["values"]: each["counts"] for each in folders.to_pylist()}
    return found


def base_names(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Part of the name that an image and its mask share."""
    names = pc.replace_substring_regex(names, r"^(?s:.*)/", "")
    return pc.replace_substring_regex(names, MASK_ENDING, "").combine_chunks()


def matching(names: pa.ChunkedArray, pattern: str) -> pa.ChunkedArray:
    return names.filter(pc.match_substring_regex(names, f"(?i){pattern}"))


def captions_beside(images: pa.ChunkedArray, others: Sequence[pa.Array]) -> dict[str, list[Any]]:
    """Count images without a caption for which a similar file name has one, and the first of each kind.

    By how it differs: a suffix, a second suffix, upper and lower case, or the code points of accents (NFC and
    NFD).
    """
    images, found = images.slice(0, MAX_UNCAPTIONED), dict[str, list[Any]]()
    files = pa.chunked_array(others, pa.large_string())
    keys = [folded(images), folded(without_suffix(images))]
    candidates = files.filter(
        pc.is_in(folded(without_suffix(files)), value_set=pa.chunked_array(keys).combine_chunks())
    )
    by_key: dict[str, list[str]] = {}
    for key, name in zip(folded(without_suffix(candidates)).to_pylist(), candidates.to_pylist(), strict=True):
        by_key.setdefault(key, []).append(name)
    for image, *own in zip(images.to_pylist(), *(each.to_pylist() for each in keys), strict=True):
        names = [name for key in own for name in by_key.get(key, ())]
        if names:
            kind = difference(image, names[0])
            counted = found.setdefault(kind, [0, []])
            counted[0] += 1
            counted[1] += [[image, names[0]]] * (len(counted[1]) < MAX_EXAMPLES)
    return found


def is_caption_table(name: str) -> bool:
    return PurePosixPath(name).name.lower() in CAPTION_TABLES


def difference(image: str, file: str) -> str:
    """Return in what the name of a caption differs from the one that is read."""
    path, wanted = PurePosixPath(file), PurePosixPath(image.rstrip("/")).with_suffix(CAPTION_SUFFIX)
    if path.suffix.lower() != CAPTION_SUFFIX:
        return path.suffix.lower()
    if path.name.lower().startswith(PurePosixPath(image).name.lower()):
        return "second suffix"
    return "case" if str(path).lower() == str(wanted).lower() else "accents"


def folded(names: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.utf8_lower(pc.utf8_normalize(names, "NFC"))


def without_suffix(names: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.replace_substring_regex(names, r"(/|\.[^./]*)$", "")


def columns_of(storage: Storage, name: str) -> list[str]:
    """Return the columns of a table of text by its first line; none where that is no table."""
    try:
        with storage.open_header(name) as file:
            line = file.readline(MAX_HEADER_BYTES).decode("utf-8-sig", "replace").strip()
    except (OSError, UnreadableFileError):
        return []
    if name.lower().endswith(".csv"):
        return [column.strip('" ') for column in line.split(",")]
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return list(row) if isinstance(row, dict) and not any(isinstance(each, dict) for each in row.values()) else []


def shared_captions(images: pa.ChunkedArray, found: pa.ChunkedArray) -> list[Any]:
    """Number of caption files shared by several images, number of those images, and the first ones.

    `found` has the row of each image's caption file, or null.
    """
    counts = pc.value_counts(found.drop_null())
    counts, rows = counts.field("counts"), counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    several = counts.filter(pc.greater(counts, 1))
    if not len(rows):
        return []
    first = images.filter(pc.fill_null(pc.equal(found, rows[0]), False))
    return [len(rows), pc.sum(several).as_py(), first.slice(0, 3).to_pylist()]
