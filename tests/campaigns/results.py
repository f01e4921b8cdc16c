"""What a campaign has found so far, in a file of JSON lines: one that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_result(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
