"""From `simpletuner train` to its first step when all is cached, by the number of samples: imports and all included.

The command is the real one, in a process of its own, with a tiny SDXL in float32 on the CPU. The images are drawn
columns of a kept scan that is not looked through again (preserve_data_backend_cache), as in `kept_scan.py`; only those
of the first batches exist, and have records in the caches, which note that all are complete. Largest number:
DATA_SCALE_SAMPLES. `--ratio` compares the CPU time of a million clips with that of as many images, in turns,
both with a tiny Wan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interleaved import print_table, ratio, seconds_in_turns

if TYPE_CHECKING:
    from simpletuner.data.images.geometry import Geometry

COUNTS = (1_000, 100_000, 1_000_000, 10_000_000)
BATCH_SIZE, BATCHES, ROUNDS = 4, 8, 3
RATIO_COUNT = 1_000_000
CLIPS = {"dataset_type": "video", "video": {"num_frames": 5, "fps": 16}}
FAMILY = "family.txt"


def flags_of(folder: Path) -> list[str]:
    return [
        "train",
        f"--model_family={(folder / FAMILY).read_text()}",
        f"--pretrained_model_name_or_path={folder / 'model'}",
        f"--data_backend_config={folder / 'datasets.json'}",
        f"--output_dir={folder / 'output'}",
        "--resolution=64",
        f"--train_batch_size={BATCH_SIZE}",
        "--max_train_steps=1",
        "--mixed_precision=no",
        "--use_cpu",
    ]


def make(folder: Path, count: int, family: str = "sdxl", clips: bool = False) -> None:
    """Write the model, the kept scan, the images or videos of the first batches, and the caches."""
    import pyarrow as pa
    from kept_scan import drawn

    from simpletuner.data.scan.file_list import OtherFiles
    from simpletuner.data.scan.scan import write_table
    from simpletuner.models.tiny.build import build_tiny
    from simpletuner.settings.declared.sections import Model

    build_tiny(Model(model_family=family), folder / "model")
    (folder / FAMILY).write_text(family)
    (folder / "images").mkdir()
    dataset = {"id": "drawn", "instance_data_dir": str(folder / "images"), "preserve_data_backend_cache": True}
    dataset |= CLIPS if clips else {}
    (folder / "datasets.json").write_text(json.dumps([dataset]))
    scan = folder / "output" / "cache" / "scan" / "drawn"
    kind = "scan-video-textfile" if clips else "scan-textfile"
    write_table(scan, kind, pa.Table.from_batches(drawn(count, clips)), asdict(OtherFiles()))
    subprocess.run([sys.executable, __file__, str(folder)], check=True, stderr=subprocess.DEVNULL)


def fill_caches(folder: Path) -> None:
    """Start the run, cache what its first batches need, note that the caches are complete, and end."""
    import numpy as np

    from simpletuner import worker
    from simpletuner.app import main
    from simpletuner.caches import fill as filling
    from simpletuner.data.samples.samples import Samples
    from simpletuner.preparation import prepare as preparation

    def prepare(session: Any, plan: preparation.Plan, *more: Any) -> None:
        sampler = plan.sampler
        steps = islice(sampler.batches(sampler.start(BATCH_SIZE)), BATCHES)
        first = sorted({int(index) for batch, _ in steps for index in batch.samples})
        for index in first:
            path = folder / "images" / plan.samples[index].name
            path.parent.mkdir(exist_ok=True)
            write_sample(path, plan.samples[index].geometry)
        (part,) = plan.samples.parts
        some = part.where(np.isin(np.arange(len(part)), first))
        preparation.prepare(session, replace(plan, samples=Samples([some])), *more)
        filling.look_up = lambda reader, requests: (np.zeros(0, bool), {})
        preparation.prepare(session, plan, *more)
        raise SystemExit

    worker.prepare = prepare
    main(flags_of(folder))


def write_sample(path: Path, geometry: Geometry) -> None:
    """Write an image, or as much of a video as its clip needs, whatever the name says."""
    from PIL import Image

    if geometry.clip is None:
        Image.new("RGB", geometry.original.size).save(path, "JPEG")
        return
    import av

    with av.open(str(path), "w", format="avi") as container:
        stream: Any = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height = geometry.original.size
        stream.pix_fmt = "yuvj420p"
        for _ in range(geometry.clip.frame_numbers(geometry.target.frames)[-1] + 1):
            container.mux(stream.encode(av.VideoFrame(*geometry.original.size, "yuvj420p")))
        container.mux(stream.encode(None))


def seconds_to_first_step(folder: Path) -> float:
    """Start the run, and end it once it has taken a step."""
    metrics = folder / "output" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    began = time.perf_counter()
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([sys.executable, "-m", "simpletuner", *flags_of(folder)], stdout=log, stderr=log) as run,
    ):
        while not (metrics.exists() and metrics.stat().st_size):
            assert run.poll() is None, (folder / "log").read_text()
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        run.kill()
    assert "encoding" not in (folder / "log").read_text(), "the caches were not complete"
    return seconds


def row(count: int) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), count)
        seconds = [seconds_to_first_step(Path(name)) for _ in range(ROUNDS)]
    return [f"{count:,}", *(f"{each:.1f}" for each in sorted(seconds))]


def print_ratio(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name, kind) for kind in ("images", "clips")}
        for kind, folder in folders.items():
            folder.mkdir()
            make(folder, count, "wan", kind == "clips")
        starts = {kind: partial(seconds_to_first_step, folder) for kind, folder in folders.items()}
        # Of the runs, which other work on the machine does not lengthen.
        seconds = seconds_in_turns(starts, ROUNDS, clock=lambda: sum(os.times()[2:4]))
    rows = [[kind, *(f"{each:.2f}" for each in sorted(seconds[kind]))] for kind in folders]
    print_table(f"{count:,} of each, CPU seconds to the first step", ["", "least", "median", "most"], rows)
    print(f"clips / images: {ratio(seconds, 'clips', 'images'):.2f}")


def main(arguments: Sequence[str]) -> None:
    """Print how long each start takes."""
    if arguments == ["--ratio"]:
        print_ratio(min(RATIO_COUNT, int(os.environ.get("DATA_SCALE_SAMPLES", RATIO_COUNT))))
        return
    if arguments:
        fill_caches(Path(arguments[0]))
        return
    largest = int(os.environ.get("DATA_SCALE_SAMPLES", COUNTS[-1]))
    rows = [row(count) for count in COUNTS if count <= largest]
    print_table("from the command to the first step, s", ["samples", "least", "median", "most"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
