"""Files of three trainers, and what their import makes of them: rates, buckets, captions, noise levels.

`tests/campaigns/computed_there.py` has the programs' own code compute the same from the same files; its numbers are
tests/importing/computed_there.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from simpletuner.commands.config_import import import_files
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.images.geometry import bucket_sizes
from simpletuner.data.scan.captions import caption_variants
from simpletuner.models.family.objectives import FlowMatching
from simpletuner.settings import load
from simpletuner.training.optimizers import LearningRate, Schedule

STEPS, WARM_UP, RATE = 96, 12, 1e-4
TAGS = ("sks", "red", "green", "blue", "white")
SIZES = (
    *((1024, 1024), (1600, 1200), (1920, 1080), (1080, 1920), (1000, 800), (3000, 2000), (2400, 1200), (700, 1400)),
    *((832, 1216), (1280, 1024), (641, 479), (2000, 900), (1100, 1000), (1500, 600), (900, 1350), (1024, 768)),
)
"""Images: sixteen, so that six epochs of one a step are STEPS."""
SHARES = [share / 20 for share in range(1, 20)]
"""Of the noise levels, whose quantiles are compared."""


def sd_scripts(schedule: str, warm_up: int, sampling: str) -> dict[str, str]:
    return {
        "train.toml": f"""\
pretrained_model_name_or_path = "black-forest-labs/FLUX.1-dev"
network_module = "networks.lora_flux"
network_train_unet_only = true
dataset_config = "data.toml"
optimizer_type = "AdamW"
learning_rate = {RATE}
lr_scheduler = "{schedule}"
lr_warmup_steps = {warm_up}
max_train_steps = {STEPS}
mixed_precision = "bf16"
model_prediction_type = "raw"
timestep_sampling = "{sampling}"
discrete_flow_shift = 3.1
""",
        "data.toml": """\
[general]
resolution = 1024
enable_bucket = true
max_bucket_reso = 2048
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1
caption_dropout_rate = 0.25
[[datasets]]
[[datasets.subsets]]
image_dir = "img"
""",
    }


def one_trainer(schedule: str, warm_up: float, sampling: str) -> dict[str, str]:
    tags = {"enable_tag_shuffling": True, "keep_tags_count": 1}
    values = {
        "__version": 11,
        "training_method": "LORA",
        "model_type": "FLUX_DEV_1",
        "base_model_name": "black-forest-labs/FLUX.1-dev",
        "train_dtype": "BFLOAT_16",
        "text_encoder": {"train": False},
        "text_encoder_2": {"train": False},
        "resolution": "768",
        "learning_rate": RATE,
        "learning_rate_scheduler": schedule,
        "learning_rate_min_factor": 0.1,
        "learning_rate_warmup_steps": warm_up,
        "timestep_distribution": sampling,
        "timestep_shift": 1.8,
        "noising_weight": 0.5,
        "epochs": STEPS // len(SIZES),
        "concepts": [{"path": "img", "seed": 1, "text_variations": 8, "text": tags}],
    }
    return {"config.json": json.dumps(values)}


def ai_toolkit(schedule: str, params: str, sampling: str) -> dict[str, str]:
    return {
        "job.yaml": f"""\
job: extension
config:
  name: lora
  process:
    - type: sd_trainer
      network: {{type: lora, linear: 16, linear_alpha: 16}}
      model: {{name_or_path: black-forest-labs/FLUX.1-dev, arch: flux}}
      datasets:
        - {{folder_path: img, caption_ext: txt, resolution: 768, shuffle_tokens: true, caption_dropout_rate: 0.25}}
      train:
        {{steps: {STEPS}, lr: {RATE}, noise_scheduler: flowmatch, dtype: bf16, lr_scheduler: {schedule},
        lr_scheduler_params: {params}, timestep_type: {sampling}}}
"""
    }


CASES: dict[str, dict[str, Mapping[str, str]]] = {
    "sd-scripts": {
        "cosine, shift": sd_scripts("cosine", 0, "shift"),
        "linear with warm-up, sigma": sd_scripts("linear", WARM_UP, "sigma"),
        "polynomial, sigmoid": sd_scripts("polynomial", 0, "sigmoid"),
        "constant with warm-up, uniform": sd_scripts("constant_with_warmup", WARM_UP, "uniform"),
    },
    "OneTrainer": {
        "cosine, logit-normal": one_trainer("COSINE", 0, "LOGIT_NORMAL"),
        "linear with warm-up, uniform": one_trainer("LINEAR", WARM_UP, "UNIFORM"),
        "constant, warm-up of a share": one_trainer("CONSTANT", 0.125, "LOGIT_NORMAL"),
    },
    "ai-toolkit": {
        "cosine, sigmoid": ai_toolkit("cosine", "{eta_min: 0.00001}", "sigmoid"),
        "constant with warm-up, linear": ai_toolkit(
            "constant_with_warmup", f"{{num_warmup_steps: {WARM_UP}}}", "linear"
        ),
    },
}
"""Files by program and by what they try; the first is the run's."""


def write_case(files: Mapping[str, str], folder: Path) -> Path:
    """Write the files and images of a case; return the run's file."""
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "img").mkdir()
    for number, size in enumerate(SIZES):
        Image.new("L", size, number).save(folder / f"img/{number:02}.png")
        (folder / f"img/{number:02}.txt").write_text(", ".join((*TAGS, str(number))))
    return folder / next(iter(files))


def places_of(captions: Sequence[str]) -> dict[str, Any]:
    """Share of dropped captions, and of each tag in each place of the others."""
    kept = [[tag.strip() for tag in caption.split(",")] for caption in captions if caption]
    counted = {tag: [sum(each[place] == tag for each in kept) / len(kept) for place in range(6)] for tag in TAGS}
    return {"dropped": 1 - len(kept) / len(captions), "places": counted}


def imported_there(file: Path) -> dict[str, Any]:
    """Return what our import makes of a case: a rate for each step, a bucket for each size, tags, quantiles.

    Called in the folder of the file.
    """
    import_files(Path(file.name), Path("run.toml"), force=True)
    own = load({}, Path("run.toml"), environment={}).settings
    steps = own.training.max_train_steps or own.training.num_train_epochs * len(SIZES)
    rate = LearningRate(Schedule(steps), own.optimizer)
    [dataset] = [each for each in load_datasets(own.data)[0] if isinstance(each, ImageDataset)]
    buckets = bucket_sizes(dataset, np.array(SIZES), own.data.aspect_bucket_alignment or 64)
    texts = [", ".join((*TAGS, str(number))) for number in range(len(SIZES) * 32)]
    captions = [each for text in texts for each in caption_variants(text, (), dataset.caption_shuffle)]
    objective = own.objective
    flow = FlowMatching(
        objective.flow_schedule_shift or 1.0, objective.flow_sigmoid_scale, objective.flow_use_uniform_schedule
    )
    levels = flow.sigmas(torch.tensor(SHARES, dtype=torch.float64), objective.flow_schedule_shift or 1.0)
    return {
        "rates": [rate.at(step) / RATE for step in range(STEPS)],
        "buckets": buckets.tolist(),
        "captions": {**places_of(captions), "dropped": dataset.caption_dropout_probability},
        "levels": levels.tolist(),
    }
