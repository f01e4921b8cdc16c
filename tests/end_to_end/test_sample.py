"""`simpletuner sample`: a prompt tried on a run that trains, which its losses do not notice, and on one that ended."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from simpletuner.checkpoints.layout import REQUESTS
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.world import joined_world
from simpletuner.runs.images import read_info
from simpletuner.tools.sampling import SampleOptions, encode, open_run_family, request_of, settings_of_run, write_new
from simpletuner.training.validation.sample_requests import IN_METADATA, MOST_BYTES

LORA = ("--model_type=lora", "--lora_rank=2", "--checkpoint_step_interval=1", "--checkpoints_total_limit=50")
DRAWN = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_guidance=2")
SIZE = "--validation_resolution=64"


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def base_flag(flags: tuple[str, ...]) -> str:
    return next(flag for flag in flags if flag.startswith("--pretrained_model_name_or_path="))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_that_ended_samples_as_its_validation_did(kind, flux_flags, train, sampled, tmp_path):
    flags = (*flux_flags, *DRAWN, SIZE, "--train_batch_size=4", "--max_train_steps=2", "--checkpoint_step_interval=1")
    output = train(tmp_path / "run", *flags, *(LORA if kind == "lora" else ())).output
    base, prompt = base_flag(flags), "--prompt=a red circle"
    rounds = output / "validation"
    [own], _ = sampled(output, prompt, base, "--use_cpu")
    assert own.parent == output / "samples"
    assert np.array_equal(pixels(own), pixels(rounds / "step-000002" / "trained-00.png"))
    assert read_info(own)[1].step == 2
    if kind == "lora":
        [both, again], _ = sampled(output, prompt, base, "--with_base")
        assert again != own and np.array_equal(pixels(again), pixels(own))
        assert np.array_equal(pixels(both), pixels(rounds / "step-000000" / "base-00.png"))
        [none], _ = sampled(output, prompt, base, "--strength=0")
        assert np.array_equal(pixels(none), pixels(both))
    [other], _ = sampled(
        output, "--prompt=two", base, "--checkpoint=1", "--seed=5", "--size=64x96", f"--output={tmp_path / 'o'}"
    )
    assert pixels(other).shape == (96, 64, 3) and read_info(other)[1].seed == 5
    for words, sentence in {
        ("--checkpoint=9",): "has no checkpoint checkpoint-000009",
        ("--ema",): "has no EMA",
        ("--size=63",): "all sides must be multiples of",
        ("--size=x",): "--size=x",
        ("--base", "--ema"): "--base takes no --ema",
        ("--guidance=nan",): "guidance",
        ("--use_cpu=maybe",): "use_cpu = 'maybe' (command line): use true or false",
    }.items():
        assert sentence in sampled(output, prompt, base, *words, code=2)[1]
    assert "names pretrained_model_name_or_path" in sampled(output, prompt, code=2)[1]
    assert f"simpletuner sample {output} --pretrained" in sampled(output, prompt, code=2)[1]


def request_file(run: Path, base: str, **changes: object) -> bytes:
    """Return what the command writes, with changes of the request."""
    name, _, value = base.removeprefix("--").partition("=")
    options = SampleOptions("a green square", named={name: value}, size="64")
    with joined_world({}, use_cpu=True) as world:
        family = open_run_family(settings_of_run(run, options), options, world)
        request = request_of(family.settings, family, options)
        tensors = encode(family, request, torch.device("cpu"), compute_dtype(family.settings))
    named = {f"{sign}.{name}": each.contiguous() for sign, own in tensors.items() for name, each in own.items()}
    return safetensors.torch.save(
        named, {IN_METADATA: json.dumps({**json.loads(request.model_dump_json()), **changes})}
    )


@pytest.mark.long
def test_a_run_that_trains_answers_between_steps_and_its_losses_are_the_same(
    flux_flags, train, starter, sampled, tmp_path
):
    flags = (*flux_flags, *LORA, "--train_batch_size=2", "--fsdp_enable", "--validation_num_inference_steps=2")
    undisturbed = train(tmp_path / "alone", *flags, "--max_train_steps=14", world=2)
    base, output = base_flag(flags), tmp_path / "asked"
    folder = output / REQUESTS
    folder.mkdir(parents=True)
    good = request_file(undisturbed.output, base)
    tensors = safetensors.torch.load(good)
    metadata = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])["__metadata__"]
    bad = {
        "prompt_embeds is of another width": {**tensors, "positive.prompt_embeds": torch.ones(4, 3)},
        "a name is missing": {name: each for name, each in tensors.items() if "pooled" not in name},
        "NaN": {**tensors, "positive.prompt_embeds": tensors["positive.prompt_embeds"] * float("nan")},
    }
    contents = {
        **{why: safetensors.torch.save(each, metadata) for why, each in bad.items()},
        "no safetensors file": b"\xff" * 3000,
        "empty": b"",
        "a path": request_file(undisturbed.output, base, output="/etc/passwd"),
        "too many pixels": request_file(undisturbed.output, base, width=8192, height=8192),
        "EMA": request_file(undisturbed.output, base, weights=["ema"]),
        "odd": request_file(undisturbed.output, base, width=63),
    }  # fmt: skip
    names = {why: f"{number:024x}" for number, why in enumerate(contents, start=1)}
    first = "0" * 24
    (folder / f"{first}.request").write_bytes(good)
    for why, content in contents.items():
        (folder / f"{names[why]}.request").write_bytes(content)
    with (folder / f"{'d' * 24}.request").open("wb") as huge:
        huge.truncate(MOST_BYTES + 1)
    (folder / f"{'e' * 24}.request").symlink_to("/etc/passwd")
    (folder / f"{'f' * 24}.request").mkdir()
    (folder / "..request").write_bytes(good)
    of_another = folder / f"{'c' * 24}.request"
    of_another.write_bytes(good)
    if is_root := os.geteuid() == 0:  # who may give a file away
        os.chown(of_another, 1234, 1234)
    (folder / f"{'a' * 24}.taken").write_bytes(good)
    started = starter.train(2, f"--output_dir={output}", *small(), *flags, "--max_train_steps=100000")
    while started.processes[0].is_alive() and [*folder.glob("?*.request")] != [folder / "..request"]:
        time.sleep(0.1)
    [image, of_base], said = sampled(output, "--prompt=a red circle", base, "--with_base", "--seed=3", "--size=64")
    assert "sampled at step" in said
    step = read_info(of_base)[1].step
    started.kill()
    started.wait()
    answers = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.answer")}
    assert answers[first]["images"] == [f"samples/{first}-trained.png"] and answers[first]["step"] < 14
    refused = {why: answers[name]["refused"] for why, name in names.items()}
    assert all(refused.values()), refused
    assert answers["a" * 24]["refused"] == "the run ended while it answered"
    assert not is_root or "of user 1234, and the run of user 0" in answers["c" * 24]["refused"]
    for name, word in (("d", "64 MiB"), ("e", "no regular file"), ("f", "no regular file")):
        assert word in answers[name * 24]["refused"]
    assert {path.name for path in folder.iterdir() if path.suffix != ".answer"} == {"..request"}
    losses = [
        row["loss"] for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in row
    ]
    assert losses[:14] == undisturbed.losses
    # The image is the one that a process of its own makes of that step's checkpoint, and of the base model.
    here = sampled(output, "--prompt=a red circle", base, f"--checkpoint={step}", "--seed=3", "--size=64", "--steps=2")[
        0
    ]
    assert abs(pixels(here[0]) - pixels(of_base)).max() <= 1 and not np.array_equal(pixels(image), pixels(of_base))


def small() -> tuple[str, ...]:
    from conftest import SMALL

    return SMALL


def test_two_commands_that_write_at_the_same_moment_do_not_take_one_name(tmp_path):
    meeting = threading.Barrier(2)

    def write(path: Path) -> None:
        with suppress(threading.BrokenBarrierError):  # only one of them writes
            meeting.wait(0.2)
        path.touch()

    with ThreadPoolExecutor(2) as commands:
        written = [commands.submit(write_new, tmp_path, "step", write) for _ in range(2)]
        names = {each.result().name for each in written}
    assert names == {"step.png", "step-1.png"} == {path.name for path in tmp_path.iterdir()}
