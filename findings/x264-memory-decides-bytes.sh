#!/usr/bin/env bash
# libx264 writes other bytes for equal frames, on one machine, by what its memory held before.
#
# With `mbtree` (the default of all presets but the fastest), what was freed before an encoder is opened decides how it
# spends its bits: pixels of a frame differ by up to 15 levels. In a process that does little else it is 1 of 300
# encodings; here the heap is filled with random bytes first. With `mbtree=0` all encodings are equal. The frames that
# are given to the encoder are equal, padding included.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet av==18.1.0 numpy==2.4.6 pillow==13.0.0
"$folder/venv/bin/python" - <<'PY'
import ctypes
import io

import av
import numpy as np
from PIL import Image

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallopt(-3, 32 << 20), libc.mallopt(-1, 1 << 30)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: what is freed is kept
clips = []
for seed in range(6):
    random = np.random.default_rng(seed)
    for size in ((66, 50), (48, 80)):
        clips.append([Image.fromarray(random.integers(0, 255, (8, 12, 3), dtype=np.uint8)).resize(size) for _ in range(9)])


def encoded(pictures, **options):
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "18", **options}
        for picture in pictures:
            frame = av.VideoFrame.from_image(picture).reformat(format="yuv420p")
            for plane in frame.planes:
                np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:, plane.width :] = 0
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def files_by_memory(**options):
    """Return how many different files there are of each clip, encoded after six different contents of memory."""
    found, dirt = [set() for _ in clips], np.random.default_rng(1)
    for _ in range(6):
        for files, pictures in zip(found, clips):
            blocks = [libc.malloc(30 << 20) for _ in range(2)]
            for block in blocks:
                ctypes.memmove(block, dirt.bytes(30 << 20), 30 << 20)
            for block in blocks:
                libc.free(block)
            files.add(encoded(pictures, **options))
    return [len(files) for files in found]


counts = {"default": files_by_memory(), "mbtree=0": files_by_memory(mbtree="0")}
print(f"PyAV {av.__version__}, libavcodec {av.library_versions['libavcodec']}: different files of each clip: {counts}")
assert max(counts["default"]) > 1 and set(counts["mbtree=0"]) == {1}, counts
PY
