"""The demo of clips (examples/motion): what it draws, how it is counted, the trained VAE, and the start of a run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from simpletuner.models.tiny.encoders import load_video_vae

MOTION = ROOT / "examples" / "motion"


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("motion") / "clips"
    draw = (sys.executable, str(ROOT / "examples" / "shapes" / "draw.py"), str(folder))
    subprocess.run([*draw, "--frames=9", "--count=36"], check=True)
    return folder


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(str(MOTION))
    import count

    return count


def captions_of(clips: Path) -> dict[Path, str]:
    return {path.with_suffix(".mp4"): path.read_text().strip() for path in sorted(clips.glob("*.txt"))}


def test_drawn_clips_are_judged_as_their_captions_say_and_validation_asks_for_others(clips, judge):
    captions = captions_of(clips)
    asked = tomllib.loads((MOTION / "demo.toml").read_text())["validation_prompt"]
    assert len({*captions.values()}) == 36 and len({*asked}) == 12 and not {*asked} & {*captions.values()}
    for path, caption in captions.items():
        colour, direction, way = judge.judge(path)
        assert caption.split()[1] == colour and caption.endswith(f"moves {direction}"), (caption, way)


def test_the_trained_vae_brings_moving_shapes_back(clips, judge):
    vae = load_video_vae()
    for path, caption in [*captions_of(clips).items()][::9]:
        frames = judge.read_frames(path)
        pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].to(vae.dtype) / 127.5 - 1
        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mode()
            back = (vae.decode(latents).sample[0].permute(1, 2, 3, 0).float().numpy() + 1) * 127.5
        assert latents.shape == (1, vae.config.z_dim, 3, 8, 8)
        (first, _), (last, colour) = judge.find_shape(back[0]), judge.find_shape(back[-1])
        way = last - first
        assert judge.nearest_colour(colour) == caption.split()[1] and caption.endswith(judge.direction_of(way))
        assert abs(way).max() > 16 and np.abs(frames - back).mean() < 10


def test_the_demo_begins_to_learn_and_its_validation_is_counted(clips, starter, tmp_path):
    entries = json.loads((MOTION / "datasets.json").read_text())
    data = tmp_path / "datasets.json"
    data.write_text(json.dumps([{**entry, "instance_data_dir": str(clips)} for entry in entries]))
    output = tmp_path / "output"
    short = ("--max_train_steps=20", "--validation_num_inference_steps=1", "--lr_warmup_steps=0")
    flags = (f"--config={MOTION / 'demo.toml'}", f"--data_backend_config={data}", f"--output_dir={output}", *short)
    run = starter.train(1, *flags)
    assert run.wait() == [0], run.said
    losses = [json.loads(line).get("loss") for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    said = subprocess.run([sys.executable, str(MOTION / "count.py"), str(output)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "of 12 move as the caption says" in said.stdout.splitlines()[-1]
