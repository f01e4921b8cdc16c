"""ZeRO is one more engine: the same losses, and checkpoints that all engines resume from."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from contextlib import closing
from pathlib import Path

import engines
import numpy as np
import operators
import pytest
import ranks
import torch
from conftest import SMALL, Trained
from flags import last_wins
from PIL import Image
from resume_matrix import OF_THEIR_OWN, SAMPLED, resumed, sampled_sources
from safetensors.torch import load_file
from terminal import Terminal

from simpletuner.checkpoints.layout import list_checkpoints

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

ZEROS = ["zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", "zero3-disk"]


@pytest.fixture(scope="module", autouse=True)
def disk_operators(fork_server):
    """Compile the disk operators where `make` has not, before the time limit of any test starts."""
    compiling = fork_server.Process(target=operators.compile_disk_operators)
    compiling.start()
    compiling.join()
    assert compiling.exitcode == 0


def flat(steps: list[list[float]]) -> list[float]:
    return [number for step in steps for number in step]


@pytest.mark.long
def test_losses_and_norms_are_those_of_the_other_engines(run_on, arguments_of):
    """Of a transformer; the first two of a U-Net, whose steps cost three times as much."""
    for family, names, count in (("flux2", ZEROS, 4), ("sdxl", ["zero2", "zero3"], 2)):
        arguments = arguments_of(family)
        expected = run_on(engines.losses_in_turn, 1, arguments, ["whole"], count)["whole"]
        taken = run_on(engines.losses_in_turn, 2, arguments, names, count)
        for name, steps in taken.items():
            assert flat(steps) == pytest.approx(flat(expected), rel=1e-5), (family, name)


def test_accumulated_and_clipped_gradients_are_those_of_one_pass(run_on, arguments_of):
    names = ["fsdp2", "fsdp2-sync", "fsdp2-cpu", "hybrid", *ZEROS]
    one = run_on(engines.losses_in_turn, 2, arguments_of("flux2", max_grad_norm=0.1), ["whole"], 2)["whole"]
    two = run_on(engines.losses_in_turn, 2, arguments_of("flux2", max_grad_norm=0.1, passes=2), names, 2)
    for name, steps in two.items():
        assert flat(steps) == pytest.approx(flat(one), rel=1e-5), name


def test_gradients_that_are_not_finite_have_no_finite_norm(run_on, arguments_of):
    """The trainer ends with such a norm before their step is saved; DeepSpeed masks infinity by -1 on its way."""
    names = ["fsdp2", "zero1", "zero2", "zero3", "zero2-cpu"]
    for name, [(loss, norm)] in run_on(engines.broken_in_turn, 2, arguments_of("flux2"), names).items():
        assert math.isfinite(loss) and not math.isfinite(norm), name


def test_blocks_that_keep_a_part_give_the_losses_of_those_that_keep_all(run_on, arguments_of):
    """Stage 3 adds biases in place to what a block has kept, which must not be added to once more: FLUX.1 has some."""
    half = {"gradient_checkpointing": True, "training": {"activation_memory_budget": 0.5}}
    expected = run_on(engines.losses_in_turn, 1, arguments_of("flux"), ["whole"], 3)["whole"]
    for name, steps in run_on(engines.losses_in_turn, 2, arguments_of("flux", **half), ["zero2", "zero3"], 3).items():
        assert flat(steps) == pytest.approx(flat(expected), rel=1e-5), name


def test_bf16_over_float32_masters_stays_near_float32(run_on, arguments_of):
    names = ["zero1", "zero2", "zero3", "zero3-cpu"]
    exact = run_on(engines.losses_in_turn, 1, arguments_of("flux2"), ["whole"], 3)["whole"]
    taken = run_on(engines.losses_in_turn, 2, arguments_of("flux2", mixed_precision="bf16"), names, 3)
    for name, steps in taken.items():
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in exact], rel=2e-2), name


def test_gradients_of_several_passes_are_added_up_in_float32_at_stages_2_and_3(run_on, arguments_of):
    arguments = arguments_of("flux2", mixed_precision="bf16", passes=4)
    [[(_, expected)], *others] = run_on(engines.losses_in_turn, 1, arguments, ["whole", "zero2", "zero3"], 1).values()
    norms = [norm for [(_, norm)] in others]
    assert norms[0] == pytest.approx(expected, rel=1e-6)  # 4e-5 off where they are added up in bf16
    assert norms[1] == pytest.approx(expected, rel=1e-3)  # stage 3 also computes norms in bf16


@pytest.mark.long
def test_every_engine_resumes_from_others_on_any_number_of_ranks(run_on, arguments_of):
    """13 of the 100 pairs; `tests/campaigns/resumes.py` takes all of them."""
    pairs = dict(resumed(run_on, arguments_of("flux2", ema=True), sampled_sources))
    assert len(pairs) == len(SAMPLED) + len(OF_THEIR_OWN) == 13
    assert {pair: faults for pair, faults in pairs.items() if faults} == {}


def test_every_optimizer_is_the_same_on_every_engine(run_on, arguments_of):
    """Of adagrad and lion: adam and adamw are one class of torch with one state."""
    names = [f"{optimizer} {engine}" for optimizer in ("adagrad", "lion") for engine in ("whole", "zero3-disk")]
    expected = run_on(engines.save_in_turn, 2, arguments_of("flux2"), names)
    sources = {
        "adagrad zero2-cpu": ["adagrad whole-x2"],
        "adagrad zero3-disk": ["adagrad zero3-disk-x2"],
        "lion zero2-cpu": ["lion whole-x2"],
        "lion zero3-disk": ["lion whole-x2"],
        "lion fsdp2": ["lion zero3-disk-x2"],
    }
    resumed = run_on(engines.resume_in_turn, 2, arguments_of("flux2"), sources)
    assert len(resumed) == 5 and all(different == [] for different, _ in resumed.values())
    for name, steps in (expected | {pair: steps for pair, (_, steps) in resumed.items()}).items():
        assert flat(steps) == pytest.approx(flat(expected[f"{name.split()[0]} whole-x2"]), rel=1e-4), name


def test_what_was_saved_in_bf16_is_put_back_exactly(run_on, arguments_of):
    arguments = arguments_of("flux2", ema=True, mixed_precision="bf16", gradient_checkpointing=True)
    expected = run_on(engines.save_in_turn, 2, arguments, ["zero1", "zero3-disk"])
    first, disk = expected
    sources = {"fsdp2": [disk], "zero1": [first], "zero2": [disk], "zero3-disk": [first, disk]}
    resumed = run_on(engines.resume_in_turn, 2, arguments, sources)
    assert len(resumed) == 5
    for pair, (different, steps) in resumed.items():
        target, _, source = pair.partition(" from ")
        assert different == [], pair
        if target == source:
            assert steps == expected[source], pair
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected[source]], rel=2e-2), pair


def typed(name: str) -> list[str]:
    """Return the flags of an engine."""
    settings = engines.ENGINES[name].items()
    return [f"--{setting}={json.dumps(value) if isinstance(value, dict) else value}" for setting, value in settings]


def weights(pipeline: Path) -> dict[str, torch.Tensor]:
    files = sorted((pipeline / "transformer").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_pictures_averages_and_pipelines_are_those_of_a_plain_run(flux_flags, train, tmp_path):
    draw = ("--validation_prompt=a red circle", "--validation_step_interval=2", "--validation_num_inference_steps=2")
    # Adam divides a gradient near zero by its own size: with its epsilon of 1e-8, rounding moves such a weight by 2 %
    # of the learning rate. One above rounding leaves 1.2e-7.
    flags = (*flux_flags, *draw, "--use_ema", "--max_train_steps=2", "--adam_epsilon=1e-5")
    plain = train(tmp_path / "plain", *flags, "--train_batch_size=4")
    pictures = sorted((plain.output / "validation").glob("step-*/*.png"))
    assert len(pictures) == 4
    for name in ("zero1", "zero2-cpu", "zero3"):
        run = train(tmp_path / name, *flags, "--train_batch_size=2", *typed(name), world=2)
        assert f"ZeRO-{name[4]}" in run.said and "[WARNING]" not in run.said and "FutureWarning" not in run.said
        for picture in pictures:
            ours, theirs = picture, run.output / picture.relative_to(plain.output)
            different = np.abs(np.asarray(Image.open(ours), int) - np.asarray(Image.open(theirs), int))
            assert different.max() <= 2, (name, picture)
        for pipeline in ("pipeline", "pipeline-ema"):
            ours, theirs = weights(plain.output / pipeline), weights(run.output / pipeline)
            assert ours.keys() == theirs.keys()
            apart = torch.cat([(ours[key] - theirs[key]).abs().flatten() for key in ours])
            assert apart.max() < 1e-6, (name, pipeline, apart.max())


def test_what_a_person_builds_in_a_terminal_trains(flux_flags, train, tmp_path):
    config = tmp_path / "run.json"
    pairs = (flag.removeprefix("--").split("=", 1) for flag in (*SMALL, *flux_flags))
    settings = {name: value for name, value in pairs if name != "mixed_precision"}
    config.write_text(json.dumps(settings | {"max_train_steps": 2, "train_batch_size": 2}))
    dialogue = Terminal(tmp_path, "deepspeed", "build", f"--apply={config}")
    with closing(dialogue):
        dialogue.answer("How many GPUs in all?", "2")
        dialogue.answer("Partition optimizer state (1)", "3")
        dialogue.answer("Where is optimizer state kept?", "cpu")
        for question in ("Where are weights kept", "Which optimizer?", "Which learning rate schedule"):
            dialogue.answer(question, "")
        dialogue.answer("How many warm-up steps?", "1")
        dialogue.answer("How many forward passes per optimizer step?", "2")
        dialogue.answer("Clip gradients to which norm?", "")
        dialogue.answer("Compute in bf16", "no")
        dialogue.wait_for(f"{config} names it")
        assert dialogue.ended() == 0
    run = train(tmp_path / "run", f"--config={config}", world=2)
    assert "ZeRO-3" in run.said
    assert len(run.losses) == 2
    used = json.loads((run.output / "settings.json").read_text())
    assert (used["gradient_accumulation_steps"], used["offload_optimizer"]) == (2, "cpu")


def test_of_two_runs_on_one_offload_folder_the_killed_one_is_cleaned_up_and_goes_on(
    flux_flags, train, starter, tmp_path
):
    offload = tmp_path / "offload"
    flags = (*flux_flags, "--train_batch_size=4", *typed("zero3-disk"), f"--offload_param_path={offload}")
    flags = (*flags, "--max_train_steps=6", "--checkpoint_step_interval=2")
    straight = train(tmp_path / "straight", *flags)
    assert list(offload.iterdir()) == []
    killed, other = (
        starter.train(1, f"--output_dir={tmp_path / name}", *SMALL, *flags) for name in ("killed", "other")
    )
    while not list_checkpoints(tmp_path / "killed" / "checkpoints"):
        assert killed.processes[0].is_alive(), killed.said
        time.sleep(0.01)
    killed.kill()
    assert other.wait() == [0], other.said
    assert Trained(tmp_path / "other", "").losses == straight.losses
    assert len(list(offload.iterdir())) == 1
    again = train(tmp_path / "killed", *flags)
    assert "removed what dead runs had offloaded" in again.said and "resuming from" in again.said
    assert again.losses == straight.losses
    assert list(offload.iterdir()) == []


def test_a_run_starts_from_the_weights_of_deepspeeds_checkpoint(
    flux, shapes, run_on, arguments_of, starter, train, tmp_path
):
    run_on(engines.dump_in_turn, 2, arguments_of("flux"), ["zero3"])
    folder, weights = tmp_path / "zero3", tmp_path / "weights"
    program = [str(folder / "dump" / "zero_to_fp32.py"), str(folder / "dump"), str(weights)]
    converting = starter.start(ranks.run_script, 1, *program, "--safe_serialization", "--max_shard_size=1TB")
    assert converting.wait() == [0], converting.said
    file = weights / "model.safetensors"
    flags = ("--model_family=flux", f"--pretrained_model_name_or_path={file}", f"--single_file_config={flux}")
    flags += (f"--instance_data_dir={shapes}", "--train_batch_size=4")
    run = train(tmp_path / "run", *flags, "--max_train_steps=1", "--learning_rate=1e-30")
    held = load_file(folder / engines.HELD)
    names = {name.removeprefix("model: ") for name in held if name.startswith("model: ")}
    found = load_file(*(run.output / "checkpoints" / "checkpoint-000001" / "model").glob("*.safetensors"))
    assert found.keys() == names and all(torch.equal(found[name], held[f"model: {name}"]) for name in names)


def test_a_missing_package_or_compiler_is_an_error_with_the_command_that_fixes_it(sdxl_flags, starter, tmp_path):
    run = [f"--output_dir={tmp_path / 'run'}", *SMALL, *sdxl_flags, *typed("zero3-disk")]
    run += [f"--offload_param_path={tmp_path}"]
    missing = starter.start(engines.command_line_without, 1, "deepspeed", ["train", *last_wins(run)])
    assert missing.wait() == [3]
    assert "pip install 'deepspeed>=0.18'" in missing.said
    toolless = starter.start(engines.command_line_with_path, 1, str(tmp_path), ["train", *last_wins(run)])
    assert toolless.wait() == [3]
    assert "there is no compiler `c++`" in toolless.said and "apt install g++" in toolless.said
