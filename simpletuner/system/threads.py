"""Blocks of columns in parallel: numpy and Arrow let other threads run while they compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 8
"""More gain little: memory is what blocks of columns wait for."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results in order. The first error is raised once running work has ended."""
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="block") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
