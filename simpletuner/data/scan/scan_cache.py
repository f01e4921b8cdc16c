"""Arrow files whose names hold their checksums, so that what a killed process or a bad disk has left is not read."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.scan.file_list import CAPTION_VERSION, join
from simpletuner.errors import explain_system_errors
from simpletuner.system.files.atomic import create_new, remove, unfinished_path
from simpletuner.system.files.checksums import file_checksum
from simpletuner.system.files.promises import rename_over
from simpletuner.system.files.regular_files import check_regular

SUFFIX = ".arrow"
ROWS = 65_536
META = b"simpletuner"
IDENTITY = ("name", "version", CAPTION_VERSION)
"""Files that agree in these columns have the same row in a scan."""


def write_table(folder: Path, kind: str, table: pa.Table, meta: Mapping[str, Any] | None = None) -> str:
    """Write `kind`-CHECKSUM.arrow, and return that name. Raises EnvironmentNotReady."""
    path = unfinished_path(folder / secrets.token_hex(8))
    schema = table.schema.with_metadata({META: json.dumps(meta or {}).encode()})
    with explain_system_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Python's file: Arrow's own would call a full disk "Error writing bytes to file. Detail: ..."
            with create_new(path) as file, pa.ipc.new_stream(file, schema) as writer:
                writer.write_table(table, max_chunksize=ROWS)
            name = named(kind, path)
            remove(folder / name)  # a folder in its place
            rename_over(path, folder / name)
        finally:
            path.unlink(missing_ok=True)
        return name


def named(kind: str, path: Path) -> str:
    return f"{kind}-{file_checksum(path).rpartition(':')[2]}{SUFFIX}"


def open_table(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Map a file that is known to be whole; return its rows, and the metadata written with them. Raises OSError."""
    check_regular(path)
    # The stream format, and no threads: opening a file of the other one starts Arrow's pool, whose threads now and then
    # abort a process at its exit ("terminate called without an active exception", apache/arrow issue 34314).
    options = pa.ipc.IpcReadOptions(use_threads=False)
    table = pa.ipc.open_stream(pa.memory_map(str(path)), options=options).read_all()
    return table.replace_schema_metadata(), json.loads(table.schema.metadata[META])


def intact_files(folder: Path, kind: str, others: Iterable[str] = ()) -> list[Path]:
    """Return the files of a kind whose content has the checksum in their name; `others` may not be listed yet."""
    intact, names = [], {path.name for path in folder.glob(f"{kind}-*{SUFFIX}")}
    names |= {name for name in others if name.startswith(f"{kind}-")}
    for path in (folder / name for name in sorted(names)):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and named(kind, path) == path.name:
                intact.append(path)
    return intact


def remove_all_but(folder: Path, name: str) -> None:
    """Remove what earlier scans have left."""
    for path in folder.iterdir():
        if path.is_file() and path.name != name:
            path.unlink(missing_ok=True)


def match_rows(files: pa.Table, known: pa.Table) -> pa.Array:
    """Return, for each file, the row of `known` with its name and versions, or null."""
    if not len(known):
        return pa.nulls(len(files), pa.int32())
    # By a separator that no name of a file can hold.
    keys = [join([table[name] for name in IDENTITY], "\0") for table in (files, known)]
    return pc.index_in(keys[0], value_set=keys[1])
