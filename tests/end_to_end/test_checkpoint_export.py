"""`simpletuner runs export` and `lora average`: what the run writes, of full weights, their average and a LoRA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from diffusers import StableDiffusionXLPipeline
from lora_runs import checkpoint
from safetensors.torch import load_file

from simpletuner.system.files.checksums import file_checksum


@pytest.fixture
def exported(starter) -> Callable[..., str]:
    def export(output: Path, *flags: str, code: int = 0, command: Sequence[str] = ("runs", "export")) -> str:
        done = starter.start(ranks.command_line, 1, [*command, str(output), *flags])
        assert done.wait() == [code], done.said
        return done.said

    return export


def weights_in(folder: Path) -> dict[str, str]:
    """Files by name, without the model card and the marker, which has the checksums of the others."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: file_checksum(path) for name, path in names.items() if not name.startswith(("README", "samples/"))}


@pytest.mark.long
def test_a_checkpoint_is_exported_as_its_run_would(sdxl_flags, train, exported, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4", "--checkpoint_step_interval=1")
    long, short = tmp_path / "long", tmp_path / "short"
    train(long, *flags, "--max_train_steps=3", "--use_ema=true")
    base = next(flag for flag in flags if flag.startswith("--pretrained_model_name_or_path="))
    refused = exported(long, code=2)  # the folder is data: which base model to read, the user says
    assert "names pretrained_model_name_or_path" in refused and base in refused
    command = [sys.executable, "-m", "simpletuner", "runs", "export", str(long), "--ema", base]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"{long / 'pipeline-ema-000003'}\n"
    assert weights_in(long / "pipeline-ema-000003") == weights_in(long / "pipeline-ema")
    # Of an earlier step what a run that ends there writes.
    train(short, *flags, "--max_train_steps=2")
    exported(long, base, "--checkpoint=2", f"--output={tmp_path / 'two'}")
    two, ended = weights_in(tmp_path / "two"), weights_in(short / "pipeline")
    assert two == ended and any(name.endswith(".safetensors") for name in two)
    refused = exported(short, base, "--ema", code=2)
    assert "has no EMA" in refused and "Traceback" not in refused
    assert "checkpoints here: checkpoint-000002" in exported(short, base, "--checkpoint=checkpoint-000009", code=2)
    weights = next((short / "checkpoints" / "checkpoint-000001" / "model").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "damaged" in exported(short, base, "--checkpoint=checkpoint-000001", code=3)
    assert not (short / "pipeline-000001").exists()

    lora = tmp_path / "lora"
    train(lora, *flags, "--max_train_steps=2", "--model_type=lora", "--lora_rank=2", "--export_precision=fp32")
    exported(lora, base)
    # Not its bytes: safetensors writes the metadata in an order that differs between processes.
    folders = (lora / "pipeline_lora_weights-000002", lora / "pipeline_lora_weights")
    one, two = (load_file(folder / "pytorch_lora_weights.safetensors") for folder in folders)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    exported(lora, base, "--export_precision=fp16", f"--output={tmp_path / 'half'}")
    half = load_file(tmp_path / "half" / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(half[name], two[name].half()) for name in two), "the command's counts, not the run's"
    check_averages(long, lora, base, partial(exported, command=("lora", "average")), tmp_path)


def check_averages(long: Path, lora: Path, base: str, average: Callable[..., str], folder: Path) -> None:
    """The mean of checkpoints is that of their weights in float64; what has fewer, or no EMA, is refused."""
    said = average(long, base, "--last=3", "--weights=1,1,2", f"--output={folder / 'mean'}")
    assert "the mean of checkpoint-000001, checkpoint-000002, checkpoint-000003" in said
    one, two, three = (checkpoint(long, step, "model") for step in (1, 2, 3))
    found = {
        name: each
        for path in (folder / "mean" / "unet").glob("*.safetensors")
        for name, each in load_file(path).items()
    }
    assert found.keys() == one.keys()
    for name, each in found.items():
        exact = (one[name].double() + two[name].double() + 2 * three[name].double()) / 4
        assert torch.equal(each, exact.float())
    StableDiffusionXLPipeline.from_pretrained(folder / "mean")
    assert "weight 0.5" in (folder / "mean" / "README.md").read_text()
    average(long, base, "--ema", f"--output={folder / 'mean-ema'}")
    average(lora, base, f"--output={folder / 'mean-lora'}")
    [own, other] = (checkpoint(lora, step, "model") for step in (1, 2))
    found = load_file(folder / "mean-lora" / "pytorch_lora_weights.safetensors")
    assert all(
        torch.equal(found[f"unet.{name}"], ((own[name].double() + other[name].double()) / 2).float()) for name in own
    )
    assert "has 2 complete checkpoints, and --last is 5" in average(
        lora, base, "--last=5", f"--output={folder / 'x'}", code=2
    )
    assert "has no EMA" in average(lora, base, "--ema", f"--output={folder / 'x'}", code=2)
    assert "exists already" in average(lora, base, f"--output={folder / 'mean-lora'}", code=2)
    assert "simpletuner lora resize" in average(lora, base, "--rank=1", f"--output={folder / 'x'}", code=2)
    assert not (folder / "x").exists()
