"""Wrong captions that the losses of samples find: drawn shapes, a tenth of them with the caption of another one.

.venv/bin/python benchmarks/mislabelled.py --steps=2000        # about 6 minutes on a core
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from interleaved import print_table

from simpletuner.runs.sample_loss_scores import SAMPLE_LOSSES, read_losses, score_samples

DRAW = Path(__file__).parents[1] / "examples" / "shapes" / "draw.py"
FLAGS = (
    *(
        "--model_family=sdxl",
        "--model_flavour=tiny",
        "--use_cpu",
        "--mixed_precision=no",
        "--gradient_checkpointing=false",
    ),
    *("--resolution=64", "--resolution_type=pixel", "--aspect_bucket_alignment=32", "--train_batch_size=8"),
    *("--learning_rate=2e-3", "--lr_scheduler=cosine", "--lr_warmup_steps=0.05", "--adam_beta2=0.99", "--snr_gamma=5"),
    "--log_sample_losses",
)


def draw(folder: Path, count: int, seed: int) -> set[str]:
    """Draw shapes, and return the names of those that get another caption."""
    subprocess.run([sys.executable, DRAW, folder, f"--count={count}", f"--seed={seed}"], check=True)
    dice, files = random.Random(seed), sorted(folder.glob("*.txt"))
    captions = {path: path.read_text() for path in files}
    wrong = dice.sample(files, count // 10)
    for path in wrong:
        path.write_text(dice.choice([each for each in sorted({*captions.values()}) if each != captions[path]]))
    return {path.stem for path in wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--count", type=int, default=252)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        pictures, output = Path(name) / "pictures", Path(name) / "run"
        wrong = draw(pictures, given.count, given.seed)
        where = (f"--instance_data_dir={pictures}", f"--output_dir={output}", f"--max_train_steps={given.steps}")
        subprocess.run(
            [sys.executable, "-m", "simpletuner", "train", *FLAGS, *where], check=True, stdout=subprocess.DEVNULL
        )
        scores = score_samples(read_losses(output / SAMPLE_LOSSES))
    found = [Path(each.id).stem in wrong for each in scores]
    many = len(wrong)
    looks = [is_wrong for each, is_wrong in zip(scores, found, strict=True) if each.looks_wrong]
    rows = [
        [f"of the first {many}", f"{sum(found[:many])}"],
        [f"of the first {2 * many}", f"{sum(found[: 2 * many])}"],
        [f"of the {len(looks)} to look at", f"{sum(looks)}"],
    ]
    print_table(f"{many} wrong captions of {given.count}, {given.steps} steps", ["", "wrong"], rows)


if __name__ == "__main__":
    main()
