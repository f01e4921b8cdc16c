"""A cached record: where it is, what it was made from, its key in the merged index, and its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.store.keys import KeyParts
from simpletuner.system.files.checksums import value_checksum

# At multiples of it records begin: torch.frombuffer needs aligned numbers.
ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """A record's place and key; `broken` says why a record could not be made.

    `row` is its number in a reader's merged index, or -1 where it was written since.
    """

    shard: Path
    offset: int
    length: int
    name: str
    parts: KeyParts
    broken: str = ""
    checksum: str = ""
    row: int = -1

    def checksum_with(self, record: bytes | memoryview) -> str:
        """Return the checksum that this location would have if `record` is what was written here."""
        return value_checksum({"name": self.name, "parts": self.parts, "broken": self.broken}, record)


def record_keys(records: Iterable[tuple[str, KeyParts]]) -> NDArray[np.uint64]:
    """Return the 128-bit hashes of names and parts, (n, 2)."""
    import xxhash

    # NUL cannot occur in a file's name, and captions are named by their hash, so no two records join to one text.
    texts = ("\0".join([name, *(text for part in sorted(parts.items()) for text in part)]) for name, parts in records)
    digests = b"".join(xxhash.xxh3_128_digest(text.encode(errors="surrogatepass")) for text in texts)
    return np.frombuffer(digests, "<u8").reshape(-1, 2)
