"""Caches that `cache list` and `cache clear` find: one item per file or folder that simpletuner wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.deepspeed.swap_files import SWAP_PREFIX, find_state, read_owner
from simpletuner.system.files.cache_files import (
    INDEX_SUFFIX,
    block_cache_paths,
    bytes_of,
    entries_of,
    files_of,
    is_plain_file,
    is_plain_folder,
    lock_of,
)
from simpletuner.system.files.locks import is_locked
from simpletuner.system.files.regular_files import open_regular, read_file

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset
    from simpletuner.settings import Settings

READ_BYTES = 1 << 20


class CacheKind(StrEnum):
    """A kind of cache that can be cleared."""

    BLOCKS = "blocks"
    DEEPSPEED = "deepspeed"
    LATENTS = "latents"
    TEXT = "text"
    ALL = "all"


@dataclass(frozen=True)
class CacheItem:
    """A cache; `kept` says why clearing skips it, `others` are files in it that simpletuner did not write.

    `datasets` are the ids of datasets that the settings keep there, `bucket` is what it is a copy of.
    """

    kind: CacheKind
    path: Path
    entries: int
    bytes: int
    in_use: bool | None = False
    kept: str = ""
    others: list[Path] = field(default_factory=list)
    datasets: tuple[str, ...] = ()
    bucket: str = ""

    def as_json(self) -> dict[str, object]:
        numbers = {"entries": self.entries, "bytes": self.bytes, "in_use": self.in_use}
        named = {"datasets": list(self.datasets)} if self.datasets else {}
        bucket = {"bucket": self.bucket} if self.bucket else {}
        return {"kind": self.kind.value, "path": str(self.path), **numbers, **named, **bucket}


def find_blocks() -> list[CacheItem]:
    return [
        CacheItem(CacheKind.BLOCKS, path, count_json_entries(path), bytes_of(path), is_locked(lock_of(path)))
        for path in block_cache_paths()
        if is_plain_file(path)
    ]


def find_swap(parent: Path | None) -> tuple[list[CacheItem], list[Path]]:
    """Our swap folders below the offload folder, and DeepSpeed's that are not ours."""
    items, foreign = [], []
    for path in entries_of(parent) if parent is not None else ():
        owner = read_owner(path)
        state = find_state(path, owner)
        if state == "foreign":
            foreign += [path] * path.name.startswith((SWAP_PREFIX, "zero_stage_"))
            continue
        kept = {"live": f"in use by {owner}", "elsewhere": f"made by {owner}: clear it there", "dead": ""}[state]
        in_use = {"live": True, "elsewhere": None, "dead": False}[state]
        items.append(
            CacheItem(CacheKind.DEEPSPEED, path, len(list(entries_of(path))) - 1, bytes_of(path), in_use, kept)
        )
    return items, foreign


def find_run_shards(settings: Settings) -> tuple[list[CacheItem], list[CacheItem]]:
    """Return the folders of latents and of text embeddings that settings name; they need not name a dataset.

    Raises SettingsError for mistakes in the dataset file.
    """
    # Imported here: `cache list` must know the kinds for its help, but needs datasets only now.
    from simpletuner.data.config.embeds import BucketTextEmbeds, default_texts
    from simpletuner.data.config.places import (
        default_folder,
        latents_folder,
        latents_root,
        paired_folder,
        paired_root,
        text_folder,
    )

    named = settings.data.data_backend_config is not None or settings.data.instance_data_dir is not None
    datasets: list[ImageDataset] = []
    texts = [default_texts(settings.data)]
    if named:
        from simpletuner.data.config.datasets import load_datasets  # 0.04 CPU s

        datasets, texts = load_datasets(settings.data)
    text_folders = {each.id: text_folder(each, settings) for each in texts}
    of_texts = {dataset.id: text_folders[dataset.text_embeds or texts[0].id] for dataset in datasets}
    roots = [default_folder(settings, "latents"), latents_root(settings)]
    encoded = [each for dataset in datasets for each in dataset.encoded]
    folders = {each.id: latents_folder(each, settings) for each in encoded}
    latents = find_shards(CacheKind.LATENTS, folders.values(), roots, not_in=text_folders.values())
    buckets = {folders[each.id]: each.latents_bucket.address for each in encoded if each.latents_bucket}
    buckets |= {text_folders[each.id]: each.address for each in texts if isinstance(each, BucketTextEmbeds)}
    own = {each.id: each for each in texts}
    with_texts = [(each, own[each.text_embeds or texts[0].id]) for each in datasets]
    of_paired = {each.id: paired_folder(of_own, each, settings) for each, of_own in with_texts}
    places = {of_paired[each.id]: of_own.of_pairs(each) for each, of_own in with_texts}
    buckets |= {folder: each.address for folder, each in places.items() if isinstance(each, BucketTextEmbeds)}
    paired = [root for each in texts if (root := paired_root(each, settings)).is_dir()]
    found = find_shards(CacheKind.TEXT, text_folders.values(), paired)
    return (
        [with_names(item, folders.items(), buckets) for item in latents],
        [with_names(item, [*of_texts.items(), *of_paired.items()], buckets) for item in found],
    )


def with_names(item: CacheItem, folders: Iterable[tuple[str, Path]], buckets: Mapping[Path, str]) -> CacheItem:
    """Add the datasets that keep records in this folder, and the bucket that it is a copy of."""
    path = item.path.resolve()
    datasets = tuple(name for name, folder in folders if folder.resolve() == path)
    return replace(item, datasets=datasets, bucket=buckets.get(item.path, ""))


def find_shards(
    kind: CacheKind, folders: Iterable[Path], roots: Iterable[Path] = (), not_in: Iterable[Path] = ()
) -> list[CacheItem]:
    """Cache folders among `folders`, `roots` and what is directly in roots; links in roots are not followed.

    Those of `not_in` are left out, by whatever path, unless they are among `folders` or `roots` itself.
    """
    named = [*folders, *roots]
    below = [path for root in roots for path in entries_of(root) if is_plain_folder(path)]
    left_out = {path.resolve() for path in not_in}
    below = [path for path in below if path.resolve() not in left_out]
    distinct = {path.resolve(): path for path in [*below, *named]}
    items = [shards_in(kind, path) for path in distinct.values()]
    return sorted((item for item in items if item is not None), key=lambda item: item.path)


def shards_in(kind: CacheKind, folder: Path) -> CacheItem | None:
    """Return a cache folder; None if simpletuner wrote nothing in it."""
    from simpletuner.system.files.lease_folder import is_used  # later than `--help`, which says no word of it

    ours, others = files_of(folder)
    if not ours:
        return None
    entries = sum(count_lines(path) for path in ours if path.name.endswith(INDEX_SUFFIX))
    foreign = [path for path in others if not is_plain_folder(path)]
    return CacheItem(kind, folder, entries, sum(map(bytes_of, ours)), is_used(folder), others=foreign)


def count_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if it was removed meanwhile."""
    try:
        with open_regular(path) as file:
            return sum(block.count(b"\n") for block in iter(partial(file.read, READ_BYTES), b""))
    except FileNotFoundError:
        return 0


def count_json_entries(path: Path) -> int:
    """Count the entries of a JSON file; 0 if it cannot be read."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError):
        return 0
    return len(value) if isinstance(value, dict | list) else 0
