"""Settings files of all kinds as people have them, drawn from what the tests and the original's files hold."""

from __future__ import annotations

import copy
import json
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from generated_settings import ENGINES

from simpletuner.data.config.dataset_file import RULES as DATASET_RULES
from simpletuner.settings.files.formats import toml_line
from simpletuner.settings.values.spelling import as_text

TESTS = Path(__file__).parents[1]
PICTURES = "pictures"
MODEL = {"model_family": "sdxl", "model_flavour": "tiny"}
IMAGES = {"instance_data_dir": PICTURES}
OURS: dict[str, Any] = {
    "output_dir": "out",
    "seed": 7,
    "max_train_steps": 100,
    "learning_rate": 2e-5,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 10,
    "mixed_precision": "bf16",
    "train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "resolution": 512,
    "resolution_type": "pixel",
    "minimum_image_size": 0.5,
    "crop": True,
    "caption_strategy": "textfile",
    "instance_prompt": "a \u201cphoto\u201d of\n#1",
    "cache_dir_vae": "~/cache",
    "validation_prompt": ["a cat", "two dogs, one bone"],
    "validation_resolution": "512x768",
    "validation_seed": None,
    "snr_gamma": 5.0,
    "ema_decay": 0.99,
    "use_ema": False,
    "model_families": {"mine": "pathlib:Path"},
    "report_to": "tensorboard",
    "model_type": "lora",
    "lora_rank": 4,
    "lora_init": PICTURES,
    "resume_from_checkpoint": "latest",
    "gpu_ids": "all",
    "main_process_port": 29501,
    "node_timeout": 30.5,
    "revision": "main",
}
DATASET: dict[str, Any] = {
    "type": "local",
    "dataset_type": "image",
    "repeats": 2,
    "resolution": 1024,
    "resolution_type": "pixel_area",
    "crop": True,
    "crop_aspect": "square",
    "crop_style": "center",
    "caption_strategy": "filename",
    "minimum_image_size": 64,
    "maximum_aspect_ratio": 2.0,
    "prepend_instance_prompt": False,
    "metadata_backend": "discovery",
    "disabled": False,
}


@cache
def corpus() -> list[tuple[str, Any, str]]:
    """Keys of the original's files, a value, and what becomes of it."""
    lines = (TESTS / "importing" / "original_corpus.txt").read_text(encoding="utf-8").splitlines()
    return [(key, json.loads(value), outcome) for key, value, outcome in (line.split("\t") for line in lines)]


@dataclass
class Case:
    """A folder of files, and which of them is named by --config; `odd` is the one that mutations change."""

    config: str
    files: dict[str, bytes]
    kind: str
    odd: str
    done: list[str] = field(default_factory=list)
    place: Callable[[Path], object] | None = None
    """Puts something that is no file in the place of the odd one."""

    def write(self) -> None:
        """Write the files into the current folder."""
        Path(PICTURES).mkdir()
        Path(PICTURES, "a.png").touch()
        for name, content in self.files.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_bytes(content)
        if self.place:
            Path(self.odd).unlink()
            self.place(Path(self.odd))


def some(values: dict[str, Any], draw: random.Random, most: int) -> dict[str, Any]:
    names = draw.sample(list(values), draw.randint(0, min(most, len(values))))
    return {name: copy.deepcopy(values[name]) for name in names}


def ours(draw: random.Random) -> dict[str, Any]:
    return MODEL | IMAGES | some(OURS, draw, 10) | copy.deepcopy(draw.choice(ENGINES))


def original(draw: random.Random) -> dict[str, Any]:
    """A config.json as the original has them; now and then with what is refused."""
    accepted = [line for line in corpus() if line[2] != "refused" and "data_backend" not in line[0]]
    rows = draw.sample(accepted, draw.randint(3, 30)) + draw.sample(corpus(), draw.choice((0, 0, 0, 1, 3)))
    values = {key: copy.deepcopy(value) for key, value, _ in rows}
    here = MODEL | IMAGES | {"model_type": "full", "pretrained_model_name_or_path": None, "output_dir": "out"}
    return values | here if draw.random() < 0.9 else values


def datasets(draw: random.Random) -> list[dict[str, Any]]:
    entries = [
        {"id": f"photos{number}"}
        | IMAGES
        | some(DATASET, draw, 8)
        | some(dict.fromkeys(DATASET_RULES), draw, int(draw.random() < 0.1))
        for number in range(draw.randint(1, 3))
    ]
    texts = {"id": "texts", "type": "local", "dataset_type": "text_embeds", "cache_dir": "cache/texts", "default": True}
    return [*entries, texts] if draw.random() < 0.7 else entries


def accelerate(draw: random.Random) -> Any:
    samples = TESTS / "settings" / "foreign" / "accelerate" / "samples"
    path = draw.choice(sorted([*samples.glob("*.yaml"), samples / "older.json"]))
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def deepspeed(draw: random.Random) -> Any:
    samples = TESTS / "settings" / "foreign" / "deepspeed" / "samples"
    return json.loads(draw.choice(sorted(samples.glob("*.json"))).read_text(encoding="utf-8"))


def dump(value: Any, suffix: str) -> str:
    """Write a value in a format, or as JSON where that format cannot say it."""
    if suffix in ("yaml", "yml"):
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    if suffix == "toml" and isinstance(value, dict):
        return "".join(f"{toml_line(key, item)}\n" for key, item in value.items() if item is not None)
    if suffix == "env" and isinstance(value, dict):
        return "".join(f"{key.upper()}={shlex.quote(as_plain_text(item))}\n" for key, item in value.items())
    return json.dumps(value, indent=1)


def as_plain_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else as_text(value)


KINDS: dict[str, tuple[Callable[[random.Random], Any], str, str]] = {
    "our JSON": (ours, "c.json", ""),
    "our TOML": (ours, "c.toml", ""),
    "our YAML": (ours, "c.yaml", ""),
    "our .env": (ours, "c.env", ""),
    "the original's config.json": (original, "c.json", ""),
    "the original's config.env": (original, "config/config.env", ""),
    "datasets": (datasets, "data.json", "data_backend_config"),
    "accelerate's YAML": (accelerate, "a.yaml", "accelerate_config"),
    "accelerate's JSON": (accelerate, "a.json", "accelerate_config"),
    "DeepSpeed's JSON": (deepspeed, "ds.json", "deepspeed_config"),
}
