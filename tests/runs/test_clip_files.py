"""Validation clips as files: equal frames are equal bytes, whatever the process and the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from PIL import Image

from simpletuner.runs.images import (
    MP4,
    WEBP,
    ImageInfo,
    copy_round,
    read_info,
    read_rgb,
    round_folder,
    round_folders,
    write_image,
)

ENCODE = """
import ctypes, hashlib, os, sys
import numpy as np
from PIL import Image
from simpletuner.runs.images import as_mp4
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


def test_a_round_is_copied_from_an_earlier_one_that_was_made_from_the_same(tmp_path):
    about = ImageInfo("a disc", "", 1, 4, 3.0, 8, 8, 0, "base", made_from="one model")
    clip = replace(about, frames=5, fps=8.0, made_from="a clip")
    first, other = round_folder(tmp_path, 0), round_folder(tmp_path, 7)
    first.mkdir()
    for name, info in (("base-00.png", about), ("base-01.png", clip)):
        write_image(first / name, Image.new("RGB", (8, 8), "red"), info)
    (first / "base-01.mp4").write_bytes(b"film")
    wanted = {other / "base-00.png": replace(about, step=7), other / "base-01.png": replace(clip, step=7)}
    assert not copy_round(wanted, first), "the WebP is missing"
    (first / "base-01.webp").write_bytes(b"moving")
    assert not copy_round({path: replace(info, made_from="") for path, info in wanted.items()}, first)
    assert not copy_round({path: replace(info, made_from="changed") for path, info in wanted.items()}, first)
    assert copy_round(wanted, first) and copy_round(wanted, other)
    for path, info in wanted.items():
        assert read_info(path)[1] == info and read_rgb(path).getpixel((0, 0)) == (255, 0, 0)
    assert [(other / f"base-01{suffix}").read_bytes() for suffix in (MP4, WEBP)] == [b"film", b"moving"]
    (tmp_path / "step-000009").symlink_to(first)
    (tmp_path / "step-other").mkdir()
    assert round_folders(tmp_path) == [first, other]
    for damaged in (b"", (first / "base-00.png").read_bytes()[:60]):
        Path(first / "base-00.png").write_bytes(damaged)
        assert not copy_round(wanted, first)
