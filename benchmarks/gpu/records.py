"""Figures as lines of JSON: told by a part on stdout, written by the driver as soon as they are there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]
DIGITS = 5
ERROR_LENGTH = 700


def tell(**found: object) -> None:
    """Print figures, which the driver adds to the results."""
    print(json.dumps({key: rounded(value) for key, value in found.items()}), flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return {key: rounded(each) for key, each in value.items()} if isinstance(value, dict) else value


def read_records(files: Iterable[Path]) -> Iterator[Record]:
    """Yield the records of files; a line that a killed driver has cut off is passed over."""
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with suppress(ValueError):
                yield json.loads(line)


def farthest(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference between two series, as far as both go."""
    pairs = zip(values, others, strict=False)
    return max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)


def last_words(log: str) -> str:
    """Return the end of a log: from the sentence of its last error, or its last lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith("error")]
    return " | ".join(lines[errors[-1] if errors else -4 :][:6])[:ERROR_LENGTH]


def show(value: object) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)
