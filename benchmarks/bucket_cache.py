"""How long a step waits for records in a bucket that answers late, with all samples of a step read at once or in turn.

Records have the size of SDXL's at 1024 px, and none is on the disk at the beginning. The server is moto's, in a process
of its own, behind a proxy that waits; a step sleeps.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from s3_server import BUCKET, s3_proxy, s3_server  # pyright: ignore[reportMissingImports]

from simpletuner.caches.sources import open_mirror
from simpletuner.caches.store import mirror as mirrors
from simpletuner.caches.store.mirror import Mirror
from simpletuner.caches.store.shards import ShardReader
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.embeds import S3ImageEmbeds
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import RankSlice, SampleReader, prefetch
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.samples import Sample
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape

LATENCIES_SECONDS, STEP_SECONDS, STEPS, STEPS_AHEAD = (0.0, 0.1), 0.4, 20, 4
BATCH_SIZE, AT_ONCE = 4, 32
COUNT = BATCH_SIZE * (STEPS + STEPS_AHEAD + 1)
SQUARE = Shape(1, 1024, 1024)
RECORDS = {"latents": torch.randn(4, 128, 128), "text": torch.randn(77, 2048, dtype=torch.bfloat16)}


def mirror_in(folder: Path, address: str) -> Mirror:
    place = {"aws_bucket_name": BUCKET, "aws_data_prefix": "cache", "aws_endpoint_url": address}
    mirror = open_mirror(S3ImageEmbeds(id="b", type="aws", dataset_type="image_embeds", **place), folder)
    assert mirror is not None
    return mirror


def fill(mirror: Mirror) -> None:
    mirrors.SHARD_BYTES = 2 << 20  # moto copies all of an object for each part that it sends
    with mirror.writer(0, compress=False) as writer:
        for number in range(COUNT):
            for kind, tensor in RECORDS.items():
                writer.write(f"{kind} {number}", {}, {kind: tensor})


def waits(mirror: Mirror, at_once: int) -> list[float]:
    """Return how long each step waited for its batch, in seconds."""
    mirror.synchronize(lambda: None)
    records = ShardReader(mirror.folder, mirror)

    def read(kind: str, sample: Sample) -> dict[str, torch.Tensor]:
        place = records.find(f"{kind} {sample.id}", {})
        assert place is not None
        return records.read(place)

    drawn = LocalImages(id="drawn", instance_data_dir=Path(), caption_dropout_probability=0)
    geometry = Geometry(SQUARE, SQUARE, (0, 0), SQUARE)
    storage = LocalStorage(Path())
    with ThreadPoolExecutor(at_once) as pool:
        reader = SampleReader(
            samples=[Sample(str(n), "drawn", storage, "", "", geometry, ("a caption",)) for n in range(COUNT)],
            dataset=lambda index: drawn,
            latents=lambda sample: read("latents", sample)["latents"],
            image=lambda sample: {},
            text=lambda sample, caption: read("text", sample),
            no_caption=lambda sample: {},
            map_samples=pool.map if at_once > 1 else map,
        )
        sampler = GlobalBatchSampler({"one": Bucket({1: np.arange(COUNT)})}, 0)
        rank_slice = RankSlice(0, 1, 1, seed=0)
        batches: Any = prefetch(reader, sampler, sampler.start(BATCH_SIZE), 0, rank_slice, STEPS_AHEAD)
        waited: list[float] = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            next(batches)
            waited.append(time.perf_counter() - begun)
            time.sleep(STEP_SECONDS)
        batches.close()
    return waited


def main() -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with s3_server() as server, s3_proxy(server) as proxy, tempfile.TemporaryDirectory() as folder:
        fill(mirror_in(Path(folder) / "filled", proxy.address))
        for latency in LATENCIES_SECONDS:
            for at_once in (1, AT_ONCE):
                proxy.latency_seconds = latency
                first, *others = waits(mirror_in(Path(folder) / f"{latency} {at_once}", proxy.address), at_once)
                print(
                    f"{latency * 1000:.0f} ms, {at_once} at once: the first step waits {first:.2f} s, later ones "
                    f"{statistics.mean(others) * 1000:.1f} ms on average, at most {max(others) * 1000:.1f} ms"
                )


if __name__ == "__main__":
    main()
