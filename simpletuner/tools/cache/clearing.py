"""Find the caches that settings name, and remove all that were asked for, or none when a run uses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from simpletuner.deepspeed.swap_files import remove_swap_folder
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.settings import Settings
from simpletuner.system.files.cache_files import IN_USE, bytes_of, files_of, lock_of
from simpletuner.system.files.lease import Lease, nothing
from simpletuner.system.files.lease_folder import FolderPlace
from simpletuner.system.files.locks import exclusive_lock
from simpletuner.tools.cache.contents import CacheItem, CacheKind, find_blocks, find_run_shards, find_swap

SHARDED = (CacheKind.LATENTS, CacheKind.TEXT)


def refuse_in_use(items: Sequence[CacheItem]) -> None:
    """Raise EnvironmentNotReady for caches that a run uses, or may use. Live swap folders are skipped.

    Those that a run on another machine may use are watched when they are cleared.
    """
    for item in items:
        may_be_watched = item.in_use is None and not FolderPlace(item.path, IN_USE).system.shows_locks
        if item.kind in SHARDED and item.in_use is not False and not may_be_watched:
            raise in_use_error(item, item.in_use)


def in_use_error(item: CacheItem, in_use: bool | None) -> EnvironmentNotReady:
    if in_use:
        return EnvironmentNotReady(
            f"{item.path} is in use by a run, so nothing is removed",
            "stop that run or wait for it, then run this command again",
        )
    return EnvironmentNotReady(
        f"{item.path} cannot be locked, so it is unknown whether a run uses it, and nothing is removed",
        f"make sure that no run uses it, then `rm {item.path}/rank*`",
    )


def clear(items: Sequence[CacheItem], say: Callable[[str], None] = nothing) -> int:
    """Remove caches, except those marked as kept, and return how many bytes were removed.

    Where locks do not cross machines, it is watched for a while whether a run uses one, which `say` tells.

    Raises EnvironmentNotReady, before removing anything, if a run uses one or a file cannot be removed.
    """
    removed = 0
    with ExitStack() as stack, removal_errors():
        leases = {item.path: lock_exclusively(item, stack, say) for item in items if item.kind in SHARDED}
        for item in items:
            for lease in leases.values():  # a run may use them by now, if this process was stopped for a while
                lease.check()
            if not item.kept:
                removed += REMOVE[item.kind](item)
                leases.pop(item.path, None)  # its record has gone with it, which would look taken over
    return removed


@contextmanager
def removal_errors() -> Iterator[None]:
    """Translate what the system refuses into EnvironmentNotReady."""
    try:
        yield
    except OSError as error:
        hint = "check who owns it; what was removed before it is gone"
        raise EnvironmentNotReady(f"cannot remove {error.filename}: {error.strerror}", hint) from None


def lock_exclusively(item: CacheItem, stack: ExitStack, say: Callable[[str], None] = nothing) -> Lease:
    """Keep runs out of a cache folder until `stack` is closed. A folder that is gone needs no lock."""
    place, lease = FolderPlace(item.path, IN_USE), Lease()
    stack.callback(place.unlock)
    stack.callback(lease.release)
    try:
        if not place.system.shows_locks:
            lease.acquire(place, say=say, way_on="")
        elif is_locked := place.lock(exclusive=True):
            raise in_use_error(item, in_use=True)
        elif is_locked is None:
            raise in_use_error(item, in_use=None)
    except FileNotFoundError:
        return lease
    except OSError:
        raise in_use_error(item, in_use=None) from None
    return lease


def remove_blocks(item: CacheItem) -> int:
    lock = lock_of(item.path)
    with exclusive_lock(lock):
        removed = bytes_of(item.path)
        for path in [item.path, *item.path.parent.glob(f".{item.path.name}.*unfinished")]:
            path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    return removed


def remove_swap(item: CacheItem) -> int:
    removed = bytes_of(item.path)
    remove_swap_folder(item.path)
    return removed


def remove_shards(item: CacheItem) -> int:
    removed = 0
    files, _ = files_of(item.path)
    # The lock goes last: a run that starts meanwhile would lock a new file and lose its cache.
    for path in sorted(files, key=lambda path: (path.name.startswith(IN_USE), path.name == IN_USE)):
        removed += bytes_of(path)
        path.unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it, or it is a link
        item.path.rmdir()
    return removed


REMOVE = {
    CacheKind.BLOCKS: remove_blocks,
    CacheKind.DEEPSPEED: remove_swap,
    CacheKind.LATENTS: remove_shards,
    CacheKind.TEXT: remove_shards,
}


def find_caches(settings: Settings, kinds: Sequence[CacheKind]) -> tuple[list[CacheItem], list[Path]]:
    """Return caches, and files among them that simpletuner did not write.

    Raises SettingsError for a folder that holds more than what was asked for.
    """
    wanted = set(CacheKind) if CacheKind.ALL in kinds else set(kinds)
    items, foreign = find_blocks() if CacheKind.BLOCKS in wanted else [], []
    if CacheKind.DEEPSPEED in wanted:
        swapped, foreign = find_swap(settings.parallel.offload_param_path)
        items += swapped
    if wanted & {CacheKind.LATENTS, CacheKind.TEXT}:
        items += select_shards(*find_run_shards(settings), wanted)
    return items, foreign


def select_shards(latents: Sequence[CacheItem], text: Sequence[CacheItem], wanted: set[CacheKind]) -> list[CacheItem]:
    """Items of the wanted kinds. A folder that holds both is one item, and needs both to be wanted."""
    paths = {item.path.resolve() for item in latents}
    shared = [item for item in text if item.path.resolve() in paths]
    if shared and not {CacheKind.LATENTS, CacheKind.TEXT} <= wanted:
        raise SettingsError(
            f"{shared[0].path} caches latents and text in the same files: they can only be cleared together",
            "name both: `simpletuner cache clear latents text`",
        )
    return [item for item in [*latents, *text] if item.kind in wanted and item not in shared]
