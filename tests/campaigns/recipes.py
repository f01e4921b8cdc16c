"""Train each recipe in miniature, and count what it takes in full: for each night.

    .venv/bin/python tests/campaigns/recipes.py                     # all of both
    .venv/bin/python tests/campaigns/recipes.py sdxl-style --train  # or --plan

A run writes the recipe's config file by `config init`, and trains it for two steps on drawn images, pairs or clips of
64 px with the family's tiny model, by the real commands: all of the recipe's values but sizes, steps and paths must be
in settings.json, the losses finite, and something exported. `plan` counts the published model in full, whose memory
must be the recipe's `memory_gib`. `tests/end_to_end/test_campaigns.py` trains one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT / "examples" / "shapes")]

from draw import write_clip  # noqa: E402
from PIL import Image  # noqa: E402

from simpletuner.recipes.library import find_recipe, recipe_names  # noqa: E402
from simpletuner.recipes.recipe import Recipe  # noqa: E402

PROGRAM = Path(sys.executable).with_name("simpletuner")
GPU = "H100"
FRAMES = 9
SMALL = {
    "resolution": "64", "max_train_steps": "2", "lr_warmup_steps": "0", "aspect_bucket_alignment": "32",
    "validation_num_inference_steps": "2", "validation_resolution": "64", "use_cpu": "true",
    "allow_dataset_oversubscription": "true", "output_dir": "output",
}  # fmt: skip
"""Flags over the recipe's values, which would take minutes or a GPU."""
LARGE_SAMPLES = 12
"""Of which a tenth is held out."""
MEMORY_OFF = 0.02
"""By how much a counted memory may differ from the one in the file: torch and diffusers change theirs."""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([PROGRAM, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def draw(recipe: Recipe, folder: Path) -> None:
    """Draw what the recipe trains on into the folders that its config file names."""
    script = [sys.executable, str(ROOT / "examples" / "shapes" / "draw.py")]
    if recipe.purpose == "edit":
        arguments = ["after", "--before=before", "--count=12"]
    elif recipe.datasets:
        arguments = ["clips", f"--frames={FRAMES}", "--count=12"]
    else:
        arguments = ["pictures", "--count=12"]
    subprocess.run([*script, *arguments], cwd=folder, check=True)


def model_flags(recipe: Recipe, folder: Path) -> list[str]:
    """Return the flags of the family's tiny model, and make that of Kontext, which edits."""
    if recipe.purpose != "edit":
        return ["--model_flavour=tiny"]
    datasets = folder / "config" / "config.datasets.json"
    if recipe.model_family == "qwen_image":
        # Without references: transformers reads the published processor with torchvision alone, which is not installed.
        after = {"id": "after", "instance_data_dir": "after"}
        datasets.write_text(json.dumps([after]))
        return ["--model_flavour=tiny", "--validation_pairs=0"]
    from ranks import build_pipeline

    model = folder / "model"
    build_pipeline(recipe.model_family, str(model))
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}))
    return [f"--pretrained_model_name_or_path={model}"]


def train(name: str, folder: Path) -> list[str]:
    """Train a recipe in miniature; return what is wrong."""
    recipe = find_recipe(name)
    made = command(folder, "config", "init", f"--recipe={name}")
    if made.returncode:
        return [f"config init: {made.stderr}"]
    draw(recipe, folder)
    datasets = folder / "config" / "config.datasets.json"
    if recipe.datasets:
        datasets.write_text(
            datasets.read_text().replace(f'"num_frames": {frames_of(recipe)}', f'"num_frames": {FRAMES}')
        )
    flags = [f"--{key}={value}" for key, value in SMALL.items()]
    if recipe.purpose == "edit":
        flags.remove("--validation_resolution=64")  # pairs have their own size
    done = command(folder, "train", *flags, *model_flags(recipe, folder))
    if done.returncode:
        return [f"train ended with {done.returncode}: {done.stderr[-2000:]}"]
    return [*wrong_values(recipe, folder), *wrong_results(folder)]


def frames_of(recipe: Recipe) -> Any:
    return recipe.dataset_values["num_frames"].value if recipe.dataset_values else None


def wrong_values(recipe: Recipe, folder: Path) -> list[str]:
    """Name the recipe's values that did not reach the run."""
    used = json.loads((folder / "output" / "settings.json").read_text())
    wanted = {key: chosen.value for key, chosen in recipe.settings.items() if key not in (*SMALL, "validation_pairs")}
    return [f"{key} is {used.get(key)}, not {value}" for key, value in wanted.items() if used.get(key) != value]


def wrong_results(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "output" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    exported = [*(folder / "output").rglob("pytorch_lora_weights.safetensors"), *(folder / "output").glob("pipeline/*")]
    wrong = [] if len(losses) == 2 and all(map(math.isfinite, losses)) else [f"losses {losses}"]
    return wrong + ["nothing is exported"] * (not exported)


def plan(name: str, folder: Path) -> tuple[list[str], float]:
    """Count a recipe's memory in GiB on one GPU; return what is wrong, too."""
    recipe = find_recipe(name)
    if recipe.memory_gib is None:  # only its weights show what a pipeline's call takes
        return [], 0.0
    command(folder, "config", "init", f"--recipe={name}")
    config = folder / "config" / "config.toml"
    if recipe.datasets:
        draw_large(recipe, folder)
    else:  # a square of the recipe's resolution
        config.write_text(config.read_text().replace("\ninstance_data_dir", "\n# instance_data_dir"))
    done = command(folder, "plan", f"--gpu={GPU}", "--json")
    if done.returncode not in (0, 3, 4):
        return [f"plan ended with {done.returncode}: {done.stderr[-2000:]}"], 0.0
    told = json.loads(done.stdout)
    gib = told["gpu_bytes"] / 2**30
    if abs(gib / recipe.memory_gib - 1) > MEMORY_OFF:
        return [f"{gib:.1f} GiB are counted, and memory_gib is {recipe.memory_gib}"], gib
    return [], gib


def draw_large(recipe: Recipe, folder: Path) -> None:
    """Write plain pairs or clips of the size that the recipe is for."""
    edge = round(recipe.settings["resolution"].value)
    plain = Image.new("RGB", (edge, edge))
    for dataset in recipe.datasets:
        place = folder / dataset["instance_data_dir"]
        place.mkdir()
        for index in range(LARGE_SAMPLES):
            (place / f"{index}.txt").write_text("plain")
            if recipe.purpose == "edit":
                plain.save(place / f"{index}.png")
            else:
                side = edge // 16 * 16  # H.264 takes even sides; the bucket is the same
                write_clip(place / f"{index}.mp4", [plain.resize((side, side))] * frames_of(recipe))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--train", action="store_true", help="only train in miniature")
    parser.add_argument("--plan", action="store_true", help="only count in full")
    options = parser.parse_args()
    failed = 0
    for name in options.names or recipe_names():
        for kind in [kind for kind in ("train", "plan") if getattr(options, kind) or options.train == options.plan]:
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                wrong, told = (train(name, Path(folder)), "") if kind == "train" else plan(name, Path(folder))
            failed += bool(wrong)
            found = "; ".join(wrong) or (f"{told:.1f} GiB" if told else "ok")
            print(f"{name:18} {kind:6} {time.monotonic() - began:6.1f} s  {found}", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
