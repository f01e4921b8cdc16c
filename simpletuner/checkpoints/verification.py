"""Checksums of checkpoint files, each rank computing its share; a damaged checkpoint is skipped on all ranks.

What a run resumes from is verified in the background while it scans its data and opens its base model. The
pass over the files overlaps with that, and leaves them in the page cache, from which the weights are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from simpletuner.checkpoints.layout import Checkpoint, all_damaged_error, find_resume_folders, load_checkpoint
from simpletuner.errors import EnvironmentNotReady, SettingsError, without_errno
from simpletuner.parallel.world import World
from simpletuner.system.files.checksums import file_checksum
from simpletuner.system.processes.threads import map_in_daemons

T = TypeVar("T")

# Files read at once: XXH3 releases the GIL, and one stream rarely saturates a disk.
THREADS = 4


class Checksums:
    """Checksums of files by name, computed in the background; each rank has a share."""

    def __init__(self, files: Mapping[str, Path], world: World) -> None:
        self.world = world
        self.found = in_background(lambda name: (name, file_checksum(files[name])), sorted(files), world)

    def wait(self) -> dict[str, str]:
        """Collective: all checksums. Raises EnvironmentNotReady on all ranks if one cannot read a file."""
        found, problem = {}, ""
        try:
            found = dict(self.found())
        except OSError as error:
            problem = f"cannot read {error.filename}: {error.strerror}"
        answers = [json.loads(text) for text in self.world.gather_texts(json.dumps([problem, found]))]
        if problems := [problem for problem, _ in answers if problem]:
            raise EnvironmentNotReady(problems[0])
        return {name: value for _, part in answers for name, value in part.items()}


def in_background(function: Callable[[str], T], names: list[str], world: World) -> Callable[[], list[T]]:
    """Call a function with every name of this rank's share, in threads that end with the process."""
    # One by one: files differ in size, and a thread must not be left with several large ones.
    return map_in_daemons(function, names[world.rank :: world.size], THREADS)


def compute_checksums(folder: Path, world: World, known: Mapping[str, str]) -> dict[str, str]:
    """Collective: checksums of every file below a folder by name; `known` ones of this rank are reused.

    Raises EnvironmentNotReady on all ranks when one cannot read a file.
    """
    own = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    answers = [json.loads(text) for text in world.gather_texts(json.dumps([own, dict(known)]))]
    written = {name: value for _, part in answers for name, value in part.items()}
    # Rank 0's list is the one to divide: with a network file system's caches, ranks may see different files.
    rest = {name: folder / name for name in answers[0][0] if name not in written}
    return written | Checksums(rest, world).wait()


class CheckpointDamaged(EnvironmentNotReady):
    """The content of a checkpoint's files does not match their checksums. Raised on all ranks."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(problem)
        self.folder = folder


class Verification:
    """Compares the checksums of a checkpoint's files in the background; each rank has a share."""

    def __init__(self, checkpoint: Checkpoint, world: World) -> None:
        self.checkpoint, self.world = checkpoint, world
        names = sorted(checkpoint.state["files"])
        self.problems = in_background(lambda name: find_file_damage(checkpoint, name), names, world)

    def wait(self) -> None:
        """Collective: wait until all files are compared. Raises CheckpointDamaged on all ranks."""
        problem = next(filter(None, self.problems()), "")
        if found := next(filter(None, self.world.gather_texts(problem)), ""):
            raise CheckpointDamaged(self.checkpoint.folder, found)


def find_newest(
    root: Path, wish: str, world: World, damaged: Mapping[Path, str]
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Collective: return the checkpoint to resume from, and why newer ones were skipped: `damaged`, or
    incomplete.

    Raises SettingsError for a folder that is not there, EnvironmentNotReady for one that is damaged, and
    where there are checkpoints and all of them are damaged: starting again from the base model must be asked
    for.
    """
    skipped: dict[Path, str] = {}
    for folder in find_folders_on_first_rank(root, wish, world):
        problem = damaged.get(folder) or find_incomplete(folder, world)
        if not problem:
            return load_checkpoint(folder), skipped
        if wish != "latest":
            raise EnvironmentNotReady(problem, "take another one, or `latest` for the newest that is not damaged")
        skipped[folder] = problem
    if skipped:
        raise all_damaged_error(root, list(skipped.values()))
    return None, skipped


def find_folders_on_first_rank(root: Path, wish: str, world: World) -> list[Path]:
    """Collective: rank 0's finding, since ranks may see different folders on a network."""
    found: dict[str, list[str]] = {}
    if world.is_first:
        try:
            found["folders"] = [str(path) for path in find_resume_folders(root, wish)]
        except SettingsError as error:
            found["error"] = [error.message, error.hint]
    found = json.loads(world.gather_texts(json.dumps(found))[0])
    if "error" in found:
        raise SettingsError(*found["error"])
    return [Path(text) for text in found["folders"]]


def find_incomplete(folder: Path, world: World) -> str:
    """Collective: damage of a checkpoint's state or file sizes; empty if none."""
    try:
        load_checkpoint(folder)
        problem = ""
    except EnvironmentNotReady as error:
        problem = error.message
    return next(filter(None, world.gather_texts(problem)), "")


def find_file_damage(checkpoint: Checkpoint, name: str) -> str:
    path = checkpoint.folder / name
    try:
        is_intact = file_checksum(path) == checkpoint.state["checksums"].get(name)
    except OSError as error:
        return f"{path} is damaged: {without_errno(error, path)}"
    return "" if is_intact else f"{path} is damaged: its checksum does not match"
