"""LoRA runs on real ranks: equal on any number of them, resumed bit for bit, opened by diffusers, and trained on."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from conftest import base
from lora_runs import checkpoint, numbers, predictions_of_flux, same_tensors
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from simpletuner.models.family.adapter import ATTENTION
from simpletuner.runs.images import read_info, read_rgb, write_image

LORA = ("--model_type=lora", "--lora_rank=4", "--lora_alpha=8", "--learning_rate=1e-2")
DRAWN = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_guidance=2")
FILE = "pipeline_lora_weights/pytorch_lora_weights.safetensors"
KOHYA = "pipeline_lora_weights/lora_for_kohya.safetensors"


def test_a_run_resumes_bit_for_bit_and_its_file_is_opened_and_trained_on(flux, flux_flags, train, tmp_path):
    from diffusers import FluxPipeline
    from peft import LoraConfig, set_peft_model_state_dict

    flags = (*flux_flags, *LORA, *DRAWN, "--train_batch_size=2", "--use_ema")
    flags = (*flags, "--lora_dropout=0.1", "--mixed_precision=bf16", "--gradient_checkpointing")
    run = train(tmp_path / "four", *flags, "--max_train_steps=4")
    output = run.output
    assert "captions of the images: 1 of 1" in run.said
    for steps in (2, 4):
        halves = train(tmp_path / "halves", *flags, f"--max_train_steps={steps}")
        base_images = [halves.output / f"validation/step-00000{step}/base-00.png" for step in range(0, steps + 1, 2)]
        assert len({read_rgb(path).tobytes() for path in base_images}) == 1, "one that is there is not sampled again"
        for path in base_images:
            write_image(path, Image.new("RGB", (64, 64), "red"), read_info(path)[1])

    assert "resuming from" in halves.said and halves.losses == run.losses and run.losses[-1] < run.losses[0]
    weights = checkpoint(output, 4, "model")
    for group in ("model", "ema", "exp_avg", "exp_avg_sq"):
        assert same_tensors(checkpoint(output, 4, group), checkpoint(halves.output, 4, group)), group
        assert checkpoint(output, 4, group).keys() == weights.keys()
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in weights)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    state = json.loads((output / "checkpoints/checkpoint-000004/state.json").read_text())
    targets = "add_k_proj,add_q_proj,add_v_proj,to_add_out,to_k,to_out.0,to_q,to_v"
    lora = {"lora_rank": 4, "lora_alpha": 8.0, "lora_target_modules": targets}
    assert (state["model_type"], state["lora"]) == ("lora", lora)

    pipeline = FluxPipeline.from_pretrained(flux)
    before = predictions_of_flux(pipeline.transformer)
    pipeline.load_lora_weights(output / "pipeline_lora_weights")
    after = predictions_of_flux(pipeline.transformer)
    assert (after - before).abs().max() > 1e-3
    with safe_open(output / FILE, "pt") as file:
        assert file.metadata()["base_model"] == str(flux)
    other = FluxPipeline.from_pretrained(flux).transformer
    other.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=[*targets.split(",")]))
    set_peft_model_state_dict(other, weights)
    assert torch.equal(predictions_of_flux(other), after)
    ema = load_file(output / "pipeline_lora_weights-ema/pytorch_lora_weights.safetensors")
    assert same_tensors(ema, {f"transformer.{name}": value for name, value in checkpoint(output, 4, "ema").items()})

    assert not (output / KOHYA).exists()
    again = train(tmp_path / "four", *flags, "--max_train_steps=4", "--export_format=comfyui,kohya")
    assert again.losses == run.losses, "what was trained is exported once more, for other programs, too"
    files = ["lora_for_comfyui.safetensors", "lora_for_kohya.safetensors", "pytorch_lora_weights.safetensors"]
    for folder in (output / "pipeline_lora_weights", output / "pipeline_lora_weights-ema"):
        assert sorted(path.name for path in folder.glob("*.safetensors")) == files
    assert "finished already" in train(tmp_path / "four", *flags, "--max_train_steps=4", "--export_format=kohya").said
    train(tmp_path / "four", *flags, "--max_train_steps=4", "--export_format=kohya", "--export_precision=bf16")
    ours, kohya = load_file(output / FILE), load_file(output / KOHYA)
    assert {each.dtype for name, each in kohya.items() if not name.endswith(".alpha")} == {torch.bfloat16}
    assert all(torch.equal(ours[f"transformer.{name}"], each.bfloat16()) for name, each in weights.items())
    more = train(tmp_path / "more", *flags, f"--lora_init={output / KOHYA}", "--max_train_steps=1").output
    steps = (output / "validation/step-000000", output / "validation/step-000004", more / "validation/step-000000")
    names = ("base-00.png", "trained-00.png", "ema-00.png")
    images = [[Image.open(folder / name).tobytes() for name in names] for folder in steps]
    assert images[0][0] == images[0][1] == images[0][2] == images[1][0] == images[2][0]
    assert images[1][0] != images[1][1] == images[2][1]


def test_ranks_that_share_the_batch_train_what_one_rank_does_and_resume_each_other(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, *LORA, *DRAWN, "--validation_step_interval=1")
    plain = train(tmp_path / "plain", *flags, "--train_batch_size=4", "--max_train_steps=4")
    train(tmp_path / "shared", *flags, "--train_batch_size=2", "--max_train_steps=2", world=2)
    train(tmp_path / "shared", *flags, "--train_batch_size=4", "--max_train_steps=3")
    sharded = ("--fsdp_enable", "--use_ema", "--train_batch_size=2", "--max_train_steps=4")
    shared = train(tmp_path / "shared", *flags, *sharded, world=2)
    assert shared.losses == pytest.approx(plain.losses, rel=1e-5)
    weights = checkpoint(plain.output, 4, "model")
    # By the norm: AdamW divides a gradient by its size, so where that is near 0 the last bit of a sum moves a weight.
    exported = load_file(shared.output / FILE)
    assert exported.keys() == {f"unet.{name}" for name in weights}
    for name, value in weights.items():
        assert (exported[f"unet.{name}"] - value).norm() < 5e-4 * value.norm(), name
    for more, said in (
        (("--lora_rank=8",), "has lora_rank = 4, but now it is 8"),
        (("--lora_target_modules=to_q",), "has lora_target_modules = to_k,to_out.0,to_q,to_v, but now it is to_q"),
        (("--model_type=full",), "holds a LoRA, but model_type = full"),
    ):
        refused = train(tmp_path / "plain", *flags, "--train_batch_size=4", "--max_train_steps=5", *more, code=2)
        assert said in " ".join(refused.said.split())
    finished = train(tmp_path / "plain", *flags, "--train_batch_size=4", "--max_train_steps=4")
    assert "finished already" in finished.said


def test_a_sharded_base_gives_the_losses_of_one_rank_and_each_layout_goes_on_from_the_others(run_on, arguments_of):
    arguments = arguments_of("flux", gradient_checkpointing=True)
    names = ["lora fsdp2", "lora fsdp2-cpu", "lora cp2"]
    one = run_on(engines.save_in_turn, 1, arguments, ["lora whole"])
    two = run_on(engines.save_in_turn, 2, arguments, names)
    expected = numbers(one["lora whole-x1"])
    for name, steps in two.items():
        assert numbers(steps) == pytest.approx(expected, rel=1e-5), name
    sources = ["lora whole-x1", "lora fsdp2-x2"]
    resumed = run_on(engines.resume_in_turn, 4, arguments, {"lora hybrid-cp2": sources[1:]})
    resumed |= run_on(engines.resume_in_turn, 2, arguments, {"lora whole": sources[1:], "lora fsdp2": sources})
    assert len(resumed) == 4
    for pair, (different, steps) in resumed.items():
        assert different == [], pair
        assert numbers(steps) == pytest.approx(expected, rel=1e-5), pair


def random_lora(flux: Path, folder: Path) -> str:
    """Write a LoRA of random matrices: with a new one's B, which is zero, gradients of A are zero whatever the base."""
    from diffusers import FluxTransformer2DModel

    layers = dict(FluxTransformer2DModel.from_pretrained(flux, subfolder="transformer").named_modules())
    generator, found = torch.Generator().manual_seed(1), {}
    for name, layer in layers.items():
        if any(name.endswith(f".{end}") for end in ATTENTION):
            rows, columns = layer.weight.shape
            for end, shape in (("lora_A", (64, columns)), ("lora_B", (rows, 64))):
                found[f"transformer.{name}.{end}.weight"] = torch.randn(shape, generator=generator) / 8
    save_file(found, folder / "random.safetensors")
    return str(folder / "random.safetensors")


def test_a_quantized_base_gives_the_same_losses_sharded_and_its_bytes_are_shared_out(
    run_on, arguments_of, flux, tmp_path
):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    arguments = arguments_of("flux", gradient_checkpointing=True, lora_init=random_lora(flux, tmp_path))
    # A row of the tiny model has 64 to 256 weights, which share a scale of 4 bytes and a zero point of one.
    bytes_per_weight = {"int8": 1.04, "float8": 1.03, "nf4": 0.52}
    # Found: 0.012, 0.047, 0.068 and 0.015 %; of a LoRA whose B is zero 0.001, 0.01 and 0.05 %.
    loss_differences = {"int8": 2e-4, "float8": 1e-3, "nf4": 1.5e-3}
    # Products in int8 round each input and gradient to 8 bits, too.
    bytes_per_weight["int8 products"], loss_differences["int8 products"] = 1.04, 3e-4
    names = [f"{base} lora" for base in bytes_per_weight]
    one = run_on(engines.bases_in_turn, 1, arguments, ["lora whole", *(f"{name} whole" for name in names)])
    two = run_on(engines.bases_in_turn, 2, arguments, [f"{name} fsdp2" for name in names])
    exact, _ = one["lora whole"]
    for name, (precision, expected) in zip(names, bytes_per_weight.items(), strict=True):
        steps, held = one[f"{name} whole"]
        assert held == pytest.approx(expected, rel=0.01), name
        losses, exact_losses = ([loss for loss, _ in each] for each in (steps, exact))
        assert losses == pytest.approx(exact_losses, rel=loss_differences[precision]), name
        assert steps != exact and numbers(steps) == pytest.approx(numbers(exact), rel=3e-2), name
        sharded, share = two[f"{name} fsdp2"]
        # What is rounded to 8 bits may fall on the other side where it differs by a float32's last bit.
        assert numbers(sharded) == pytest.approx(numbers(steps), rel=1e-4 if "products" in name else 1e-5), name
        assert share == pytest.approx(held / 2, rel=0.01), name
    [(_, share)] = run_on(engines.bases_in_turn, 4, arguments, ["nf4 lora fsdp2"]).values()
    assert share == pytest.approx(one["nf4 lora whole"][1] / 4, rel=0.02)


def test_regularisation_data_is_trained_towards_the_base_model_on_any_number_of_ranks(
    sdxl_flags, shapes, train, tmp_path
):
    values = {"resolution": 64, "caption_strategy": "filename", "cache_dir_vae": str(tmp_path / "latents/{id}")}
    kept = {"id": "kept", "instance_data_dir": str(shapes), "is_regularisation_data": True, **values}
    own = {"id": "own", "instance_data_dir": str(shapes), **values}
    for name, datasets in (("alone", [kept]), ("mixed", [kept, own])):
        (tmp_path / f"{name}.json").write_text(json.dumps(datasets))

    def run(name: str, output: str, size: int, *more: str, **how) -> Any:
        flags = (*sdxl_flags[:2], *LORA, f"--cache_dir_text={tmp_path / 'text'}", "--max_train_steps=4", *more)
        file = f"--data_backend_config={tmp_path / name}.json"
        return train(tmp_path / output, *flags, file, f"--train_batch_size={size}", **how)

    assert run("alone", "alone", 4).losses == [0, 0, 0, 0], "B is 0, so the base model is what there is"
    mixed = run("mixed", "mixed", 4, "--gradient_accumulation_steps=2")
    assert all(loss > 0 for loss in mixed.losses)
    back = run("alone", "back", 4, f"--lora_init={mixed.output / FILE}", "--max_train_steps=12").losses
    assert back[0] > 5 * max(back[-4:]) > 0, "what the adapter adds is unlearnt"
    shared = run("mixed", "shared", 2, "--gradient_accumulation_steps=2", world=2)
    assert shared.losses == pytest.approx(mixed.losses, rel=1e-5)
    refused = " ".join(run("alone", "full", 4, "--model_type=full", code=2).said.split())
    assert "is_regularisation_data = true" in refused and "dataset `kept`" in refused
    assert "the base model that gives the targets is kept only by model_type=lora" in refused


def test_the_base_is_held_in_int8(flux, shapes, train, tmp_path):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    flags = (*base("flux", flux, shapes), *LORA, "--train_batch_size=2", "--mixed_precision=bf16")
    int8 = ("--base_model_precision=int8", "--max_train_steps=3")
    exact = train(tmp_path / "bf16", *flags, "--max_train_steps=3")
    run = train(tmp_path / "int8", *flags, *int8, "--train_batch_size=1", world=2)
    assert "frozen in int8" in " ".join(run.said.split())
    assert run.losses != exact.losses
    assert run.losses == pytest.approx(exact.losses, rel=2e-2)


def test_dropout_differs_between_ranks_steps_and_seeds_but_not_within_a_sequence(starter, flux, shapes, tmp_path):
    arguments = {"family": "flux", "base": str(flux), "pictures": str(shapes), "folder": str(tmp_path)}
    cases = {"whole": ("whole", 42), "again": ("whole", 42), "above": ("whole", 42 + (1 << 32)), "cp2": ("cp2", 42)}
    run = starter.start(engines.dropout_in_turn, 2, arguments, cases, str(tmp_path / "report"))
    assert run.wait(300) == [0, 0], run.said
    drawn = json.loads((tmp_path / "report").read_text())
    assert drawn["whole"] == drawn["again"]
    one, other = zip(*drawn["cp2"], strict=True)
    assert one == other == tuple(first for first, _ in drawn["whole"])
    alone = [tuple(rank) for name in ("whole", "above") for step in drawn[name] for rank in step]
    assert len(alone) == len(set(alone)) == 8


def test_an_assistant_is_a_base_with_its_weights_merged_and_is_not_exported(flux, flux_flags, train, tmp_path):
    from diffusers import FluxPipeline

    flags = (*flux_flags, *LORA)
    helper = train(tmp_path / "helper", *flags, "--max_train_steps=3", "--train_batch_size=4", "--export_format=kohya")
    pipeline = FluxPipeline.from_pretrained(flux)
    pipeline.load_lora_weights(helper.output / "pipeline_lora_weights")
    pipeline.fuse_lora(lora_scale=0.5)
    pipeline.unload_lora_weights()
    pipeline.save_pretrained(tmp_path / "merged")

    flags = (*flags, "--lora_target_modules=to_q,to_out.0", "--max_train_steps=3")
    whole = train(tmp_path / "whole", *flags, "--train_batch_size=4")
    merged = (*flags, f"--pretrained_model_name_or_path={tmp_path / 'merged'}", "--train_batch_size=4")
    expected = train(tmp_path / "of-merged", *merged)
    assisted = (*flags, f"--assistant_lora={helper.output / KOHYA}", "--assistant_lora_strength=0.5")
    run = train(tmp_path / "run", *assisted, "--train_batch_size=4")
    sharded = train(tmp_path / "sharded", *assisted, "--train_batch_size=2", "--fsdp_enable", world=2)
    assert run.losses == pytest.approx(expected.losses, rel=1e-6) != whole.losses
    assert sharded.losses == pytest.approx(expected.losses, rel=1e-5)
    if find_spec("torchao"):
        int8 = (merged, (*assisted, "--train_batch_size=4"))
        one, other = (
            train(tmp_path / f"int8-{i}", *each, "--base_model_precision=int8") for i, each in enumerate(int8)
        )
        assert one.losses == pytest.approx(other.losses, rel=1e-5), "merged before it is quantized"
        assert one.losses != expected.losses != whole.losses
    for group in ("model", "exp_avg"):  # the moments are those of the gradients
        ours, theirs = (checkpoint(each.output, 3, group) for each in (run, expected))
        assert ours.keys() == theirs.keys() and not [name for name in ours if "to_k" in name]
        for name, value in ours.items():
            assert (value - theirs[name]).norm() < 1e-4 * theirs[name].norm(), (group, name)
    assert load_file(run.output / FILE).keys() == {f"transformer.{name}" for name in checkpoint(run.output, 3, "model")}
    for more, said in (
        (("--assistant_lora_strength=1",), "has assistant_lora_strength = 0.5, but now it is 1"),
        (("--assistant_lora=nowhere.safetensors",), "nowhere.safetensors: there is no such file or folder"),
    ):
        refused = train(tmp_path / "run", *assisted, "--train_batch_size=4", "--max_train_steps=4", *more, code=2)
        assert said in " ".join(refused.said.split())
