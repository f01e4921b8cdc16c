"""Where checkpoints lie, which of them are whole, and which is the newest. No torch.

    checkpoints/checkpoint-000100/
      model/         weights (float32), with config.json
      exp_avg/ ...   one folder per optimizer moment
      ema/           averaged weights, when EMA is on
      state.json     everything that is not a tensor, and every file with its size: written last

A checkpoint is written in a hidden folder beside and renamed when it is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentFault, SettingsError
from simpletuner.files import replace_folder, unfinished

NAME = re.compile(r"checkpoint-(\d+)")
STATE = "state.json"
SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its state."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Return the number of optimizer steps taken."""
        return int(self.state["step"])

    def files(self, group: str) -> list[Path]:
        """Return the weights files of one group of tensors."""
        return sorted((self.folder / group).glob("*.safetensors"))


def folder_of_step(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return root / f"checkpoint-{step:06d}"


def opened(folder: Path) -> Checkpoint:
    """Return a checkpoint after comparing every file's size. Raises EnvironmentFault that says what is wrong."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, size in state["files"].items():
            found = (folder / name).stat().st_size
            if found != size:
                raise EnvironmentFault(f"{folder} is damaged: {name} has {found} of {size} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(f"{folder} is not a complete checkpoint: {error}") from None
    return Checkpoint(folder, state)


def is_complete(folder: Path) -> bool:
    """Return whether a checkpoint can be taken."""
    try:
        opened(folder)
    except EnvironmentFault:
        return False
    return True


def numbered(root: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first."""
    folders = [path for path in root.glob("checkpoint-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: -int(path.name.removeprefix("checkpoint-")))


def chosen(root: Path, wish: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, and why newer ones were passed over.

    `wish` is `latest`, `none`, or a folder (a path, or a name below `root`). Raises SettingsError when that folder is
    missing, EnvironmentFault when it is not complete.
    """
    if wish == "none":
        return None, []
    if wish != "latest":
        folder = next((path for path in (Path(wish), root / wish) if path.is_dir()), None)
        if folder is None:
            known = ", ".join(path.name for path in numbered(root)) or "none yet"
            raise SettingsError(
                f"resume_from_checkpoint = {wish}: there is no such folder", f"checkpoints here: {known}"
            )
        return opened(folder), []
    passed_over = []
    for folder in numbered(root):
        try:
            return opened(folder), passed_over
        except EnvironmentFault as error:
            passed_over.append(error.message)
    return None, passed_over


def sizes(folder: Path) -> dict[str, int]:
    """Return every file below a folder with its size in bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }


def clear_unfinished(root: Path) -> None:
    """Remove what a killed save left behind."""
    for path in root.glob(".checkpoint-*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest complete checkpoints; each is renamed first, so that a half-removed one is never taken.

    A damaged one is neither counted nor removed.
    """
    for folder in [folder for folder in numbered(root) if is_complete(folder)][keep:]:
        hidden = unfinished(folder)
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


def set_aside(root: Path, step: int) -> list[str]:
    """Move checkpoints after a step out of the way of a run that goes on from there, and return their names.

    Otherwise they would count as the newest: its own would be removed first, and a later start would take them.
    """
    later = [folder for folder in numbered(root) if int(folder.name.removeprefix("checkpoint-")) > step]
    for folder in later:
        (root / SET_ASIDE).mkdir(exist_ok=True)
        replace_folder(folder, root / SET_ASIDE / folder.name)
    return [folder.name for folder in later]
