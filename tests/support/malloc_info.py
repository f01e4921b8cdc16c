"""Bytes that the C library has handed out, for tests and benchmarks of memory."""

from __future__ import annotations

import ctypes


class MallocInfo(ctypes.Structure):
    """What mallinfo2 returns."""

    _fields_ = [
        ("others", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("more", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("rest", ctypes.c_size_t * 2),
    ]


def allocated_bytes() -> int:
    """Return what the C library has handed out; pages say more, since it keeps what was freed for what comes next."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = MallocInfo
    info = library.mallinfo2()
    return info.uordblks + info.hblkhd
