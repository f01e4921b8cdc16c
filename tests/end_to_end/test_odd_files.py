"""What no file should be: a FIFO, a device, or a terabyte of nothing in the place of each file that a start
reads. None of them may hold it up, and none is called a bug."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SMALL


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte": make_sparse,
}
DERIVED = (
    "settings.json",
    "durations.json",
    "wandb.json",
    "trackio.json",
    "swanlab.json",
    "validation/step-000000/trained-00.png",
    "validation/step-1",
)
"""Files that a start only looks at: without them it goes on."""


def put(make: Callable[[Path], None], *paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_start_goes_on_without_what_it_can_do_without(make, sdxl_flags, train, tmp_path):
    output = tmp_path / "run"
    put(make, *(output / name for name in DERIVED))
    run = train(output, *sdxl_flags, "--train_batch_size=4", "--max_train_steps=1")
    assert "bug" not in run.said and (output / "report.html").is_file()


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_a_start_that_cannot_write_or_read_a_file_names_it(kind, sdxl_flags, starter, tmp_path):
    lora = ("--model_type=lora", f"--lora_init={tmp_path / 'lora.safetensors'}")
    roles = {
        "log.txt": (),
        "metrics.jsonl": (),
        "settings_history.jsonl": (),
        "sample_losses.jsonl": (),
        "data_listings": (),
        "lora.safetensors": lora,
        "prompts.json": (f"--validation_prompt_file={tmp_path / 'prompts.json'}",),
        "datasets.json": (f"--data_backend_config={tmp_path / 'datasets.json'}",),
    }
    for name, flags in roles.items():
        output = tmp_path / f"run of {name}"
        put(KINDS[kind], tmp_path / name if flags else output / name)
        run = starter.train(
            1, f"--output_dir={output}", *SMALL, *sdxl_flags, "--max_train_steps=1", "--log_sample_losses", *flags
        )
        [code] = run.wait()
        assert code in (2, 3, 4) and name in run.said and run.said.count("error:") == 1, f"{name}: {code}\n{run.said}"
        assert "bug" not in run.said, run.said
