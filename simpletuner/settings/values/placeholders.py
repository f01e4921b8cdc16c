"""Replace names in braces in the paths of cache folders, such as `cache/{model_family}/{id}`, as the original does.

`{env:NAME}` is replaced in every path, where `~` is (`system/files/paths.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PLACEHOLDER = re.compile(r"\{([\w:]+)\}")
OF_A_RUN = ("model_family", "output_dir")
OF_A_DATASET = (*OF_A_RUN, "id")


def only_placeholders(*known: str) -> Callable[[Any], Any]:
    """Return a validator that raises ValueError for a path with any other name in braces."""

    def check(path: Path | None) -> Path | None:
        if unknown := next((name for name in PLACEHOLDER.findall(str(path or "")) if name not in known), ""):
            names = " and ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"{{{unknown}}} stands for nothing here; {names} do: write the path itself")
        return path

    return check


def fill(path: Path, values: Mapping[str, object]) -> Path:
    """Replace names in braces by their values; other names stay."""
    return Path(PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), str(path)))
