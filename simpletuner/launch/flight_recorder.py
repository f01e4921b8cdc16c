"""torch's flight recorder: the last collectives of each rank, in the folder of a run that hung. No torch at import.

torch writes them where a collective of NCCL times out, after 10 minutes. The launcher finds most hangs earlier, and
asks the ranks for them before it ends them: only a rank that is stopped cannot answer.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from simpletuner.system.files.atomic import write_file

FILES = "flight_recorder_rank_"
PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path of torch's own dumps, to which it adds the rank."""
OLDER = {PREFIX: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""Names that torch reads as well."""


def record_into(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Have torch record collectives, and write them into a folder when one times out. The user's variables stay.

    Call it before the process group is made.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # torch's default, which an older one may not have
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        PREFIX: str(prefix_in(folder, environment)),
    }
    for name, value in wanted.items():
        if name not in environment and OLDER.get(name, name) not in environment:
            environment[name] = value


def prefix_in(folder: Path, environment: Mapping[str, str]) -> Path:
    """Return the path of all dumps but for the ranks: the user's, or in the folder of a run."""
    return Path(environment.get(PREFIX) or environment.get(OLDER[PREFIX]) or folder.absolute() / FILES)


def write_records(prefix: Path, rank: int) -> None:
    """Write the last collectives of this rank, as torch would; nothing before there were any. Raises OSError."""
    from simpletuner.private_api.of_torch import flight_records

    if records := flight_records():
        write_file(prefix.with_name(f"{prefix.name}{rank}"), records)


def dumps_at(prefix: Path) -> dict[Path, int]:
    """Return the dumps that exist, with the times at which they were written, in nanoseconds."""
    try:
        return {path: path.stat().st_mtime_ns for path in prefix.parent.glob(f"{prefix.name}*[0-9]")}
    except OSError:
        return {}


def where_dumps_are(prefix: Path, before: Mapping[Path, int]) -> str:
    """Return where the dumps are that were not there before, and what reads them; empty where there are none."""
    new = [path for path, written in dumps_at(prefix).items() if before.get(path) != written]
    if not new:
        return ""
    ranks = ", ".join(sorted((path.name.removeprefix(prefix.name) for path in new), key=lambda rank: (len(rank), rank)))
    compare = shlex.join(["torchfrtrace", str(prefix.parent), "--prefix", prefix.name])
    return (
        f"the last collectives of rank{'s' * (len(new) > 1)} {ranks} are in {prefix}*: `{compare}` compares those of "
        "NCCL, `python -m pickle FILE` prints any"
    )
