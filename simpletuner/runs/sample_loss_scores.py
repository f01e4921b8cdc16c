"""Samples by their loss, compared with others at the same timesteps in the same part of the run. No torch.

With L the loss of a sample at a step, r = ln L - mean of ln L over all samples in the same window of steps
and the same bin of timesteps - mean of that over the samples of its bucket: windows, and bins of timesteps,
have equally many rows. Of a sample seen n times, z = mean(r) sqrt(n) / std(r of all samples): its distance
from the others in standard errors. The first quarter of the run does not count: what captions mean is not
learned yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simpletuner.errors import SettingsError
from simpletuner.system.files.regular_files import open_regular

SAMPLE_LOSSES = "sample_losses.jsonl"
# The largest file that is read: 300 million losses.
MAX_BYTES = 16 << 30

# Rows in a cell of window and bin: the mean of ln L, whose spread within a bin is about 0.5, is known to 0.1.
CELL_ROWS = 32
SKIPPED = 0.25
BINS, MAX_WINDOWS = 10, 50
# z from which a sample counts as one to look at: of 1,000 that are alike 1 has it by chance.
LOOKS_WRONG = 3.0


@dataclass(frozen=True)
class SampleScore:
    """Score of a sample: its loss over that of others at the same timesteps, in all and in the last third."""

    id: str
    seen: int
    ratio: float
    """exp(mean r)."""
    ratio_at_end: float
    """The same over the last third of the steps; nan where it was not seen there."""
    z: float

    @property
    def looks_wrong(self) -> bool:
        return self.z >= LOOKS_WRONG


@dataclass(frozen=True)
class LossRows:
    """Columns of the file, (rows,) each: `samples` are indices into `ids`, `buckets` numbers."""

    ids: list[str]
    steps: np.ndarray
    buckets: np.ndarray
    samples: np.ndarray
    timesteps: np.ndarray
    losses: np.ndarray


def read_losses(path: Path) -> LossRows:
    """Rows of a file; a torn or damaged one is left out. Raises SettingsError where there is no file."""
    if not path.is_file():
        raise SettingsError(f"there is no {path}", "train with --log_sample_losses, which writes it")
    numbers: dict[str, int] = {}
    buckets: dict[str, int] = {}
    columns: tuple[list[float], ...] = ([], [], [], [], [])
    with open_regular(path, MAX_BYTES) as file:
        for step, bucket, names, timesteps, losses in (row for line in file for row in parse(line)):
            own = [numbers.setdefault(name, len(numbers)) for name in names]
            repeated = [step] * len(own), [buckets.setdefault(bucket, len(buckets))] * len(own)
            for column, values in zip(columns, (*repeated, own, timesteps, losses), strict=True):
                column.extend(values)
    steps, of_buckets, samples, timesteps, losses = (np.array(column, dtype=np.float64) for column in columns)
    return LossRows(list(numbers), steps, of_buckets.astype(int), samples.astype(int), timesteps, losses)


def parse(line: bytes) -> Iterator[tuple[int, str, list[str], list[float], list[float]]]:
    try:
        row = json.loads(line)
        step, bucket, names = int(row["step"]), str(row["bucket"]), [str(name) for name in row["ids"]]
        timesteps, losses = ([float(value) for value in row[name]] for name in ("timesteps", "losses"))
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    if len(names) == len(timesteps) == len(losses) and np.isfinite([*timesteps, *losses]).all():
        yield step, bucket, names, timesteps, losses


def score_samples(rows: LossRows) -> list[SampleScore]:
    """Samples that were seen after the first quarter, those of the loss furthest above others first."""
    if not len(rows.steps):
        return []
    relative, last = relative_losses(rows), rows.steps.max()
    counts = rows.steps > last * SKIPPED
    of_buckets = np.bincount(rows.buckets[counts], relative[counts]) / np.maximum(np.bincount(rows.buckets[counts]), 1)
    relative = relative - np.append(of_buckets, np.zeros(rows.buckets.max() + 1))[rows.buckets]
    spread = relative[counts].std() or 1.0
    seen, mean = means_of(rows, relative, counts)
    is_late = rows.steps > last * 2 / 3
    _, at_end = means_of(rows, relative, is_late)
    z = mean * np.sqrt(seen) / spread
    scores = [
        SampleScore(name, int(seen[i]), float(np.exp(mean[i])), float(np.exp(at_end[i])), float(z[i]))
        for i, name in enumerate(rows.ids)
        if seen[i]
    ]
    return sorted(scores, key=lambda each: -each.z)


def relative_losses(rows: LossRows) -> np.ndarray:
    """Return r of each row: ln of its loss, minus the mean in its cell of window and bin."""
    logs = np.log(np.maximum(rows.losses, 1e-12))  # the loss of an image whose mask is black is 0
    count = len(logs)
    bins = max(1, min(BINS, count // CELL_ROWS))
    windows = max(1, min(MAX_WINDOWS, count // (bins * CELL_ROWS)))
    window = np.argsort(np.argsort(rows.steps, kind="stable"), kind="stable") * windows // count
    relative = np.empty(count)
    for number in range(windows):
        own = np.flatnonzero(window == number)
        ranks = np.argsort(np.argsort(rows.timesteps[own], kind="stable"), kind="stable") * bins // len(own)
        sums, counts = (np.bincount(ranks, weights, bins) for weights in (logs[own], None))
        relative[own] = logs[own] - (sums / np.maximum(counts, 1))[ranks]
    return relative


def means_of(rows: LossRows, relative: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count each sample among the chosen rows, and average its r there; nan without such a row."""
    count = np.bincount(rows.samples[chosen], minlength=len(rows.ids))
    sums = np.bincount(rows.samples[chosen], relative[chosen], len(rows.ids))
    return count, np.where(count > 0, sums / np.maximum(count, 1), np.nan)
