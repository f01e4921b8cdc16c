"""Where checkpoints are, which of them are complete, and which is the newest. No torch.

    checkpoints/checkpoint-000100/
      model/         weights (float32), with config.json
      exp_avg/ ...   one folder per optimizer moment
      ema/           averaged weights, when EMA is on
      state.json     everything that is not a tensor; size and checksum of every file, and of itself: written last

A checkpoint is written to a hidden folder next to it and renamed when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.system.checksums import is_intact
from simpletuner.system.files import read_file, remove, replace_folder, restore_replaced, unfinished_path

NAME = re.compile(r"checkpoint-(\d+)")
STATE = "state.json"
SET_ASIDE = "set-aside"


Count = Annotated[int, Field(ge=0)]
Group = Annotated[str, StringConstraints(pattern=r"^\w+$")]
"""A group of tensors; it names a folder."""


class PositionFields(BaseModel):
    """`data.order.Position` in JSON; epoch -1 is before the first one."""

    epoch: int = Field(ge=-1)
    batch: Count
    batch_size: int = Field(ge=1)
    consumed: dict[str, Count]
    carried: dict[str, list[Count]] = {}
    cuts: list[list[Count]] = []


class OptimizerFields(BaseModel):
    """How many steps the optimizer took, and the names of its moments."""

    steps: Count
    moments: list[Group]


class StateFields(BaseModel):
    """What `state.json` must hold; older versions wrote no checksums."""

    step: Count
    position: PositionFields
    data: str
    data_version: int = Field(1, ge=1)
    optimizer: OptimizerFields
    ema_updates: Count | None
    files: dict[str, Count]
    checksums: dict[str, str] = {}
    max_steps: Count = 0
    base: dict[str, str] = {}
    model_family: str = ""


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
    """Return a checkpoint after checking its state and every file's size, but not the content of files.

    Raises EnvironmentFault that says what is wrong.
    """
    try:
        state = json.loads(read_file(folder / STATE))
        fields = StateFields.model_validate(state, strict=True)
        if not is_intact(state):
            raise EnvironmentNotReady(f"{folder} is damaged: the checksum of {STATE} does not match")
        if NAME.fullmatch(folder.name) and fields.step != step_of(folder):
            raise EnvironmentNotReady(f"{folder} is damaged: its {STATE} says step {fields.step}")
        for name, size in fields.files.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise EnvironmentNotReady(f"{folder} is damaged: {name} has {found} of {size} bytes")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EnvironmentNotReady(
            f"{folder} is not a complete checkpoint: {STATE}{': ' + where if where else ''}: {first['msg'].lower()}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise EnvironmentNotReady(f"{folder} is not a complete checkpoint: {error}") from None
    return Checkpoint(folder, state)


def is_complete(folder: Path) -> bool:
    """Return whether a checkpoint can be taken."""
    try:
        opened(folder)
    except EnvironmentNotReady:
        return False
    return True


def numbered(root: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first."""
    folders = [path for path in root.glob("checkpoint-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: -step_of(path))


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("checkpoint-"))


def candidates(root: Path, wish: str) -> list[Path]:
    """Return the folders that a run may resume from, best first.

    `wish` is `latest`, `none`, or a folder (a path, or a name below `root`). Raises SettingsError when that folder is
    missing.
    """
    if wish == "none":
        return []
    if wish == "latest":
        return numbered(root)
    folder = next((path for path in (Path(wish), root / wish) if path.is_dir()), None)
    if folder is None:
        known = ", ".join(path.name for path in numbered(root)) or "none yet"
        raise SettingsError(f"resume_from_checkpoint = {wish}: there is no such folder", f"checkpoints here: {known}")
    return [folder]


def refuse_damaged(root: Path, problems: Sequence[str]) -> EnvironmentNotReady:
    """Return the error for a run that could only start again from the base model, which must be asked for."""
    return EnvironmentNotReady(
        f"no checkpoint in {root} can be resumed:" + "".join(f"\n  {problem}" for problem in problems),
        "--resume_from_checkpoint=none starts again from the base model, and keeps these in `set-aside`",
    )


def sizes(folder: Path) -> dict[str, int]:
    """Return every file below a folder with its size in bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }


def clear_unfinished(root: Path) -> None:
    """Remove what a killed save left behind; a checkpoint that was being replaced gets its name back."""
    for path in root.glob(".checkpoint-*.unfinished"):
        remove(path)
    for path in root.glob(".checkpoint-*.old"):
        restore_replaced(root / path.name.removeprefix(".").removesuffix(".old"))


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest complete checkpoints; each is renamed first, so that a half-removed one is never taken.

    A damaged one is neither counted nor removed.
    """
    for folder in [folder for folder in numbered(root) if is_complete(folder)][keep:]:
        hidden = unfinished_path(folder)
        remove(hidden)
        folder.rename(hidden)
        remove(hidden)


def set_aside(root: Path, step: int) -> list[str]:
    """Move checkpoints after a step out of the way of a run that goes on from there, and return their names.

    Otherwise they would count as the newest: its own would be removed first, and a later start would take them.
    """
    later = [folder for folder in numbered(root) if step_of(folder) > step]
    for folder in later:
        (root / SET_ASIDE).mkdir(exist_ok=True)
        replace_folder(folder, root / SET_ASIDE / folder.name)
    return [folder.name for folder in later]
