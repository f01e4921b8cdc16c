"""Whole runs on clips, with images in the same run: a tiny Wan, whose clips have 4n + 1 frames."""

from __future__ import annotations

import base64
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ranks
import torch
import yaml
from conftest import Trained, base
from foreign import build_foreign
from PIL import Image
from video_files import film_entry, write_films, write_video

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


def test_a_pipeline_without_a_class_trains_on_clips_and_images(media, train, tmp_path):
    from diffusers import CogVideoXPipeline

    folder = build_foreign("CogVideoXPipeline", tmp_path / "base")
    file = dataset_file(
        tmp_path / "data.json",
        {"dataset_type": "video", "instance_data_dir": str(media[0]), "video": {"num_frames": 12, "min_frames": 9}},
        {"instance_data_dir": str(media[1])},
    )
    caches = (f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}")
    flags = (*base("auto", folder, Path("unused"))[:2], *FLAGS, file, *caches)
    sampled = ("--validation_prompt=disc 0", "--validation_num_inference_steps=2", "--validation_resolution=64x48")
    one = train(tmp_path / "one", *flags, *sampled, "--train_batch_size=2", "--max_train_steps=4")
    said = " ".join(one.said.split())
    assert "8 in 2 buckets (80x48: 4, 80x48@9: 4)" in said  # its VAE brings 8n + 1 frames back
    assert "CogVideoXPipeline by its own call" in said and "sampled with guidance, proven on clips and images" in said
    split = ("--fsdp_enable", "--train_batch_size=1")
    for steps in (2, 4):
        two = train(tmp_path / "two", *flags, *split, f"--max_train_steps={steps}", world=2)
    assert "resuming from" in two.said and "encoding" not in two.said
    assert two.losses == pytest.approx(one.losses, rel=1e-5) and len({*one.losses}) == 4

    pipeline = CogVideoXPipeline.from_pretrained(one.output / "pipeline")
    drawn = {"width": 64, "height": 48, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 7.5}
    seeded = torch.Generator().manual_seed(42)
    [frames] = pipeline("disc 0", negative_prompt="", **drawn, generator=seeded, output_type="np").frames
    stem = one.output / "validation" / "step-000004" / "trained-00"
    with av.open(stem.with_suffix(".mp4")) as container:
        played = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]) / 255
    assert played.shape == frames.shape and abs(played - frames).mean() < 0.05
    odd = train(tmp_path / "odd", *flags, *sampled, "--validation_num_video_frames=6", code=2)
    assert "CogVideoXPipeline does not sample 64x48@6 px: its clips have a multiple of 4 and one more" in odd.said


def test_a_run_trains_on_folders_of_frames_rows_of_a_table_and_addresses_and_goes_on_with_them(
    media, pipelines, train, tmp_path
):
    films, videos = write_films(tmp_path / "films", videos=1, folders=2), media[0]
    rows = [{"bytes": (videos / name).read_bytes(), "path": name} for name in ("disc 0.mp4", "disc 1.mkv")]
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.table({"clip": rows, "text": ["one", "two"]}), tmp_path / "hub" / "train.parquet")
    handler = partial(SimpleHTTPRequestHandler, directory=str(videos))
    rules = {"dataset_type": "video", "video": {"num_frames": 9}}
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        table = tmp_path / "urls.csv"
        table.write_text(f"url,text\n{address}/disc%202.webm,three\n{address}/cover.jpg,none\n")
        listed = {"type": "csv", "csv_file": str(table), "csv_cache_dir": str(tmp_path / "web")}
        hub = {
            "type": "huggingface",
            "dataset_name": str(tmp_path / "hub"),
            "video_column": "clip",
            "caption_column": "text",
        }
        file = dataset_file(
            tmp_path / "data.json",
            {**film_entry(str(films)), "caption_strategy": "textfile"},
            {**hub, "caption_strategy": "huggingface", **rules},
            {**listed, "csv_caption_column": "text", "caption_strategy": "csv", **rules},
        )
        flags = (*model(pipelines), "--learning_rate=1e-3", file, "--train_batch_size=3")
        run = train(tmp_path / "run", *flags, "--max_train_steps=2")
        server.shutdown()
    assert "6 in 1 bucket (80x48@9: 6)" in run.said
    assert "1 address without a video left out" in run.said and "cover.jpg: HTTP 404" in run.said
    table.write_text(table.read_text().replace(f"{address}/cover.jpg,none\n", ""))
    again = train(tmp_path / "run", *flags, "--max_train_steps=3")
    assert "encoding" not in again.said and len({*measured(again, "loss")}) == 3
    (films / "frames 0" / "0004.png").unlink()
    last = train(tmp_path / "run", *flags, "--max_train_steps=4", "--allow_dataset_oversubscription")
    assert "films/frames 0/: lacks frame 4 of 0 to 8" in last.said


def test_validation_clips_are_those_of_the_pipeline_and_play_everywhere(media, pipelines, train, starter, tmp_path):
    from diffusers import WanPipeline
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = dataset_file(
        tmp_path / "data.json",
        {"dataset_type": "video", "instance_data_dir": str(media[0]), "video": {"num_frames": 9}},
    )
    sampled = ("--validation_prompt=disc 0", "--validation_num_inference_steps=2", "--validation_resolution=64x48")
    flags = (*model(pipelines), *FLAGS, file, *sampled, "--max_train_steps=1", "--report_to=tensorboard")
    run = train(tmp_path / "run", *flags, f"--logging_dir={tmp_path / 'logs'}", "--framerate=12.5")
    stem = run.output / "validation" / "step-000001" / "trained-00"

    pipeline = WanPipeline.from_pretrained(run.output / "pipeline")
    drawn = {"width": 64, "height": 48, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 7.5}
    seeded = torch.Generator().manual_seed(42)
    [frames] = pipeline("disc 0", **drawn, generator=seeded, max_sequence_length=512, output_type="np").frames
    with av.open(stem.with_suffix(".mp4")) as container:
        played = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]) / 255
        assert container.streams.video[0].average_rate == 12.5
    assert played.shape == frames.shape and abs(played - frames).mean() < 0.05 < abs(played - frames[::-1]).mean()
    with Image.open(stem.with_suffix(".webp")) as webp, Image.open(stem.with_suffix(".png")) as png:
        webp.load()
        assert (webp.n_frames, webp.info["duration"], webp.size, png.size) == (9, 80, (64, 48), (192, 48))
        shown = np.asarray(png).reshape(48, 3, 64, 3).swapaxes(0, 1) / 255
    assert abs(shown - frames[[0, 4, 8]]).max() < 0.01

    embedded = re.findall(
        r'href="validation/step-000001/trained-00.mp4"><img src="data:image/webp;base64,([^"]+)"',
        (run.output / "report.html").read_text(),
    )
    with Image.open(BytesIO(base64.b64decode(embedded[0]))) as thumbnail:
        assert thumbnail.n_frames == 9
    card = (run.output / "pipeline" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    facts, samples = yaml.safe_load(front), run.output / "pipeline" / "samples"
    assert facts["pipeline_tag"] == "text-to-video"
    assert facts["widget"] == [{"text": "disc 0", "output": {"url": "samples/00.mp4"}}]
    assert "| [![sample](samples/00.webp)](samples/00.mp4) | disc 0 |" in text and "the first clip above" in text
    for suffix in (".mp4", ".webp", ".png"):
        assert (samples / f"00{suffix}").read_bytes() == stem.with_suffix(suffix).read_bytes()
    code = re.search(r"^(`{3,})python\n(.*?)^\1$", card, re.MULTILINE | re.DOTALL)
    assert code and "fps=12.5" in code[2]
    started = starter.start(ranks.run_python, 1, code[2], str(tmp_path))
    assert started.wait() == [0], started.said
    with av.open(tmp_path / "clip.mp4") as container:
        again = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]) / 255
    assert again.shape == played.shape and abs(again - played).mean() < 0.05

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert "validation/trained-00" in events.Tags()["images"]
    with Image.open(BytesIO(events.Images("validation/trained-00")[-1].encoded_image_string)) as gif:
        assert gif.n_frames == 9


def test_clips_that_a_family_cannot_sample_are_refused(media, pipelines, train, tmp_path):
    for family, given, said in (
        ("wan", "--validation_num_video_frames=8", "4 and one more with model_family=wan hint: the nearest is 9"),
        ("wan", "--validation_resolution=64,64x48@6", "validation_resolution = 64x48@6: frames must be"),
        ("sdxl", "--validation_resolution=64@5", "model_family=sdxl generates images alone"),
    ):
        flags = (*base(family, pipelines(family), media[1]), "--validation_prompt=a disc", given)
        run = train(tmp_path / "run", *flags, code=2)
        assert said in " ".join(run.said.split())


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
