"""A run beside diffusers' own `train_text_to_image_sdxl.py`: first step, steps, saves, resume, and memory.

    python benchmarks/diffusers_script.py SCRIPT [PYTHON [RANKS]]

SCRIPT is the file of that name in the repository of diffusers (examples/text_to_image), PYTHON an interpreter with our
requirements and those of its requirements_sdxl.txt. Both fine-tune the whole U-Net of the same tiny SDXL in float32 on
the CPU, on the same 36 images of 64 x 64 px whose encodings are cached; one core each. With several RANKS on this
machine it is the start alone, theirs by `accelerate launch`, in CPU seconds of a rank and its share of the launcher.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from interleaved import print_table, ratio

from simpletuner.system.numbers import count_noun

ROUNDS, IMAGES = 3, 36
STEPS, RESUMED, SAVE_STEPS = 30, 32, 10
AFTER_SAVE = 5
"""Steps beside which a checkpoint may still be written."""
HERE = Path(__file__).parent
# Not --cpu, which starts one process unless it has mpirun and a file of hosts; ACCELERATE_USE_CPU makes these use gloo.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no")

Times = list[tuple[float, float]]
"""Of each step: seconds since the epoch, CPU seconds."""


def make_inputs(folder: Path) -> None:
    """Write a tiny SDXL, and images with captions that both programs read."""
    import numpy as np
    from PIL import Image

    from simpletuner.models.tiny.build import build_tiny
    from simpletuner.settings.declared.sections import Model

    build_tiny(Model(model_family="sdxl"), folder / "model")
    images, drawn = folder / "images", np.random.default_rng(0)
    images.mkdir()
    rows = []
    for number in range(IMAGES):
        name, caption = f"{number:02}.png", f"a {('red', 'green', 'blue')[number % 3]} square {number}"
        Image.fromarray(drawn.integers(0, 255, (64, 64, 3), np.uint8)).save(images / name)
        (images / name).with_suffix(".txt").write_text(caption)
        rows.append(json.dumps({"file_name": name, "text": caption}))
    (images / "metadata.jsonl").write_text("\n".join(rows))


def commands(folder: Path, script: str, python: str, ranks: int) -> dict[str, list[str]]:
    """Return the command of each program, without its number of steps."""
    launcher = [] if ranks == 1 else [*LAUNCH, "--dynamo_backend=no", f"--num_processes={ranks}"]
    same = [f"--pretrained_model_name_or_path={folder / 'model'}", "--resolution=64", "--train_batch_size=4"]
    same += ["--learning_rate=1e-4", "--mixed_precision=no", "--seed=42"]
    ours = [f"--output_dir={folder / 'ours'}", "--model_family=sdxl", f"--instance_data_dir={folder / 'images'}"]
    ours += [f"--cache_dir_vae={folder / 'vae'}", f"--cache_dir_text={folder / 'text'}", "--use_cpu"]
    ours += [f"--checkpoint_step_interval={SAVE_STEPS}", f"--num_processes={ranks}"]
    theirs = [f"--output_dir={folder / 'theirs'}", f"--train_data_dir={folder / 'images'}"]
    theirs += [f"--checkpointing_steps={SAVE_STEPS}", "--dataloader_num_workers=0"]
    return {
        "ours": [python, "-m", "simpletuner", "train", *same, *ours],
        "theirs": [python, *launcher, script, *same, *theirs],
    }


def run(folder: Path, command: Sequence[str], steps: int, *more: str) -> tuple[Times, float]:
    """Run a command to its end, and return the times of its steps since its start, and its CPU seconds in all."""
    clock = folder / "clock"
    for kept in folder.glob("clock*"):
        kept.unlink()
    environment = {"PYTHONPATH": f"{HERE / 'step_clock'}:{HERE.parent}", "STEP_CLOCK": str(clock)}
    environment |= {"STEP_CLOCK_OWNER": str(os.getpid()), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ACCELERATE_USE_CPU": "true", "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    # Compiled modules are kept, as at every start but a user's first.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | environment
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with (folder / "log").open("w") as log:
        done = subprocess.run([*command, f"--max_train_steps={steps}", *more], env=environment, stdout=log, stderr=log)
    assert done.returncode == 0, (folder / "log").read_text()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_all = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = [tuple(map(float, line.split())) for line in clock.read_text().splitlines()]
    return [(wall - began, cpu) for wall, cpu, _ in rows], in_all


def measured_start(folder: Path, name: str, command: Sequence[str], ranks: int) -> dict[str, float]:
    """Return CPU seconds of a new run's start, of a rank and its share of the launcher."""
    shutil.rmtree(folder / name, ignore_errors=True)
    times, _ = run(folder, command, steps=1)
    clocks = [folder / "clock", *(folder / f"clock.{rank}" for rank in range(1, ranks))]
    rows = [[float(each) for each in clock.read_text().splitlines()[0].split()] for clock in clocks]
    of_ranks = sum(cpu - starter for _, cpu, starter in rows)
    return {
        "a rank, command to first step": (of_ranks + max(starter for *_, starter in rows)) / ranks,
        "of it the launcher's": max(starter for *_, starter in rows) / ranks,
        "the same by the clock": times[0][0],
    }


def measured(folder: Path, name: str, command: Sequence[str]) -> dict[str, float]:
    """Return CPU seconds of a warm start and of a resume."""
    shutil.rmtree(folder / name, ignore_errors=True)
    times, in_all = run(folder, command, STEPS)
    steps = [after[1] - before[1] for before, after in zip(times, times[1:], strict=False)]
    step = statistics.median(steps)
    saves = [
        sum(steps[at : at + AFTER_SAVE]) - AFTER_SAVE * step for at in range(SAVE_STEPS - 1, STEPS - 2, SAVE_STEPS)
    ]
    # The script asks for its newest checkpoint by a flag; ours finds it.
    resumed, _ = run(folder, command, RESUMED, *(["--resume_from_checkpoint=latest"] if name == "theirs" else []))
    return {
        "command to first step": times[0][1],
        "the same by the clock": times[0][0],
        "a step": step,
        "first save": saves[0],
        "second save": saves[1],
        "last step to exit": in_all - times[-1][1],
        "resume to first step": resumed[0][1],
        "the run in all": in_all,
    }


def table(rounds: Mapping[str, list[dict[str, float]]]) -> list[list[str]]:
    rows = []
    for what in rounds["ours"][0]:
        seconds = {name: [each[what] for each in found] for name, found in rounds.items()}
        medians = [statistics.median(seconds[name]) for name in ("ours", "theirs")]
        rows.append([what, *(f"{each:.3f}" for each in medians), f"{ratio(seconds, 'ours', 'theirs'):.2f}"])
    return rows


def main(script: str, python: str = sys.executable, ranks: str = "1") -> None:
    """Print the table of both programs."""
    count = int(ranks)
    measure = measured if count == 1 else partial(measured_start, ranks=count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        both = commands(folder, script, python, count)
        for program, command in both.items():  # fills the caches
            measure(folder, program, command)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in both}
        for number in range(ROUNDS):
            for name in sorted(both, reverse=bool(number % 2)):
                rounds[name].append(measure(folder, name, both[name]))
    print_table(f"CPU seconds, {count_noun(count, 'core')}, all cached", ["", "ours", "theirs", "ratio"], table(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
