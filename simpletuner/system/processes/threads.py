"""Work in threads: a stream of items, few at a time; blocks of columns in parallel; or one call after
another.

multiprocessing's ThreadPool is not used, since its semaphores need /dev/shm.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

# More gain little for blocks of columns, which wait for memory.
MOST_THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_bounded(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, stop: Callable[[], None]
) -> Iterator[tuple[Item, Future[Result]]]:
    """Yield each item with its finished future, in any order, with at most `threads` at once."""
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


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results in order. The first error is raised once running work has ended."""
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="block") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def in_daemon(call: Callable[[], Result], name: str) -> Future[Result]:
    """Call in a daemon thread: an early exit would wait for a ThreadPoolExecutor's."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def map_in_daemons(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Callable[[], list[Result]]:
    """Begin to work on all items, one by one, and return what waits for the results, in order.

    That raises an error of the work.
    """
    left = deque(enumerate(items))

    def take() -> list[tuple[int, Result]]:
        found: list[tuple[int, Result]] = []
        while left:
            try:
                index, item = left.popleft()
            except IndexError:  # another thread has taken the last one
                break
            found.append((index, work(item)))
        return found

    futures = [in_daemon(take, "items") for _ in range(min(threads, len(items)))]
    return lambda: [
        result
        for _, result in sorted((each for future in futures for each in future.result()), key=lambda pair: pair[0])
    ]


class SerialWorker:
    """A thread that runs calls in order, for work that must neither delay nor end a run."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called with the first error, by a later `submit` or `close`."""
        self.pool, self.failed = ThreadPoolExecutor(1, thread_name_prefix=name), failed
        self.last: Future[Any] | None = None
        self.has_failed = False

    @property
    def is_idle(self) -> bool:
        return self.last is None or self.last.done()

    @property
    def is_queued(self) -> bool:
        """True while the last call has not begun."""
        return self.last is not None and not (self.last.running() or self.last.done())

    def submit(self, call: Callable[..., object], *arguments: object) -> None:
        self._check()
        self.last = self.pool.submit(call, *arguments)

    def close(self) -> None:
        """Wait for all calls."""
        self.pool.shutdown()
        self._check()

    def _check(self) -> None:
        error = self.last.exception() if self.last is not None and self.last.done() else None
        if error is not None and not self.has_failed:
            self.has_failed = True
            self.failed(error)
