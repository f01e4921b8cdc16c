"""Validation clips as files: equal frames are equal bytes, whatever the process and the machine."""

from __future__ import annotations

import os
import subprocess
import sys

ENCODE = """
import ctypes, hashlib, os, sys
import numpy as np
from PIL import Image
from simpletuner.training.images.clip_files import as_mp4
seed, *cpus = map(int, sys.argv[1:])
if cpus:
    os.sched_setaffinity(0, cpus)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size, dirt = 30 << 20, np.random.default_rng(seed)
assert libc.mallopt(-3, 32 << 20) and libc.mallopt(-1, 1 << 30)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: keep the heap
for number in range(6):
    blocks = [libc.malloc(size) for _ in range(2)]
    for block in blocks:
        ctypes.memmove(block, dirt.bytes(size), size)
    for block in blocks:
        libc.free(block)
    random = np.random.default_rng(number)
    for size_px in ((66, 50), (48, 80)):
        noise = [Image.fromarray(random.integers(0, 255, (8, 12, 3), dtype=np.uint8)) for _ in range(9)]
        print(hashlib.sha256(as_mp4([image.resize(size_px) for image in noise], 16)).hexdigest())
"""


def test_an_mp4_depends_neither_on_the_number_of_cpus_nor_on_what_memory_was_before():
    one_cpu, found = str(min(os.sched_getaffinity(0))), []
    for arguments in (["0"], ["1", one_cpu], ["2"]):
        command = [sys.executable, "-c", ENCODE, *arguments]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 12
