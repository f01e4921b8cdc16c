"""Whole runs on clips, with images in the same run: a tiny Wan, whose clips have 4n + 1 frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Trained, base
from PIL import Image
from video_files import write_video

FLAGS = ("--caption_strategy=filename", "--learning_rate=1e-3")


def dataset_file(path: Path, *entries: dict[str, Any]) -> str:
    common = {"type": "local", "caption_strategy": "filename", "resolution": 64}
    path.write_text(json.dumps([{"id": f"set{number}", **common, **entry} for number, entry in enumerate(entries)]))
    return f"--data_backend_config={path}"


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of videos of 11 frames, one of 3, and one that is damaged behind its header; and of images."""
    folder = tmp_path_factory.mktemp("media")
    videos, images = folder / "videos", folder / "images"
    videos.mkdir()
    images.mkdir()
    for number, suffix in enumerate((".mp4", ".mkv", ".webm", ".webp")):
        write_video(videos / f"disc {number}{suffix}", frames=11 + number)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (48, 64, 3), np.uint8)).save(
            images / f"noise {number}.png"
        )
    write_video(videos / "short.mp4", frames=3)
    (videos / "cut.mkv").write_bytes(write_video(folder / "whole.mkv", frames=40).read_bytes()[:1400])
    return videos, images


def measured(run: Trained, name: str) -> list[float]:
    return [row[name] for row in run.rows if name in row]


def model(pipelines) -> tuple[str, ...]:
    return base("wan", pipelines("wan"), Path("unused"))[:2]


def test_clips_and_images_in_one_run_on_two_ranks_and_after_an_interruption(media, pipelines, train, tmp_path):
    videos, images = media
    file = dataset_file(
        tmp_path / "data.json",
        {"dataset_type": "video", "instance_data_dir": str(videos), "video": {"num_frames": 12, "min_frames": 9}},
        {"instance_data_dir": str(images)},
        {"dataset_type": "eval", "instance_data_dir": str(videos), "video": {"num_frames": 5}, "max_num_samples": 2},
    )
    flags = (*model(pipelines), *FLAGS, file)
    one = train(tmp_path / "one", *flags, "--train_batch_size=2", "--max_train_steps=4")
    assert "8 in 2 buckets (80x48: 4, 80x48@9: 4); 2 held out" in one.said
    assert "2 videos shorter than min_frames" in one.said and "1 broken image left out" in one.said
    assert len({*measured(one, "loss")}) == 4 and len(measured(one, "eval_loss")) == 2
    split = ("--fsdp_enable", "--train_batch_size=1")
    train(tmp_path / "two", *flags, *split, "--max_train_steps=2", world=2)
    two = train(tmp_path / "two", *flags, *split, "--max_train_steps=4", world=2)
    assert "encoding" not in two.said
    assert measured(two, "loss") == pytest.approx(measured(one, "loss"), rel=1e-5)
    assert measured(two, "eval_loss")[-1] == pytest.approx(measured(one, "eval_loss")[-1], rel=1e-5)


def test_a_video_of_one_frame_trains_as_an_image(pipelines, train, tmp_path):
    folder, losses = tmp_path / "files", []
    folder.mkdir()
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 255, (48, 64, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"noise {number}.webp", lossless=True)
    for kind in ({}, {"dataset_type": "video", "video": {"min_frames": 1}}):
        file = dataset_file(tmp_path / "data.json", {"instance_data_dir": str(folder), **kind})
        run = train(
            tmp_path / f"run{len(losses)}",
            *model(pipelines),
            *FLAGS,
            "--vae_batch_size=1",
            file,
            "--train_batch_size=2",
            "--max_train_steps=2",
        )
        losses.append(run.losses)
    assert losses[0] == losses[1]


def test_a_family_of_images_refuses_videos_in_one_sentence(media, sdxl, train, tmp_path):
    entry = {"dataset_type": "video", "instance_data_dir": str(media[0])}
    flags = (*base("sdxl", sdxl, Path("unused"))[:2], dataset_file(tmp_path / "data.json", entry))
    refused = train(tmp_path / "run", *flags, code=2)
    assert "dataset `set0` has videos, and model_family=sdxl trains on images alone" in refused.said
