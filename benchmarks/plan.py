"""`simpletuner plan --measure` beside the run that it predicts: seconds per step of tiny models on the CPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from interleaved import print_table

FAMILIES = ("sdxl", "flux", "sd3")
STEPS, WARM_UP, ROUNDS = 30, 5, 2
FLAGS = ("--model_flavour=tiny", "--resolution=128", "--aspect_bucket_alignment=128", "--crop=true", "--use_cpu")
BATCH = ("--train_batch_size=4", "--mixed_precision=no", "--caption_dropout_probability=0")


def command(name: str, family: str, *flags: str) -> str:
    arguments = [name, f"--model_family={family}", *FLAGS, *BATCH, *flags]
    done = subprocess.run([sys.executable, "-m", "simpletuner", *arguments], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def planned(family: str, images: Path) -> float:
    return json.loads(command("plan", family, f"--instance_data_dir={images}", "--measure", "--json"))["step_seconds"]


def trained(family: str, images: Path, output: Path) -> float:
    """Return the median seconds of a run's steps, without waiting for data."""
    run = (f"--output_dir={output}", f"--max_train_steps={STEPS}", "--checkpoint_step_interval=1000")
    command("train", family, f"--instance_data_dir={images}", *run)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "seconds" in row][WARM_UP:]
    return statistics.median(row["seconds"] - row["data_seconds"] for row in steps)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        subprocess.run([sys.executable, "examples/shapes/draw.py", images], check=True, stdout=subprocess.DEVNULL)
        for family in FAMILIES:
            pairs = [
                (planned(family, images), trained(family, images, Path(folder) / f"{family}-{turn}"))
                for turn in range(ROUNDS)
            ]
            plan, run = (statistics.median(values) for values in zip(*pairs, strict=True))
            rows.append((family, f"{plan:.3f}", f"{run:.3f}", f"{plan / run:.2f}"))
    print_table("seconds per step", ("tiny", "plan --measure", "train", "ratio"), rows)


if __name__ == "__main__":
    main()
