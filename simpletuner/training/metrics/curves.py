"""Curves of metrics: a running mean that does not lag, and as few points as a screen can show."""

from __future__ import annotations

import numpy as np

# Of all steps: how many the running mean is over.
WINDOW_SHARE = 0.05


def window_of(points: int, share: float = WINDOW_SHARE) -> int:
    """Return how many points the running mean of a curve is over: an odd number."""
    return 2 * max(1, round(points * share / 2)) + 1


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred running mean; near the ends, where the window is truncated, a linear fit.

    A mean of what is there would be that of a point further inside: of a falling loss, too low at first and too high
    at last. An exponential mean lags everywhere.
    """
    count, half, position = len(values), window // 2, np.arange(len(values), dtype=np.float64)
    first, last = np.maximum(position - half, 0).astype(int), np.minimum(position + half + 1, count).astype(int)

    def window_mean(each: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(each)])
        return (sums[last] - sums[first]) / (last - first)

    # Least squares within each window; in the middle the slope has no influence.
    mean_value, mean_position = window_mean(values), window_mean(position)
    spread = window_mean(position**2) - mean_position**2
    # A window of one point has no spread, and no slope.
    slope = (window_mean(position * values) - mean_position * mean_value) / np.maximum(spread, 1e-9)
    return mean_value + slope * (position - mean_position)


def thin_out(steps: np.ndarray, values: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest point of each of `columns` equal parts of a curve, so that no peak is lost."""
    if len(steps) <= 2 * columns:
        return steps, values
    width = -(-len(steps) // columns)
    padded = np.pad(values, (0, -len(steps) % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(padded)) * width
    extremes = np.stack([padded.argmin(axis=1), padded.argmax(axis=1)], axis=1) + starts[:, None]
    kept = np.unique(np.minimum(extremes, len(steps) - 1))
    return steps[kept], values[kept]
