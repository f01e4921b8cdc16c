"""Folders of frames as rows of a list of files: one for each folder that holds images and no videos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash

from simpletuner.data.images.frame_folders import frame_suffixes
from simpletuner.data.images.video_formats import VIDEO_SUFFIXES
from simpletuner.data.storage.storage import StoredFile, list_local_folder, stored_file


@dataclass
class OpenFolder:
    """A folder whose files are being listed."""

    name: str
    frames: list[StoredFile] = field(default_factory=list)
    has_videos: bool = False


def with_folder_rows(
    files: Iterable[StoredFile], note: Callable[[Sequence[StoredFile]], object]
) -> Iterator[StoredFile]:
    """Yield files sorted by the parts of their names, and instead of frames their folders, each after what is in it.

    `note` is called with images that are no frames: those next to videos, or in no folder.
    """
    suffixes, open_folders = frame_suffixes(), [OpenFolder("")]

    def leave(until: str) -> Iterator[StoredFile]:
        while not until.startswith(open_folders[-1].name):
            yield from row_of(open_folders.pop())

    def row_of(folder: OpenFolder) -> Iterator[StoredFile]:
        if folder.frames and folder.name and not folder.has_videos:
            yield folder_row(folder.name, folder.frames)
        else:
            note(folder.frames)

    for file in files:
        name = file.name[: file.name.rfind("/") + 1]
        yield from leave(name)
        if name != open_folders[-1].name:
            open_folders.append(OpenFolder(name))
        if (suffix := file.suffix) in suffixes:
            open_folders[-1].frames.append(file)
            continue
        open_folders[-1].has_videos |= suffix in VIDEO_SUFFIXES
        yield file
    for folder in reversed(open_folders):
        yield from row_of(folder)


def folder_row(name: str, frames: Sequence[StoredFile]) -> StoredFile:
    """Return a folder as a file: with the size of its largest frame, and a version that changes when any frame does."""
    digest = xxhash.xxh3_128()
    for frame in frames:
        digest.update(f"{frame.name}\0{frame.version}\0{frame.problem}\0".encode("utf-8", "surrogateescape"))
    problem = next((f"frame {each.name[len(name) :]}: {each.problem}" for each in frames if each.problem), "")
    return StoredFile(name, max(each.size_bytes for each in frames), f"{len(frames)}-{digest.hexdigest()}", problem)


def local_folder_version(root: Path, name: str) -> str:
    """Return the version that a folder of frames below `root` has now; empty where there is none any more."""
    names = list_local_folder(root, name, frame_suffixes())
    frames = [stored_file(each, partial((root / each).stat)) for each in names]
    return folder_row(name, frames).version if frames else ""
