"""Masks of the loss: a dataset of files with the names of the images, white where the loss counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import base
from PIL import Image

COUNT = 8
FLAGS = ("--caption_strategy=filename", "--learning_rate=1e-3", "--aspect_bucket_alignment=64")


def dataset_file(path: Path, images: Path, masks: Path | None, **keys: object) -> str:
    entry = {"id": "images", "type": "local", "instance_data_dir": str(images), "resolution": 64, "crop": True, **keys}
    entries = [{**entry, "caption_strategy": "filename"}]
    if masks is not None:
        entries[0]["conditioning_data"] = ["masks"]
        place = {"id": "masks", "type": "local", "instance_data_dir": str(masks)}
        entries.append({**place, "dataset_type": "conditioning", "conditioning_type": "mask"})
    path.write_text(json.dumps(entries))
    return f"--data_backend_config={path}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Images of 96x64 px, of which 64x64 are taken from the middle, and masks: white, and the left third white."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("images", "white", "left")}
    for number in range(COUNT):
        drawn = np.random.default_rng(number).integers(0, 255, (64, 96, 3), np.uint8)
        Image.fromarray(drawn).save(made["images"] / f"disc {number}.png")
        left = np.zeros((32, 48), np.uint8)  # of half the size
        left[:, :24] = 255
        Image.fromarray(left).save(made["left"] / f"disc {number}.webp", lossless=True)
        Image.new("1", (96, 64), 1).save(made["white"] / f"disc {number}.png")
    return made


def test_what_is_black_does_not_count_on_any_engine_and_after_a_resume(folders, pipelines, train, tmp_path):
    flags = (*base("sdxl", pipelines("sdxl"), Path("unused"))[:2], *FLAGS, "--max_train_steps=3")
    files = {
        name: dataset_file(tmp_path / f"{name}.json", folders["images"], folders.get(name))
        for name in ("none", "white", "left")
    }
    losses = {name: train(tmp_path / name, *flags, file, "--train_batch_size=4").losses for name, file in files.items()}
    assert losses["white"] == pytest.approx(losses["none"], rel=1e-6)
    assert all(abs(one / other - 1) > 5e-4 for one, other in zip(losses["left"], losses["none"], strict=True))

    sharded = (*flags, files["left"], "--train_batch_size=2", "--fsdp_enable")
    train(tmp_path / "sharded", *sharded, "--max_train_steps=2", world=2)
    again = train(tmp_path / "sharded", *sharded, world=2)
    assert "encoding" not in again.said and again.losses == pytest.approx(losses["left"], rel=1e-5)
    beside = dataset_file(tmp_path / "beside.json", folders["images"], folders["left"], vae_cache_disable=True)
    uncached = train(tmp_path / "uncached", *flags, beside, "--train_batch_size=4")
    assert uncached.losses == pytest.approx(losses["left"], rel=1e-4)


def test_missing_and_unfitting_masks_are_named_before_training(folders, pipelines, train, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in folders["white"].iterdir():
        (masks / path.name).write_bytes(path.read_bytes())
    (masks / "disc 5.png").unlink()
    file = dataset_file(tmp_path / "data.json", folders["images"], masks)
    flags = (*base("sdxl", pipelines("sdxl"), Path("unused"))[:2], *FLAGS, file, "--max_train_steps=1")
    said = train(tmp_path / "run", *flags, code=4).said
    assert "dataset `images`: 1 image without a mask in `masks`:\n  disc 5.png" in said and "encoding" not in said
    Image.new("L", (64, 64)).save(masks / "disc 5.png")
    said = train(tmp_path / "run", *flags, "--train_batch_size=1").said
    assert "1 broken image left out" in said and "its mask disc 5.png has 64x64 px, which is another shape" in said
