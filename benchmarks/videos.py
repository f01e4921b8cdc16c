"""Clips decoded, scaled and cropped as for the latents cache: frames per second of one core, and the most memory.

Each length in a process of its own, whose peak is that beyond imports and one frame. The film has 400 frames of
1280x720 px in H.264, with a key frame every 2 seconds; clips of 832x480 px are cut from its middle.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from interleaved import print_table

FRAMES, RATE, SIZE, TARGET = 400, 24, (1280, 720), (832, 480)
LENGTHS = (1, 81, 400)
ROUNDS = 3


def write_film(path: Path) -> None:
    """Write frames that differ as a slow pan over noise does: neither still nor without any likeness."""
    import av

    noise = np.random.default_rng(0).integers(0, 255, (90, 260, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"g": str(2 * RATE), "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for number in range(FRAMES):
            part = np.ascontiguousarray(noise[: SIZE[1], 2 * number : 2 * number + SIZE[0]])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(part)))
        container.mux(stream.encode())


def measure(folder: str, length: int) -> tuple[float, float]:
    """Return CPU seconds of a clip's decoding, and the MiB that its peak adds to that of one frame."""
    import torch

    from simpletuner.caches.latents import decode_image
    from simpletuner.data.images.geometry import Geometry
    from simpletuner.data.images.videos import Clip
    from simpletuner.data.samples.samples import Sample
    from simpletuner.data.storage.storage import LocalStorage
    from simpletuner.settings.values.shape import Shape

    torch.set_num_threads(1)

    def sample(frames: int) -> Sample:
        original, resized, target = (Shape(frames, height, width) for width, height in (SIZE, (854, 480), TARGET))
        clip = Clip((FRAMES - frames) // 2, 1.0)
        geometry = Geometry(original._replace(frames=FRAMES), resized, (11, 0), target, clip)
        return Sample("film", "films", LocalStorage(Path(folder)), "film.mp4", "", geometry, ("",))

    assert not isinstance(decode_image(sample(1)), str)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        pixels = decode_image(sample(length))
        seconds.append(time.process_time() - began)
        assert not isinstance(pixels, str)
        del pixels
    return sorted(seconds)[ROUNDS // 2], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print a row for each length of clip."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_film(Path(folder) / "film.mp4")
        for length in LENGTHS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, mebibytes = pool.apply(measure, (folder, length))
            held = length * 3 * 4 * TARGET[0] * TARGET[1] / 2**20
            rows.append([str(length), f"{length / seconds:.0f}", f"{mebibytes:.0f}", f"{held:.0f}"])
    print_table("clips of 832x480 px", ["frames", "frames/s of a core", "peak, MiB", "of these the clip"], rows)


if __name__ == "__main__":
    main()
