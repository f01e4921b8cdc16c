"""DoRA, LoHa, LoKr and OFT: equal on any engine, resumed by the others, and opened by diffusers or peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from lora_runs import checkpoint, numbers, predictions_of_flux, same_tensors
from PIL import Image

KINDS = engines.KINDS


@pytest.mark.long
def test_each_kind_gives_the_losses_of_one_rank_on_all_engines_and_resumes_on_the_others(run_on, arguments_of):
    arguments = arguments_of("flux", gradient_checkpointing=True)
    words = [f"{kind} lora" for kind in KINDS]
    first = run_on(engines.losses_in_turn, 1, arguments, ["lora whole", *(f"{word} fsdp2-cpu" for word in words)], 1)
    losses = [steps[0][0] for steps in first.values()]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-6), "none changes the base before the first step"
    one = run_on(engines.save_in_turn, 1, arguments, [f"{word} whole" for word in words])
    two = run_on(engines.save_in_turn, 2, arguments, ["dora lora whole", *(f"{word} fsdp2" for word in words)])
    assert len({tuple(numbers(steps)) for steps in one.values()}) == len(KINDS)
    for name, steps in two.items():
        expected = one[f"{' '.join(name.split()[:2])} whole-x1"]
        assert numbers(steps) == pytest.approx(numbers(expected), rel=2e-5), name
    resumed = run_on(engines.resume_in_turn, 2, arguments, {f"{word} fsdp2": [f"{word} whole-x1"] for word in words})
    resumed |= run_on(engines.resume_in_turn, 1, arguments, {f"{word} whole": [f"{word} fsdp2-x2"] for word in words})
    assert len(resumed) == 2 * len(words)
    for pair, (different, steps) in resumed.items():
        expected = one[f"{' '.join(pair.split()[:2])} whole-x1"]
        assert different == [] and numbers(steps) == pytest.approx(numbers(expected), rel=2e-5), pair


def test_a_base_in_8_bits_gives_the_same_losses_sharded(run_on, arguments_of):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    arguments = arguments_of("flux", gradient_checkpointing=True)
    names = [f"int8 {kind} lora" for kind in KINDS if kind != "dora"]
    one = run_on(engines.bases_in_turn, 1, arguments, [f"{name} whole" for name in ("int8 lora", *names)])
    two = run_on(engines.bases_in_turn, 2, arguments, [f"{name} fsdp2" for name in names])
    for name in names:
        alone, sharded = one[f"{name} whole"], two[f"{name} fsdp2"]
        assert numbers(sharded[0]) == pytest.approx(numbers(alone[0]), rel=2e-5), name
        assert alone[0][0][0] == pytest.approx(one["int8 lora whole"][0][0][0], rel=1e-5), "nothing is changed at first"
        assert sharded[1] == pytest.approx(alone[1] / 2, rel=0.01), name


def opened_elsewhere(kind: str, base_model: Path, folder: Path) -> Any:
    """Return a transformer with an exported adapter, by the call that docs/lora.md names."""
    from diffusers import FluxPipeline
    from peft import PeftModel

    pipeline = FluxPipeline.from_pretrained(base_model)
    if kind == "dora":
        pipeline.load_lora_weights(folder)
    elif kind == "lokr":
        name = "pytorch_lora_weights.safetensors"
        pipeline.transformer.load_lora_adapter(folder, weight_name=name, prefix="transformer")
    else:
        pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, folder)
    return pipeline.transformer


def with_weights(kind: str, base_model: Path, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> Any:
    """Return a transformer with a checkpoint's weights, by peft alone."""
    from diffusers import FluxPipeline
    from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model, set_peft_model_state_dict

    targets = state["lora"]["lora_target_modules"].split(",")
    config = {
        "dora": lambda: LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=targets),
        "loha": lambda: LoHaConfig(r=4, alpha=8, target_modules=targets),
        "lokr": lambda: LoKrConfig(r=4, alpha=8, decompose_factor=2, target_modules=targets),
        "oft": lambda: OFTConfig(r=0, oft_block_size=4, target_modules=targets),
    }[kind]()
    model = get_peft_model(FluxPipeline.from_pretrained(base_model).transformer, config)
    set_peft_model_state_dict(model, {f"base_model.model.{name}": each for name, each in weights.items()})
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_resumes_bit_for_bit_and_other_programs_open_what_it_exports(
    kind, flux, flux_flags, train, tmp_path
):
    own = {"oft": (), "lokr": ("--lora_alpha=8", "--lokr_factor=2")}.get(kind, ("--lora_alpha=8",))
    lora = ("--model_type=lora", f"--lora_type={kind}", "--lora_rank=4", "--learning_rate=1e-2", *own)
    drawn = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_guidance=2")
    flags = (*flux_flags, *lora, *drawn, "--train_batch_size=2", "--mixed_precision=bf16")
    flags = (*flags, "--gradient_checkpointing", "--use_ema", "--checkpoint_step_interval=2")
    run = train(tmp_path / "four", *flags, "--max_train_steps=4")
    shutil.copytree(run.output, tmp_path / "halves")
    again = "--resume_from_checkpoint=checkpoint-000002"
    halves = train(tmp_path / "halves", *flags, again, "--max_train_steps=4")
    assert "resuming from" in halves.said
    assert halves.losses == run.losses and run.losses[-1] < run.losses[0]
    assert f"{engines.LABELS[kind]} of " in " ".join(run.said.split())
    weights = checkpoint(run.output, 4, "model")
    for group in ("model", "ema", "exp_avg", "exp_avg_sq"):
        assert same_tensors(checkpoint(run.output, 4, group), checkpoint(halves.output, 4, group)), group

    state = json.loads((run.output / "checkpoints/checkpoint-000004/state.json").read_text())
    assert state["lora"]["lora_type"] == kind
    found = predictions_of_flux(opened_elsewhere(kind, flux, run.output / "pipeline_lora_weights"))
    torch.testing.assert_close(found, predictions_of_flux(with_weights(kind, flux, weights, state)))
    from diffusers import FluxPipeline

    assert (found - predictions_of_flux(FluxPipeline.from_pretrained(flux).transformer)).abs().max() > 1e-3

    start = f"--lora_init={run.output / 'pipeline_lora_weights'}"
    more = train(tmp_path / "more", *flags, start, "--max_train_steps=1").output
    folders = (
        run.output / "validation/step-000000",
        run.output / "validation/step-000004",
        more / "validation/step-000000",
    )
    names = ("base-00.png", "trained-00.png", "ema-00.png")
    images = [[Image.open(folder / name).tobytes() for name in names] for folder in folders]
    assert images[0][0] == images[0][1] == images[0][2] == images[1][0] == images[2][0]
    assert images[1][0] != images[1][1] == images[2][1]
    other = (*flags, start, "--lora_type=lora", "--lora_alpha=8", "--lokr_factor=-1", "--max_train_steps=1")
    refused = train(tmp_path / "other", *other, code=2)
    assert f"is of lora_type {kind}, but lora_type = lora" in " ".join(refused.said.split())
    refused = train(tmp_path / "four", *other[:-1], "--max_train_steps=5", "--lora_init=", code=2)
    assert f"has lora_type = {kind}, but now it is lora" in " ".join(refused.said.split())
