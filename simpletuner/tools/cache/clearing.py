"""Remove caches: all that were asked for, or nothing when a run uses one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from simpletuner.deepspeed import swap_files as swap
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import IN_USE, bytes_of, files_of, lock_of
from simpletuner.system.files import unfinished_path
from simpletuner.system.locks import exclusive_lock, lock_file
from simpletuner.tools.cache.contents import Item, Kind

SHARDED = (Kind.LATENTS, Kind.TEXT)


def refuse_in_use(items: Sequence[Item]) -> None:
    """Raise EnvironmentFault for caches that a run uses, or may use. Swap folders of live runs are passed over."""
    for item in items:
        if item.kind in SHARDED and item.in_use is not False:
            raise fault_of_use(item, item.in_use)


def fault_of_use(item: Item, in_use: bool | None) -> EnvironmentNotReady:
    """Return what to say about a cache that a run uses, or may use."""
    if in_use:
        return EnvironmentNotReady(
            f"{item.path} is in use by a run, so nothing is removed", "stop that run or wait for it, then say it again"
        )
    return EnvironmentNotReady(
        f"{item.path} cannot be locked, so nobody can tell whether a run uses it, and nothing is removed",
        f"see that no run uses it, then `rm {item.path}/rank*`",
    )


def clear(items: Sequence[Item]) -> int:
    """Remove caches, but those to be kept, and return how many bytes that were.

    Raises EnvironmentFault, before anything is removed, when a run uses one of them; or when a file cannot be removed.
    """
    with ExitStack() as stack:
        for item in items:
            if item.kind in SHARDED:
                hold_alone(item, stack)
        try:
            return sum(REMOVE[item.kind](item) for item in items if not item.kept)
        except OSError as error:
            hint = "see who owns it; what was removed before it is gone"
            raise EnvironmentNotReady(f"cannot remove {error.filename}: {error.strerror}", hint) from None


def hold_alone(item: Item, stack: ExitStack) -> None:
    """Keep runs out of a cache folder while it is cleared; a folder that vanished needs no keeping out."""
    try:
        descriptor = lock_file(item.path / IN_USE, exclusive=True)
    except FileNotFoundError:
        return
    except BlockingIOError:
        raise fault_of_use(item, in_use=True) from None
    except OSError:
        raise fault_of_use(item, in_use=None) from None
    stack.callback(os.close, descriptor)


def remove_blocks(item: Item) -> int:
    """Remove the block cache while nobody writes it."""
    lock = lock_of(item.path)
    with exclusive_lock(lock):
        removed = bytes_of(item.path)
        unfinished_path(item.path).unlink(missing_ok=True)
        item.path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    return removed


def remove_swap(item: Item) -> int:
    """Remove a swap folder of a dead run."""
    removed = bytes_of(item.path)
    swap.remove(item.path)
    return removed


def remove_shards(item: Item) -> int:
    """Remove our files, the lock last, and the folder if that leaves it empty."""
    removed = 0
    files, _ = files_of(item.path)
    for path in sorted(files, key=lambda path: path.name == IN_USE):
        removed += bytes_of(path)
        path.unlink(missing_ok=True)
    with suppress(OSError):  # something else lies in it, or it is a link
        item.path.rmdir()
    return removed


REMOVE = {
    Kind.BLOCKS: remove_blocks,
    Kind.DEEPSPEED: remove_swap,
    Kind.LATENTS: remove_shards,
    Kind.TEXT: remove_shards,
}
