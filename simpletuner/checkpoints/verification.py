"""Checksums of checkpoint files, each rank computing its share; a damaged checkpoint is skipped on all ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from simpletuner.checkpoints.layout import Checkpoint, all_damaged_error, find_resume_folders, load_checkpoint
from simpletuner.errors import EnvironmentNotReady, SettingsError, without_errno
from simpletuner.parallel.world import World
from simpletuner.system.checksums import file_checksum

THREADS = 4
"""Files read at once: XXH3 releases the GIL, and one stream rarely saturates a disk or a network file system."""


def compute_checksums(folder: Path, world: World) -> dict[str, str]:
    """Collective: return the checksum of every file below a folder by name; each rank reads its share.

    Raises EnvironmentNotReady on all ranks when one cannot read a file.
    """
    own = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    # Rank 0's list is the one to divide: with a network file system's caches, ranks may see different files.
    names = json.loads(world.gather_texts(json.dumps(own))[0])
    found, problem = {}, ""
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            share = names[world.rank :: world.size]
            found = dict(zip(share, pool.map(lambda name: file_checksum(folder / name), share), strict=True))
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
    answers = [json.loads(text) for text in world.gather_texts(json.dumps([problem, found]))]
    if problems := [problem for problem, _ in answers if problem]:
        raise EnvironmentNotReady(problems[0])
    return {name: value for _, part in answers for name, value in part.items()}


def find_newest_healthy(root: Path, wish: str, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Collective: return the checkpoint to resume from, and why newer ones were skipped.

    Raises SettingsError for a folder that is not there, EnvironmentNotReady for one that is damaged, and where there
    are checkpoints and all of them are damaged: starting again from the base model must be asked for.
    """
    skipped: list[str] = []
    for folder in find_folders_on_first_rank(root, wish, world):
        problem = find_damage(folder, world)
        if not problem:
            return load_checkpoint(folder), skipped
        if wish != "latest":
            raise EnvironmentNotReady(problem, "take another one, or `latest` for the newest that is not damaged")
        skipped.append(problem)
    if skipped:
        raise all_damaged_error(root, skipped)
    return None, []


def find_folders_on_first_rank(root: Path, wish: str, world: World) -> list[Path]:
    """Collective: return what rank 0 finds, since ranks may see different folders of a network file system."""
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


def find_damage(folder: Path, world: World) -> str:
    """Collective: return what is wrong with a checkpoint, the same on all ranks; empty if it is healthy."""
    try:
        checkpoint = load_checkpoint(folder)
        names = sorted(checkpoint.state["files"])[world.rank :: world.size]
        with ThreadPoolExecutor(THREADS) as pool:
            problem = next(filter(None, pool.map(lambda name: find_file_damage(checkpoint, name), names)), "")
    except EnvironmentNotReady as error:
        problem = error.message
    return next(filter(None, world.gather_texts(problem)), "")


def find_file_damage(checkpoint: Checkpoint, name: str) -> str:
    """Return what is wrong with a file. Older versions wrote no checksums; of their files only the header is read."""
    path, wanted = checkpoint.folder / name, checkpoint.state.get("checksums", {}).get(name)
    try:
        if wanted is not None:
            return "" if file_checksum(path) == wanted else f"{path} is damaged: its checksum does not match"
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
    except (OSError, SafetensorError) as error:
        return f"{path} is damaged: {without_errno(error)}"
    return ""
