"""From `simpletuner train` to its first step when all is cached, by the number of samples: imports and all included.

The command is the real one, in a process of its own, with a tiny SDXL in float32 on the CPU. The images are drawn
columns of a kept scan that is not looked through again (preserve_data_backend_cache), as in `kept_scan.py`; only those
of the first batches exist, and have records in the caches, which note that all are complete. Largest number:
DATA_SCALE_SAMPLES.
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
from itertools import islice
from pathlib import Path
from typing import Any

from interleaved import print_table

COUNTS = (1_000, 100_000, 1_000_000, 10_000_000)
BATCH_SIZE, BATCHES, ROUNDS = 4, 8, 3


def flags_of(folder: Path) -> list[str]:
    return [
        "train",
        "--model_family=sdxl",
        f"--pretrained_model_name_or_path={folder / 'model'}",
        f"--data_backend_config={folder / 'datasets.json'}",
        f"--output_dir={folder / 'output'}",
        "--resolution=64",
        f"--train_batch_size={BATCH_SIZE}",
        "--max_train_steps=1",
        "--mixed_precision=no",
        "--use_cpu",
    ]


def make(folder: Path, count: int) -> None:
    """Write the model, the kept scan, the images of the first batches, and the caches."""
    import pyarrow as pa
    from kept_scan import drawn

    from simpletuner.data.scan.file_list import OtherFiles
    from simpletuner.data.scan.scan_cache import write_table
    from simpletuner.models.tiny.build import build_tiny
    from simpletuner.settings.declared.sections import Model

    build_tiny(Model(model_family="sdxl"), folder / "model")
    (folder / "images").mkdir()
    dataset = {"id": "drawn", "instance_data_dir": str(folder / "images"), "preserve_data_backend_cache": True}
    (folder / "datasets.json").write_text(json.dumps([dataset]))
    scan = folder / "output" / "cache" / "scan" / "drawn"
    write_table(scan, "scan-textfile", pa.Table.from_batches(drawn(count)), asdict(OtherFiles()))
    subprocess.run([sys.executable, __file__, str(folder)], check=True, stderr=subprocess.DEVNULL)


def fill_caches(folder: Path) -> None:
    """Start the run, cache what its first batches need, note that the caches are complete, and end."""
    import numpy as np
    from PIL import Image

    from simpletuner import worker
    from simpletuner.app import main
    from simpletuner.caches.fill import fill as filling
    from simpletuner.data.samples.samples import Samples
    from simpletuner.preparation import prepare as preparation

    def prepare(session: Any, plan: preparation.Plan, *more: Any) -> None:
        sampler = plan.sampler
        steps = islice(sampler.batches(sampler.start(BATCH_SIZE)), BATCHES)
        first = sorted({int(index) for batch, _ in steps for index in batch.samples})
        for index in first:
            path = folder / "images" / plan.samples[index].name
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", plan.samples[index].geometry.original.size).save(path, "JPEG")
        (part,) = plan.samples.parts
        some = part.where(np.isin(np.arange(len(part)), first))
        preparation.prepare(session, replace(plan, samples=Samples([some])), *more)
        filling.look_up = lambda reader, requests: (np.zeros(0, bool), {})
        preparation.prepare(session, plan, *more)
        raise SystemExit

    worker.prepare = prepare
    main(flags_of(folder))


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


def main(arguments: Sequence[str]) -> None:
    """Print how long each start takes."""
    if arguments:
        fill_caches(Path(arguments[0]))
        return
    largest = int(os.environ.get("DATA_SCALE_SAMPLES", COUNTS[-1]))
    rows = [row(count) for count in COUNTS if count <= largest]
    print_table("from the command to the first step, s", ["samples", "least", "median", "most"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
