"""The contents of a cache: the records that a run needs, and the functions that make missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from simpletuner.caches.store.keys import KeyParts

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.caches.store.mirror import Mirror

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
Made = Mapping[str, "Tensor"] | str
"""A record's tensors, or why there are none."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A record that a run needs: its name, what it depends on, and the group within which records share a batch."""

    name: str
    parts: KeyParts
    group: str = ""


@dataclass(frozen=True)
class CacheJob(Generic[Item, Loaded]):
    """A cache to fill with the records of `items`, which may be many more than fit into memory as requests.

    `digest` stands for all requests together, so that a cache known to have them need not look at any.
    `load` reads one item, in up to `threads` threads ahead of the encoder. `make` computes one chunk of what was
    loaded, and returns for each item what there is to write.
    """

    title: str
    folder: Path
    digest: str
    chunk: int
    items: Callable[[], Sequence[Item]]
    request: Callable[[Item], CacheRequest]
    load: Callable[[Item], Loaded]
    make: Callable[[Sequence[Loaded]], Iterable[Made]]
    threads: int = 1
    compress: bool = False
    mirror: Mirror | None = None
    """The bucket that the folder is kept equal to, if there is one."""

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.items())

    def request_at(self, position: np.intp) -> CacheRequest:
        return self.request(self.items()[int(position)])
