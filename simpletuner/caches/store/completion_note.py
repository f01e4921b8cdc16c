"""A note in a cache folder: which requests it is known to have all records of, so that a warm start looks up none.

It holds for the shards that it names by a hash of their sizes and times, and for one version of simpletuner. One more
record, a retracted one or a deleted shard makes it void, as a wrong checksum does.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from simpletuner import __version__
from simpletuner.caches.store.keys import short_hash
from simpletuner.caches.store.shards import ShardReader
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.cache_files import COMPLETE, is_plain_file
from simpletuner.system.files.checksums import is_intact, with_checksum
from simpletuner.system.files.regular_files import read_file

# Of runs that share a folder.
MOST_DIGESTS = 64


def read_note(reader: ShardReader, digest: str) -> dict[str, str] | None:
    """Return why records could not be made, by name, if all others of these requests are there; None if unknown."""
    return read_digests(reader).get(digest)


def write_note(reader: ShardReader, digest: str, broken: dict[str, str]) -> None:
    """Remember that all records of these requests are there, but for broken ones. In a read-only folder do nothing."""
    digests = [*read_digests(reader).items()][1 - MOST_DIGESTS :]
    note = with_checksum({"shards": identity(reader), "digests": dict([*digests, (digest, broken)])})
    with contextlib.suppress(OSError):
        write_file(reader.folder / COMPLETE, json.dumps(note).encode())


# The program's version is part of it, since another one may make other keys from the same dataset.
def identity(reader: ShardReader) -> str:
    return short_hash([__version__, reader.index.sources])


def read_digests(reader: ShardReader) -> dict[str, dict[str, str]]:
    """Return the digests of a note about just these shards; none where it is missing, damaged or about others."""
    path, note = reader.folder / COMPLETE, dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        note = json.loads(read_file(path)) if is_plain_file(path) else {}
    if not isinstance(note, dict) or not is_intact(note):
        return {}
    return note["digests"] if note["shards"] == identity(reader) else {}
