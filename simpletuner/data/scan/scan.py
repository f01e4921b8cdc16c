"""Scans of image and video files, as columns: sizes from headers, captions from text files. Nothing is
decoded.

A scan does not depend on resolution, crop or limits, so a kept one serves a run with others.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.frame_folders import frame_suffixes, is_frame_folder, read_folder_header
from simpletuner.data.images.images import DECODE_ERRORS, ImageHeader, read_header
from simpletuner.data.images.videos import read_video_header
from simpletuner.data.scan.captions import form_of, lines_of, read_caption_file
from simpletuner.data.scan.file_list import CAPTION_VERSION, FILE, OtherFiles, printable
from simpletuner.data.storage.storage import MAX_BYTES, Storage, UnreadableFileError

# Columns of an image or a video: sizes in px as displayed, 0 with a `problem`; frames, 1 for an image; frames
# per second, 0 if unknown; true of a video with a sound track; lines of the caption file or captions of the
# table, or the reason for having none; and the kind of text that the lines form (`captions.py`).
SCANNED = pa.schema(
    [
        *FILE,
        pa.field(CAPTION_VERSION, pa.large_string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("frames", pa.int32()),
        pa.field("fps", pa.float64()),
        pa.field("animated", pa.bool_()),
        pa.field("sound", pa.bool_()),
        pa.field("captions", pa.large_list(pa.large_string())),
        pa.field("caption_problem", pa.large_string()),
        pa.field("caption_form", pa.large_string()),
    ]
)
NO_ROW = "has no row in the table"
"""`caption_problem` of an image outside the dataset, which metadata_backend=parquet defines by its table."""


@dataclass(frozen=True)
class Scan:
    """The images of one dataset: their rows (SCANNED), and the other files of its store."""

    dataset: ImageDataset
    storage: Storage
    table: pa.Table
    others: OtherFiles
    conditioning: tuple[Scan, ...] = ()
    """Scans of the datasets in `conditioning_data`."""


def scan_files(dataset: ImageDataset, storage: Storage, files: Sequence[Mapping[str, object]]) -> pa.RecordBatch:
    """Read headers and captions of files (rows of a `FileList`), in their order."""
    read = partial(scan_file, dataset, storage)
    if storage.concurrent_reads == 1:  # a thread costs more than it saves where files are on a disk
        return pa.RecordBatch.from_pylist(list(map(read, files)), SCANNED)
    with ThreadPoolExecutor(storage.concurrent_reads) as pool:
        return pa.RecordBatch.from_pylist(list(pool.map(read, files)), SCANNED)


def scan_file(dataset: ImageDataset, storage: Storage, file: Mapping[str, Any]) -> dict[str, object]:
    row = {
        **file,
        "width": 0,
        "height": 0,
        "frames": 1,
        "fps": 0.0,
        "animated": False,
        "sound": False,
        "captions": [],
        "caption_problem": "",
        "caption_form": "",
    }
    try:
        check_readable(file)
        header = read_file_header(dataset, storage, file["name"])
    except DECODE_ERRORS as error:
        return {**row, "problem": printable(str(error)) or type(error).__name__}
    width, height = header.size
    row |= {"width": width, "height": height, "frames": header.frames, "fps": header.fps}
    row |= {"animated": header.animated and not dataset.clips, "sound": header.has_sound}
    if not file[CAPTION_VERSION] or dataset.caption_strategy != "textfile":  # no caption file, or none is wanted
        return row
    try:
        text = read_caption_file(storage, file["name"], dataset.caption_encoding)
    except UnreadableFileError as error:
        return {**row, "caption_problem": str(error)}
    form = form_of(text)
    return {**row, "captions": lines_of(text, form), "caption_form": form}


def read_file_header(dataset: ImageDataset, storage: Storage, name: str) -> ImageHeader:
    """Raises one of DECODE_ERRORS."""
    if is_frame_folder(name):
        return read_folder_header(storage.list_folder(name, frame_suffixes()), storage.open_header)
    with storage.open_header(name) as opened:
        return read_video_header(opened) if dataset.clips else read_header(opened)


def check_readable(file: Mapping[str, Any]) -> None:
    """Raise ValueError for a file that is not even opened."""
    if file["problem"]:
        raise ValueError(file["problem"])
    if file["size_bytes"] > MAX_BYTES:
        raise ValueError(f"has {file['size_bytes']:,} bytes; at most {MAX_BYTES:,} are read")
