"""Layout of checkpoints: folders, files, completeness, and the choice of the newest. No torch.

    checkpoints/checkpoint-000100/
      model/         weights (float32), with config.json: the denoiser's, or those of a LoRA alone
      exp_avg/ ...   one folder per optimizer moment
      ema/           averaged weights, when EMA is on
      state.json     everything that is not a tensor; size and checksum of every file and of itself; written last

A checkpoint is written to a hidden folder next to its final place and renamed when it is complete, so a
folder with a checkpoint's name is never half written.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from simpletuner.errors import EnvironmentNotReady, SettingsError, without_errno
from simpletuner.settings.values.parsed import checkpoint_name
from simpletuner.system.files.atomic import (
    is_being_removed,
    is_left_over,
    move_folder,
    remove,
    remove_in_place,
    restore_replaced,
    unfinished_path,
)
from simpletuner.system.files.checksums import is_intact
from simpletuner.system.files.regular_files import read_file

NAME = re.compile(r"checkpoint-(\d+)")
STATE = "state.json"
SET_ASIDE = "set-aside"
PAGE = "report.html"
# Folder of requests for images (`training/validation/sample_requests.py`), and ends of their names.
REQUESTS, REQUEST, TAKEN_REQUEST = "sample-requests", ".request", ".taken"
REQUEST_NAME = re.compile(rf"(?P<id>[0-9a-f]{{24}})\{REQUEST}", re.ASCII)
# Names of that folder that a run looks at, so that a full one costs no time.
MOST_LISTED = 1000
# Folders beside `checkpoints` to which a run exports, by model_type; of the average with `-ema`, of a
# checkpoint with its step.
EXPORTS = {"full": "pipeline", "lora": "pipeline_lora_weights"}
BEST_SUFFIX = "-best"
"""Ending of the folder to which the best step by the held-out loss is exported."""
# In an exported folder: its number of steps, with size and checksum of every file; written last.
FINISHED = "simpletuner.json"


Count = Annotated[int, Field(ge=0)]
Group = Annotated[str, StringConstraints(pattern=r"^\w+$")]
"""A group of tensors. It names a folder, so it must not lead out of the checkpoint."""


class PositionFields(BaseModel):
    """`SamplerState` in JSON."""

    epoch: Count
    batch: Count
    batch_size: int = Field(ge=1)
    consumed: dict[str, Count]
    carried: dict[str, list[Count]] = {}


class OptimizerFields(BaseModel):
    """The number of steps that the optimizer took, and the names of its moments."""

    steps: Count
    moments: list[Group]


class ScheduleFields(BaseModel):
    """`Schedule` in JSON, but for its last step."""

    epochs: Count | None
    start_step: Count
    start_progress: float
    planned_steps: Count


class StateFields(BaseModel):
    step: Count
    position: PositionFields
    data: str
    data_version: Count
    optimizer: OptimizerFields
    ema_updates: Count | None
    files: dict[str, Count]
    checksums: dict[str, str]
    max_steps: Count
    schedule: ScheduleFields
    base: dict[str, str] = {}
    base_checksums: dict[str, str] = {}
    model_family: str = ""
    model_type: Literal["full", "lora"] = "full"
    lora: dict[str, int | float | str] = {}
    proven: dict[str, str] = {}
    denoiser: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its state."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def files(self, group: str) -> list[Path]:
        # Not a listing of the folder: a network file system may list fewer for a while.
        names = (name for name in self.state["files"] if name.endswith(".safetensors"))
        return sorted(self.folder / name for name in names if Path(name).parent == Path(group))


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / checkpoint_name(str(step))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load a checkpoint's state and check it and the size of every file, but not the content of files.

    Raises EnvironmentNotReady that says what is wrong.
    """
    try:
        state = json.loads(read_file(folder / STATE))
        fields = StateFields.model_validate(state, strict=True)
        if not is_intact(state):
            raise EnvironmentNotReady(f"{folder} is damaged: the checksum of {STATE} does not match")
        if NAME.fullmatch(folder.name) and fields.step != parse_step(folder):
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
        raise EnvironmentNotReady(f"{folder} is not a complete checkpoint: {without_errno(error)}") from None
    return Checkpoint(folder, state)


def is_complete(folder: Path) -> bool:
    try:
        load_checkpoint(folder)
    except EnvironmentNotReady:
        return False
    return True


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint folders of a run, complete or not, newest first."""
    folders = [path for path in root.glob("checkpoint-*") if NAME.fullmatch(path.name) and path.is_dir()]
    folders = [path for path in folders if not is_being_removed(path)]
    return sorted(folders, key=lambda path: -parse_step(path))


def parse_step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def find_resume_folders(root: Path, wish: str) -> list[Path]:
    """Return the folders that a run may resume from, best first.

    `wish` is `latest`, `none`, or a folder (a path, or a name below `root`). Raises SettingsError when that
    folder is missing.
    """
    if wish == "none":
        return []
    if wish == "latest":
        return list_checkpoints(root)
    folder = next((path for path in (Path(wish), root / wish) if path.is_dir()), None)
    if folder is None:
        known = ", ".join(path.name for path in list_checkpoints(root)) or "none yet"
        raise SettingsError(f"resume_from_checkpoint = {wish}: there is no such folder", f"checkpoints here: {known}")
    return [folder]


def files_to_resume_from(root: Path, wish: str) -> list[Path]:
    """Return the files of the checkpoint that a run is likely to resume from; empty if there is none."""
    try:
        folders = find_resume_folders(root, wish)
        return [path for path in sorted(folders[0].rglob("*")) if path.is_file()] if folders else []
    except (SettingsError, OSError):  # all ranks say so together, later
        return []


def all_damaged_error(root: Path | str, problems: Sequence[str]) -> EnvironmentNotReady:
    """Error for a run that could only start again from the base model; the user must ask for that."""
    return EnvironmentNotReady(
        f"no checkpoint in {root} can be resumed:" + "".join(f"\n  {problem}" for problem in problems),
        "--resume_from_checkpoint=none starts again from the base model, and keeps these in `set-aside`",
    )


def file_sizes(folder: Path, names: Iterable[str] = ()) -> dict[str, int]:
    """Files below a folder, or only `names`, with their sizes in bytes. Raises OSError."""
    listed = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: (folder / name).stat().st_size for name in sorted(names or listed)}


def clear_unfinished(root: Path) -> None:
    """Remove what a killed save left behind; a checkpoint that was being replaced gets its name back."""
    for path in [*root.glob(".checkpoint-*.unfinished"), *(root / SET_ASIDE).glob(".checkpoint-*.unfinished")]:
        remove(path)
    for path in [*root.glob(".checkpoint-*.old"), *root.glob(".checkpoint-*.new")]:
        restore_replaced(root / path.stem.removeprefix("."))
    for path in root.glob("checkpoint-*"):
        if is_left_over(path):
            remove(path)


ChooseStep = Callable[[Collection[int]], int | None]
"""Returns the best of the steps that have a checkpoint; None where nothing tells."""


def no_best(_: Collection[int]) -> None:
    """Return no step: a run without a held-out loss has no best one."""


def prune_checkpoints(
    root: Path, keep: int, check: Callable[[], None] = lambda: None, choose_best: ChooseStep = no_best
) -> None:
    """Remove all complete checkpoints but the newest and the best. Damaged ones are not counted or removed.

    `check` is called before each is removed, and may raise.
    """
    complete = {parse_step(folder): folder for folder in list_checkpoints(root) if is_complete(folder)}
    for step in steps_to_prune([*complete], keep, choose_best):
        check()
        remove_checkpoint(complete[step])


def steps_to_prune(steps: Sequence[int], keep: int, choose_best: ChooseStep) -> list[int]:
    """Return the checkpoints, newest first, that are neither among the newest nor the best."""
    old = steps[keep:]
    best = choose_best(steps) if old else None
    return [step for step in old if step != best]


def remove_checkpoint(folder: Path) -> None:
    hidden = unfinished_path(folder)
    remove(hidden)
    # Renamed first: a process killed while it removes files must not leave a checkpoint that looks complete.
    try:
        folder.rename(hidden)
    except FileNotFoundError:  # a user, or a page, has just removed it
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove_in_place(folder)
    remove(hidden)


def set_aside(root: Path, step: int) -> list[str]:
    """Move checkpoints after a step out of the way of a run that continues from there, and return their
    names.

    Left in place they would count as the newest: the run's own would be pruned first, and the next start
    would resume from them. What an earlier start has set aside stays: of the same step there may be two, of
    different training.
    """
    later = [folder for folder in list_checkpoints(root) if parse_step(folder) > step]
    for folder in later:
        (root / SET_ASIDE).mkdir(exist_ok=True)
        target, number = root / SET_ASIDE / folder.name, 2
        while target.exists():
            target, number = target.with_name(f"{folder.name}-{number}"), number + 1
        move_folder(folder, target)
    return [folder.name for folder in later]
