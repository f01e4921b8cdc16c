"""Files of output_dir that are mirrored: all that a run leaves, except caches and unfinished files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from simpletuner.checkpoints.layout import BEST_SUFFIX, FINISHED, NAME, STATE, list_checkpoints
from simpletuner.errors import EnvironmentNotReady
from simpletuner.run_log import LOG
from simpletuner.runs.charts import CURVE
from simpletuner.runs.metrics import METRICS
from simpletuner.runs.sample_loss_scores import SAMPLE_LOSSES
from simpletuner.system.files.atomic import remove
from simpletuner.system.files.checksums import is_intact
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.processes.run_status import STATUS
from simpletuner.training.metrics.speed import DURATIONS

CHECKPOINTS = "checkpoints"
FOLDERS = ("validation", "logs", "profile", "data_listings")
NAMES = frozenset(
    {
        *(LOG, CURVE, STATUS, METRICS, SAMPLE_LOSSES, DURATIONS, "report.html"),
        *(
            "settings.json",
            "settings_history.jsonl",
            "uncaptioned.txt",
            "hub_datasets.json",
            "wandb.json",
            "trackio.json",
            "swanlab.json",
        ),
        *(
            f"{name}{kind}.safetensors"
            for name in ("pipeline", "pipeline_lora_weights")
            for kind in ("", "-ema", BEST_SUFFIX)
        ),
    }
)
"""Files of a run in output_dir. All else there is the user's, and neither uploaded nor replaced."""
IN_FOLDERS = re.compile(
    r"validation/(step-\d+/[^/]+|[^/]+)\.(png|webp|mp4)|profile/steps-\d+-\d+\.json|data_listings/[^/]+\.parquet|logs/.+"
)
# Hard links to what is being uploaded, which outlive its removal; a start removes what a kill left.
LINKS = ".mirror.unfinished"


class FolderDamaged(EnvironmentNotReady):
    """A checkpoint or a pipeline whose content does not match its manifest."""


Stamp = tuple[int, int]
"""Size and modification time of a file, which differ when its content does."""


@dataclass(frozen=True)
class WholeFolder:
    """A folder of output_dir that counts once its manifest is there: a checkpoint, or a pipeline."""

    name: str
    manifest: str

    @property
    def manifest_name(self) -> str:
        return f"{self.name}/{self.manifest}"

    @property
    def step(self) -> int:
        """The step of a checkpoint; -1 for a pipeline."""
        found = NAME.fullmatch(PurePosixPath(self.name).name)
        return int(found[1]) if found else -1


def whole_folders(output: Path) -> dict[WholeFolder, Stamp]:
    """Return the checkpoints and pipelines on disk that have a manifest, in upload order, and the stamp of
    each manifest."""
    checkpoints = [WholeFolder(f"{CHECKPOINTS}/{path.name}", STATE) for path in list_checkpoints(output / CHECKPOINTS)]
    exported = [WholeFolder(path.parent.name, FINISHED) for path in output.glob(f"[!.]*/{FINISHED}")]
    found = {each: stamp_of(output / each.manifest_name) for each in in_order([*checkpoints, *exported])}
    return {each: stamp for each, stamp in found.items() if stamp is not None}


def whole_folders_among(names: Iterable[str]) -> list[WholeFolder]:
    """Return the checkpoints and pipelines of a bucket that have a manifest, in download order."""
    paths = [PurePosixPath(name) for name in names]
    found = [
        WholeFolder(str(path.parent), path.name)
        for path in paths
        if (path.name == STATE and str(path.parent.parent) == CHECKPOINTS and NAME.fullmatch(path.parent.name))
        or (path.name == FINISHED and len(path.parts) == 2)
    ]
    return in_order(found)


def in_order(folders: Iterable[WholeFolder]) -> list[WholeFolder]:
    """Sort the newest checkpoints before others, and these before pipelines."""
    # A pipeline after its average: it is the sign that a run is done (run_folder/output_dir.py).
    by_name = sorted(folders, key=lambda each: each.name, reverse=True)
    return sorted(by_name, key=lambda each: -each.step)


def single_files(output: Path) -> dict[str, Stamp]:
    # Later files may rely on earlier ones.
    found = {path.relative_to(output).as_posix(): stamp_of(path) for path in walk(output)}
    known = {name: stamp for name, stamp in found.items() if stamp is not None}
    return dict(sorted(known.items(), key=lambda item: item[1][1]))


def is_single(name: str) -> bool:
    """True for the name of a file that is mirrored by itself, not as a part of a checkpoint or pipeline."""
    first, _, rest = name.partition("/")
    if any(part.startswith(".") for part in name.split("/")):
        return False
    return bool(IN_FOLDERS.fullmatch(name)) if rest else first in NAMES


def walk(output: Path) -> Iterator[Path]:
    """Yield the single files, without hidden ones."""
    yield from (path for path in output.glob("[!.]*") if path.is_file() and is_single(path.name))
    for root, folders, files in (each for name in FOLDERS for each in os.walk(output / name)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(root) / name for name in files)
        yield from (path for path in paths if is_single(path.relative_to(output).as_posix()))


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file; None where there is none, or a link."""
    with suppress(OSError):
        found = path.lstat()
        return (found.st_size, found.st_mtime_ns) if path.is_file() and not path.is_symlink() else None
    return None


def parse_manifest(content: bytes, where: str) -> dict[str, Any]:
    """Return a manifest. Raises FolderDamaged for one that is not intact."""
    with suppress(ValueError, RecursionError, AttributeError):
        manifest = json.loads(content)
        if is_intact(manifest) and isinstance(manifest.get("checksums"), dict) and isinstance(manifest["files"], dict):
            return manifest
    raise FolderDamaged(f"{where} is damaged: its checksum does not match")


def linked(output: Path, whole: WholeFolder) -> tuple[Path, bytes]:
    """Folder with the same files, which stay when those are removed, and the manifest. Raises OSError.

    Where the file system has no hard links it is the folder itself.
    """
    source, copy = output / whole.name, output / LINKS
    manifest = read_file(output / whole.manifest_name)
    remove(copy)
    try:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            target = copy / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    except FileNotFoundError:  # it is being removed
        raise
    except OSError:
        remove(copy)
        return source, manifest
    return copy, manifest
