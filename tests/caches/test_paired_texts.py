"""Text encoders that read references: a record per sample, made again when a reference changes, or made while training.

In one process: a run refuses to load a processor from the tests, and the published one needs torchvision.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageEditPlusPipeline
from models.test_inputs import opened
from PIL import Image
from reading_images import save_qwen_edit
from scanning import scanned

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.texts import PairedTexts
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.samples.discovery import discover
from simpletuner.data.samples.samples import DatasetSamples, reference_images
from simpletuner.data.storage.storage import open_storage
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.values.shape import Shape

CPU, COUNT = torch.device("cpu"), 3


@pytest.fixture(scope="module")
def family(pipelines, tmp_path_factory) -> ModelFamily:
    folder = save_qwen_edit(pipelines("qwen_image"), tmp_path_factory.mktemp("edit"), QwenImageEditPlusPipeline)
    return opened("qwen_image", folder)


@pytest.fixture
def references(tmp_path) -> Path:
    drawn = np.random.default_rng(0)
    for name in ("images", "references"):
        (tmp_path / name).mkdir()
        for number in range(COUNT):
            pixels = drawn.integers(0, 255, (64, 64, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
            (tmp_path / name / f"{number}.txt").write_text(f"a red circle\na blue square {number}")
    return tmp_path / "references"


def samples_of(tmp_path: Path, **keys: object) -> DatasetSamples:
    place = {"type": "local", "resolution": 64}
    kind = {"dataset_type": "conditioning", "conditioning_type": "reference_strict"}
    first = {**place, "id": "images", "instance_data_dir": str(tmp_path / "images"), "conditioning_data": "r", **keys}
    second = {**place, "id": "r", "instance_data_dir": str(tmp_path / "references"), **kind}
    (tmp_path / "data.json").write_text(json.dumps([first, second]))
    (dataset,), _ = load_datasets(Data(data_backend_config=tmp_path / "data.json"))
    others = tuple(scanned(each, open_storage(each, ())) for each in dataset.conditioning)
    scan = replace(scanned(dataset, open_storage(dataset, ())), conditioning=others)
    discovery = discover([scan], Shape(1, 64, 64), 0)
    discovery.check()
    return discovery.samples.parts[0]


@contextmanager
def filled(tmp_path: Path, family: ModelFamily, samples: DatasetSamples) -> Iterator[tuple[PairedTexts, dict, int]]:
    """Yield a filled cache, what is broken, and a count of loaded encoders."""
    loads = []
    encoder = Encoder(lambda: loads.append(0) or family.text_encoder(CPU, torch.float32), CPU)
    with ExitStack() as writers:
        world = World(0, 1, 0, CPU, dist.HashStore())
        cache = PairedTexts(tmp_path / "cache", samples, encoder, family, world, torch.float32, False, None, writers)
        broken = cache.fill(Report(quiet=True), lambda: None)
        yield cache, broken, len(loads)


def test_each_sample_s_captions_are_read_with_its_references_and_cached(family, references, tmp_path):
    samples = samples_of(tmp_path)
    encoder = family.text_encoder(CPU, torch.float32)
    with filled(tmp_path, family, samples) as (cache, broken, loads):
        assert not broken and loads == 1
        for sample in samples:
            for caption in (*sample.captions, ""):
                expected = encoder.encode([caption], reference_images(sample))
                found = cache.read(sample, caption)
                assert found.keys() == expected.keys()
                for name, value in found.items():
                    assert torch.equal(value, expected[name][0]), (caption, name)
        first, second = (cache.read(sample, "a red circle")["prompt_embeds"] for sample in list(samples)[:2])
        assert not torch.equal(first, second), "the references are read"
    with filled(tmp_path, family, samples_of(tmp_path)) as (cache, broken, loads):
        assert not broken and loads == 0

    shutil.copy(references / "1.png", references / "2.png")
    (references / "0.png").write_bytes((references / "0.png").read_bytes()[:-2000])
    with filled(tmp_path, family, changed := samples_of(tmp_path)) as (cache, broken, loads):
        assert loads == 1 and list(broken) == ["images/0.png"] and "its reference" in broken["images/0.png"]
        again = [cache.read(changed[place], "a red circle")["prompt_embeds"] for place in (1, 2)]
        assert torch.equal(again[0], again[1]) and torch.equal(again[0], second)


@pytest.mark.parametrize("way", ["text_cache_disable", "text_cache_ondemand"])
def test_texts_made_while_training_are_those_of_the_cache(way, family, references, tmp_path):
    with filled(tmp_path, family, samples_of(tmp_path)) as (cache, _, _):
        expected = [cache.read(sample, "a red circle")["prompt_embeds"] for sample in cache.job.items()]
    shutil.rmtree(tmp_path / "cache")
    with filled(tmp_path, family, samples_of(tmp_path, **{way: True})) as (cache, broken, _):
        found = [cache.read(sample, "a red circle")["prompt_embeds"] for sample in cache.job.items()]
        assert not broken and all(map(torch.equal, found, expected))
        assert (tmp_path / "cache").exists() == (way == "text_cache_ondemand")
