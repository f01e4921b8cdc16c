"""Work in threads whose results are wanted as they come, few at a time, so that a stop takes a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_bounded(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, stop: Callable[[], None]
) -> Iterator[tuple[Item, Future[Result]]]:
    """Yield each item with its finished future, in any order; no more than `threads` items are taken at once."""
    left, running = iter(items), dict[Future[Result], Item]()
    with ThreadPoolExecutor(threads) as pool:
        while True:
            stop()
            while len(running) < threads and (item := next(left, None)) is not None:
                running[pool.submit(work, item)] = item
            if not running:
                return
            finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                yield running.pop(future), future
