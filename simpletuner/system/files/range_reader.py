"""A file that is read by a function: ranges of an object in a bucket, or parts of another file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WHOLE_BYTES = 1 << 30


class RangeReader(io.RawIOBase):
    """Read by ranges: `fetch(start, length)` returns bytes, and the size of the whole."""

    def __init__(self, fetch: Callable[[int, int], tuple[bytes, int]]) -> None:
        self._fetch, self._position, self._size = fetch, 0, -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END and self._size < 0:
            self._read(1)
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        content = self._read(len(view))
        view[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self._read(WHOLE_BYTES)  # in one request: RawIOBase would ask for 8 KiB at a time

    def _read(self, length: int) -> bytes:
        if 0 <= self._size <= self._position:
            return b""
        content, self._size = self._fetch(self._position, length)
        self._position += len(content)
        return content
