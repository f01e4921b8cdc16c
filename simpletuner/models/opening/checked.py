"""Note of a run that its base model was found complete, so that later starts need not ask for it again.

The check takes 1 CPU second of the 6 to the first step of a start with warm caches: most of it imports classes of text
encoders that nothing else needs then.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.launch.node_info import versions
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.completeness import check_complete
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.regular_files import read_file

NOTE = "base_model.json"


def check_once(family: ModelFamily, run_folder: Path, is_first: bool) -> None:
    """Check a base model unless this run has done so with the same files and versions; the first rank writes the note.

    Raises EnvironmentNotReady as `check_complete` does.
    """
    note, facts = run_folder / NOTE, facts_of(family)
    if read_note(note) == facts:
        return
    check_complete(family)
    if is_first:
        with suppress(OSError):  # no reason to end a run
            write_json(note, facts)


def facts_of(family: ModelFamily) -> dict[str, Any]:
    """Return, as JSON has it, what the verdict depends on: settings of the model, versions, and size and change of each
    file."""
    files = {}
    for path in sorted(family.folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            files[path.relative_to(family.folder).as_posix()] = [status.st_size, status.st_mtime_ns]
    model = family.settings.model.model_dump(mode="json")
    return {"folder": str(family.folder), "model": model, "versions": versions(), "files": files}


def read_note(path: Path) -> Any:
    """Return what a note holds; None if there is none, or a damaged one."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
