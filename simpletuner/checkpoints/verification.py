"""Checksums of checkpoint files, each rank computing its share; a damaged checkpoint is passed over on all ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from simpletuner.checkpoints.layout import Checkpoint, candidates, opened, refuse_damaged
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.parallel.world import World
from simpletuner.system.checksums import file_checksum

THREADS = 4
"""Files read at once: XXH3 releases the GIL, and one stream rarely fills a disk or a network file system."""


def checksums(folder: Path, world: World) -> dict[str, str]:
    """Return the checksum of every file below a folder by name. Collective: each rank reads its share.

    Raises EnvironmentFault on all ranks when one cannot read a file.
    """
    own = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    names = json.loads(world.gather_texts(json.dumps(own))[0])  # those that rank 0 sees

    def checksum(name: str) -> str:
        """Return the checksum of one file."""
        return file_checksum(folder / name)

    found, problem = {}, ""
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            mine = names[world.rank :: world.size]
            found = dict(zip(mine, pool.map(checksum, mine), strict=True))
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
    answers = [json.loads(text) for text in world.gather_texts(json.dumps([problem, found]))]
    if problems := [problem for problem, _ in answers if problem]:
        raise EnvironmentNotReady(problems[0])
    return {name: value for _, part in answers for name, value in part.items()}


def newest_healthy(root: Path, wish: str, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, and why newer ones were passed over. Collective.

    Raises SettingsError for a folder that is not there, EnvironmentFault for one that is damaged, and where there are
    checkpoints and all of them are damaged: starting again from the base model must be asked for.
    """
    passed_over: list[str] = []
    for folder in first_rank_candidates(root, wish, world):
        problem = damage(folder, world)
        if not problem:
            return opened(folder), passed_over
        if wish != "latest":
            raise EnvironmentNotReady(problem, "take another one, or `latest` for the newest that is not damaged")
        passed_over.append(problem)
    if passed_over:
        raise refuse_damaged(root, passed_over)
    return None, []


def first_rank_candidates(root: Path, wish: str, world: World) -> list[Path]:
    """Return what rank 0 finds: with a network file system's caches, ranks may see different folders. Collective."""
    found: dict[str, list[str]] = {}
    if world.is_first:
        try:
            found["folders"] = [str(path) for path in candidates(root, wish)]
        except SettingsError as error:
            found["refused"] = [error.message, error.hint]
    found = json.loads(world.gather_texts(json.dumps(found))[0])
    if "refused" in found:
        raise SettingsError(*found["refused"])
    return [Path(text) for text in found["folders"]]


def damage(folder: Path, world: World) -> str:
    """Return what is wrong with a checkpoint, the same on all ranks; empty if it is healthy. Collective."""
    try:
        checkpoint = opened(folder)
        names = sorted(checkpoint.state["files"])[world.rank :: world.size]
        with ThreadPoolExecutor(THREADS) as pool:
            problem = next(filter(None, pool.map(lambda name: damage_of_file(checkpoint, name), names)), "")
    except EnvironmentNotReady as error:
        problem = error.message
    return next(filter(None, world.gather_texts(problem)), "")


def damage_of_file(checkpoint: Checkpoint, name: str) -> str:
    """Return what is wrong with a file. Of a file without a checksum, of an older version, only the header is read."""
    path, wanted = checkpoint.folder / name, checkpoint.state.get("checksums", {}).get(name)
    try:
        if wanted is not None:
            return "" if file_checksum(path) == wanted else f"{path} is damaged: its checksum does not match"
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
    except (OSError, SafetensorError) as error:
        return f"{path} is damaged: {error}"
    return ""
