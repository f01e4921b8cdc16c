"""`settings.json`, the settings of a run, and `settings_history.jsonl`, what changed in them from start to start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simpletuner import __version__
from simpletuner.errors import EnvironmentNotReady
from simpletuner.session import Session
from simpletuner.settings import settings_as_json
from simpletuner.system.files import APPEND, read_file, write_json

SETTINGS, HISTORY = "settings.json", "settings_history.jsonl"
SHOWN = 12

Changes = dict[str, list[Any]]
"""Setting -> [before, now]."""


def record_settings(session: Session, step: int) -> None:
    """Write the settings of a run that starts to train at `step`, and report what changed since its last start.

    A start that ends before training leaves the files as they are. Only rank 0 writes.
    """
    if not session.world.is_first:
        return
    output, settings = session.settings.training.output_dir, settings_as_json(session.loaded)
    before = read_settings(output / SETTINGS)
    changes = changed(before, settings) if before is not None else {}
    if changes:
        session.report.say(f"settings changed since the last start: {as_text(changes)}")
    if before is None or changes:
        write_json(output / SETTINGS, settings)
        time = datetime.now(UTC).isoformat(timespec="seconds")
        append(output / HISTORY, {"time": time, "step": step, "simpletuner": __version__, "changed": changes})


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of the last start; None if there are none or they are damaged."""
    try:
        settings = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the settings that differ; one that a version did not have yet counts as unchanged."""
    return {name: [before[name], now[name]] for name in now if name in before and before[name] != now[name]}


def as_text(changes: Changes) -> str:
    shown = [f"{name} {json.dumps(old)} -> {json.dumps(new)}" for name, (old, new) in list(changes.items())[:SHOWN]]
    more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return ", ".join(shown) + more


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line; a link of that name is not followed. Raises EnvironmentNotReady for one."""
    if path.is_symlink():
        raise EnvironmentNotReady(f"{path} is a link, which is not followed", "remove it")
    descriptor = os.open(path, APPEND, 0o666)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
