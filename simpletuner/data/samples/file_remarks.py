"""Sentences about files among the images: formats that are read, and what other programs put there.

Each says what is trained, and the entries of a dataset file for what the files mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.places import id_of_folder
from simpletuner.data.images.frame_folders import READ_FRAMES, frame_suffixes
from simpletuner.data.images.image_formats import READ, READ_VIDEOS
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.other_programs import CLASS_IMAGES, MASKS, REPEATS, SAMPLES, THUMBNAILS
from simpletuner.data.scan.scan import Scan
from simpletuner.system.numbers import count_noun

MAX_FOLDERS = 4
REPEATS_AND_PHRASE = re.compile(r"([1-9]\d{0,2})_(.+)")
RENAME = "the name of the image with .txt is read, so rename them"
LOOP = 'in their folder by `for f in {}; do mv -n "$f" "${{f%{}}}.txt"; done`'
# Caption file patterns; not *.*.txt, since a.b.txt is the caption of a.b.jpg.
IMAGES_TXT = "*.jp*g.txt *.png.txt *.webp.txt"
BESIDE = {
    "second suffix": f"with the suffix of the image as well: {RENAME}, {LOOP.format(IMAGES_TXT, '.*.txt')}",
    "case": f"with other upper and lower case: {RENAME}, for the suffix {LOOP.format('*.TXT', '.TXT')}",
    "accents": f"with other code points for accents (NFC and NFD look alike): {RENAME}, such as by `convmv`",
    ".caption": f"with another suffix: {RENAME}, {LOOP.format('*.caption', '.caption')}",
    ".json": "in JSON files: write .txt files, or a table, which caption_strategy=parquet reads",
}
FILE_COLUMNS, CAPTION_COLUMNS = ("file_name", "filename", "image", "path"), ("text", "caption", "prompt", "description")


def file_remarks(scan: Scan) -> Iterator[tuple[str, int, str]]:
    """Yield kind, number of files and a sentence for each thing among the images of a dataset that is not
    an image to others."""
    others, where = scan.others, f"dataset `{scan.dataset.id}`: "
    if counts := others.system_folders:
        named = ", ".join(f"{count:,} {name}" if count > 1 else name for name, count in sorted(counts.items()))
        count = sum(counts.values())
        left_out = f"{count_noun(count, 'folder')} of other programs left out ({named})"
        yield "system folders", count, where + left_out
    for kind, folders in others.by_others.items():
        if kind == CLASS_IMAGES and scan.dataset.is_regularisation_data:
            continue
        count = sum(folders.values())
        first = ", ".join(folder.rstrip("/") or "the folder itself" for folder in list(folders)[:MAX_FOLDERS])
        more = f", and {len(folders) - MAX_FOLDERS:,} more folders" * (len(folders) > MAX_FOLDERS)
        yield (
            kind,
            count,
            where + SENTENCES[kind].format(count_noun(count, "image"), first + more) + entries(scan, kind),
        )
    yield from root_remark(scan)
    if others.shared_captions:
        captions, images, first = others.shared_captions
        yield (
            "shared captions",
            images,
            f"{where}{count_noun(captions, 'caption file')} shared by {images:,} images: a caption is of all files "
            f"of its name ({', '.join(first)}): keep one of each, or rename them",
        )


SENTENCES = {
    SAMPLES: "{} that training has generated, by the names, trained like the others (in {}): move them elsewhere",
    CLASS_IMAGES: "{} of the class or for regularization, by the folder's name, trained like the others (in {}). Move "
    "them elsewhere, or for a LoRA make them a dataset of their own, and this one of the rest:",
    REPEATS: "{} in folders whose names are repeats and a phrase for sd-scripts, and nothing here ({}). The same as "
    "datasets of their own, without instance_prompt where images have captions:",
    MASKS: "{} that are masks by their names, trained like the others (in {}). Move them into a folder of their own, "
    "under the names of the images, and name it in conditioning_data:",
    THUMBNAILS: "{} in folders of thumbnails, by the name, trained like the others (in {}): move them elsewhere",
}


def root_remark(scan: Scan) -> Iterator[tuple[str, int, str]]:
    """Yield a remark where the dataset's own folder is called as sd-scripts does."""
    name = PurePosixPath(scan.storage.describe()).name
    found = REPEATS_AND_PHRASE.fullmatch(name)
    if found and found[1] != "1" and not scan.dataset.repeats and len(scan.table):
        yield (
            REPEATS,
            len(scan.table),
            f"dataset `{scan.dataset.id}`: the name of its folder, {name}, means {found[1]} repeats and the phrase "
            f"`{found[2]}` for sd-scripts, and nothing here: repeats={int(found[1]) - 1} passes as often",
        )


def entries(scan: Scan, kind: str) -> str:
    """Entries of a dataset file, one a line, with which folders mean what they do in other programs."""
    folders = scan.others.by_others[kind]
    return "".join(
        f"\n  {json.dumps(entry, ensure_ascii=False)}"
        for folder in list(folders)[:MAX_FOLDERS]
        if (entry := entry_of(scan.storage.describe(folder.rstrip("/")), kind))
    )


def entry_of(address: str, kind: str) -> dict[str, object]:
    name = PurePosixPath(address).name
    entry: dict[str, object] = {"id": id_of_folder(name), "instance_data_dir": address}
    if kind == MASKS:
        masks = {"dataset_type": "conditioning", "conditioning_type": "mask"}
        return {"id": "masks", **masks, "instance_data_dir": str(PurePosixPath(address).with_name("masks"))}
    if kind not in (REPEATS, CLASS_IMAGES):
        return {}
    if found := REPEATS_AND_PHRASE.fullmatch(name):
        entry |= {"repeats": int(found[1]) - 1} if found[1] != "1" else {}
        entry |= {"caption_strategy": "instanceprompt", "instance_prompt": found[2]}
    return entry | ({"is_regularisation_data": True} if kind == CLASS_IMAGES else {})


def captions_found(others: OtherFiles) -> list[str]:
    """Phrase for each kind of caption that lies beside the images and is not read, with what reads it."""
    said = list[str]()
    for kind, (count, first) in others.beside.items():
        named = ", ".join(f"{file} for {image}" for image, file in first)
        said.append(f"{count_noun(count, 'caption')} beside them not read ({named}), {BESIDE[kind]}")
    return said + [table_phrase(address, columns) for address, columns in others.caption_tables.items()]


def phrases_found(others: OtherFiles) -> list[str]:
    """Return a phrase about folders whose names have the captions for sd-scripts."""
    first = next(iter(others.by_others.get(REPEATS, ())), "").rstrip("/")
    advice = "`simpletuner dataset check` prints the entries of a dataset file that say the same"
    return [f"{first} has repeats and a phrase in its name, as sd-scripts reads it: {advice}"] if first else []


def table_phrase(address: str, columns: Sequence[str]) -> str:
    if not columns and not address.lower().endswith(".parquet"):
        return f"{address} may hold captions: a table with a line for each image is read, this form is not"
    file, caption = (
        next((name for name in likely if name in columns), likely[0]) for likely in (FILE_COLUMNS, CAPTION_COLUMNS)
    )
    table: Mapping[str, str] = {"path": address, "filename_column": file, "caption_column": caption}
    keys = json.dumps({"caption_strategy": "parquet", "parquet": table}, ensure_ascii=False)
    return f"{address} may hold the captions: a dataset file (data_backend_config) with {keys[1:-1]} reads it"


def formats_read(dataset: ImageDataset) -> str:
    if not dataset.clips:
        return READ
    return f"{READ_VIDEOS}, and {READ_FRAMES}" if dataset.clips.frame_folders_fps else READ_VIDEOS


def frames_hint(datasets: Iterable[ImageDataset], not_read: Collection[str]) -> str:
    """Hint for images with unread suffixes that would be read as frames of clips; else nothing."""
    has_none = any(dataset.clips and not dataset.clips.frame_folders_fps for dataset in datasets)
    if not has_none or frame_suffixes().isdisjoint(not_read):
        return ""
    return "; folders of numbered images are clips with `frame_folders_fps` in the block `video`"
