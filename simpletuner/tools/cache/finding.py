"""Find the caches that settings name, of the kinds that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.settings import Settings
from simpletuner.tools.cache.contents import CacheItem, CacheKind, find_blocks, find_run_shards, find_swap


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
    """Return the items of the wanted kinds. A folder that holds both is one item, and needs both to be wanted."""
    paths = {item.path.resolve() for item in latents}
    shared = [item for item in text if item.path.resolve() in paths]
    if shared and not {CacheKind.LATENTS, CacheKind.TEXT} <= wanted:
        raise SettingsError(
            f"{shared[0].path} caches latents and text in the same files: they can only be cleared together",
            "name both: `simpletuner cache clear latents text`",
        )
    return [item for item in [*latents, *text] if item.kind in wanted and item not in shared]
