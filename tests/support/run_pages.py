"""Metrics and validation images of runs that never ran, for pages about them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from simpletuner.runs.facts import DatasetFacts, RunFacts
from simpletuner.runs.images import ImageInfo, write_image
from simpletuner.settings.showing.export import ExplainedSetting

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> ' \" & 猫 🎨"
FACTS = RunFacts(
    name=f"run {EVIL}",
    rows=[("model", f"sdxl {EVIL}")],
    datasets=[DatasetFacts(EVIL, 12, 3, "64 px", EVIL, EVIL)],
    buckets=[("64x64", 12, 48)],
    held_out=2,
    settings=[ExplainedSetting("validation_prompt", [EVIL], [], "flag", "")],
    command=f"simpletuner train '--validation_prompt={EVIL}'\n",
)


def write_rows(folder: Path, steps: int) -> None:
    values = np.random.default_rng(0).random(steps).tolist()
    rows = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(values, start=1)]
    rows.append({"step": steps, "eval_loss": 0.5, "eval_loss_ema": 0.4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_round(folder: Path, step: int, prompts: list[str], size: int = 32, seed: int = 0) -> None:
    (folder / "validation" / f"step-{step:06d}").mkdir(parents=True)
    noise = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    for number, prompt in enumerate(prompts):
        for weights in ("trained", "ema"):
            path = folder / "validation" / f"step-{step:06d}" / f"{weights}-{number:02d}.png"
            write_image(path, Image.fromarray(noise), ImageInfo(prompt, "", number, 4, 3.0, size, size, step, weights))
