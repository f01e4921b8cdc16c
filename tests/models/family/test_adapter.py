"""LoRA: the gradients of a peft loop written by hand, and files that each family's own pipeline opens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.models.family.adapter import Adapter, adapter_parameters, freeze
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import sample_losses
from simpletuner.models.opening.lora_file import LORA_WEIGHTS, check_lora_init, write_lora
from simpletuner.parallel.world import joined_world
from simpletuner.settings.declared.sections import Lora, Model, Settings
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.trainer import Trainer

TRAINABLE = [key for key, preset in presets().items() if preset.family_class]
ABLE = [key for key in TRAINABLE if presets()[key].loads_lora and presets()[key].has_class]
RANK, ALPHA = 4, 6


def opened(key: str, folder: Path, **lora) -> ModelFamily:
    model = Model(model_family=key, model_type="lora", pretrained_model_name_or_path=str(folder))
    settings = Settings(model=model, lora=Lora(**{"lora_rank": RANK, "lora_alpha": ALPHA, **lora}))
    return family_class(model).open(folder, settings)


def adapter_of(family: ModelFamily) -> Adapter:
    assert family.adapter is not None
    return family.adapter


def random_weights(family: ModelFamily) -> dict[str, torch.Tensor]:
    """Return weights of an adapter that changes every prediction."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in family.trained_shapes().items()}


def written(family: ModelFamily, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    weights = random_weights(family)
    write_lora(folder, family, adapter_of(family), weights)
    return folder / LORA_WEIGHTS, weights


def diffusers_denoiser(family: ModelFamily) -> Any:
    cls = getattr(__import__("diffusers"), family.config["_class_name"])
    return cls.from_pretrained(family.folder / family.denoiser_name)


@pytest.mark.parametrize("key", TRAINABLE)
def test_a_preset_says_whether_the_pipelines_of_its_family_load_loras(key):
    import diffusers

    cls = family_class(Model(model_family=key))
    able = {
        hasattr(getattr(diffusers, name), "load_lora_weights")
        for each in (cls, *cls.variants())
        for name in each.pipelines
    }
    assert able == {presets()[key].loads_lora}


@pytest.mark.parametrize("key", ABLE)
def test_the_familys_own_pipeline_opens_what_is_written(key, pipelines, tmp_path):
    family = opened(key, pipelines(key))
    file, weights = written(family, tmp_path)
    denoiser = diffusers_denoiser(family)
    pipeline = family.load_pipeline(vae=None, model=denoiser)
    pipeline.load_lora_weights(file)
    loaded = get_peft_model_state_dict(denoiser, adapter_name="default_0")
    assert loaded.keys() == weights.keys() and len(weights) >= 4
    assert all(torch.equal(value, weights[name]) for name, value in loaded.items())
    scales = {layer.scaling["default_0"] for layer in denoiser.modules() if hasattr(layer, "scaling")}
    assert scales == {ALPHA / RANK}
    with safe_open(file, "pt") as content:
        assert content.metadata()["base_model"] == str(family.folder)


@contextmanager
def trained(family: str, base: Path, pictures: Path, folder: Path, **lora) -> Iterator[tuple[Trainer, TrainingState]]:
    """Yield what trains a LoRA in this process."""
    arguments = {
        "family": family,
        "base": str(base),
        "pictures": str(pictures),
        "folder": str(folder),
        "max_grad_norm": 0,
    }
    settings = engines.settings_of(arguments, "whole", folder / "run", 1)
    model = settings.model.model_copy(update={"model_type": "lora"})
    settings = settings.model_copy(update={"model": model, "lora": Lora(lora_rank=RANK, lora_alpha=ALPHA, **lora)})
    with joined_world() as world:
        prepared = engines.prepared_by(world, settings)
        with engines.opened(world, settings, prepared) as (trainer, state):
            yield trainer, state


@pytest.mark.parametrize("key", ["sdxl", "flux"])
def test_losses_and_gradients_are_those_of_a_peft_loop_written_by_hand(key, pipelines, shapes, tmp_path):
    family = opened(key, pipelines(key))
    file, weights = written(family, tmp_path)
    with trained(key, pipelines(key), shapes, tmp_path, lora_init=file) as (trainer, state):
        batches = [trainer.next_batch()[0] for _ in range(10)]
        trainer.batches = iter(batches)
        ours, first = [], {}
        for step in range(10):
            batch, _ = trainer.next_batch()
            ours.append(trainer.train_step(batch).loss.item())
            if step == 0:
                first = {
                    name: each.clone() for name, each in state.engine.optimizer_state().tensors["exp_avg"]().items()
                }
        result = {name: each.clone() for name, each in state.weights().items()}

    denoiser = diffusers_denoiser(family).requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(adapter_of(family).targets))
    denoiser.add_adapter(config)
    parameters = {
        name.replace(".default", ""): each for name, each in denoiser.named_parameters() if each.requires_grad
    }
    assert parameters.keys() == weights.keys() == result.keys()
    for name, each in parameters.items():
        each.data.copy_(weights[name])
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    losses = []
    for batch in batches:
        [part] = batch.micro_batches
        noised = trainer.objective.add_noise(part.latents, part.noise, part.u)
        predicted = trainer.family.predict(denoiser, noised.x_t, noised.timesteps, part.conditioning)
        loss = sample_losses(predicted, noised.target, noised.weights).mean()
        loss.backward()
        if not losses:
            for name, each in parameters.items():
                torch.testing.assert_close(first[name] * 10, each.grad, rtol=1e-4, atol=1e-6, msg=name)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert ours == pytest.approx(losses, rel=1e-5)
    for name, each in parameters.items():
        torch.testing.assert_close(result[name], each.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"lora_target_modules": "to_qq"}, "has no layer `to_qq`; did you mean `to_q`?"),
        ({"lora_target_modules": "to_q,attn9.to_k"}, "has no layer `attn9.to_k`"),
        ({"lora_target_modules": "to_q,blocks.*"}, "has no layer `blocks.*`"),
    ],
)
def test_a_target_that_no_layer_has_is_refused_with_the_nearest(lora, said, sdxl):
    with pytest.raises(SettingsError) as caught:
        _ = opened("sdxl", sdxl, **lora).adapter
    assert said in str(caught.value)


def test_a_pattern_names_layers_by_their_whole_names(pipelines):
    folder = pipelines("flux")
    adapter = adapter_of(opened("flux", folder, lora_target_modules="single_transformer_blocks.*,proj_out"))
    blocks = {name for name in adapter.modules if name.startswith("single_transformer_blocks.")}
    # An end is that of any layer, also of the one outside of the blocks, which the pattern leaves out.
    assert {*adapter.modules} - blocks == {"proj_out"}
    ends = {name.partition(".0.")[2] for name in blocks if name.startswith("single_transformer_blocks.0.")}
    assert {"attn.to_q", "attn.to_k", "attn.to_v", "norm.linear", "proj_mlp", "proj_out"} == ends


def test_layers_without_a_gradient_are_not_adapted(pipelines):
    family = opened("qwen_image", pipelines("qwen_image"))
    unused, adapter = family.unused_parameters(), adapter_of(family)
    assert "add_q_proj" in adapter.targets and not [name for name in adapter.modules if name.startswith(unused)]
    assert [name for name in adapter.modules if name.endswith("add_q_proj")]


@pytest.mark.parametrize(
    ("lora", "said", "hint"),
    [
        ({"lora_rank": 8}, "is of rank 4, but lora_rank = 8", "set lora_rank=4"),
        ({"lora_alpha": 4}, "has alpha 6, but lora_alpha = 4", "set lora_alpha=6"),
        ({"lora_target_modules": "to_q"}, "adapts other layers", "set lora_target_modules=to_k,to_out.0,to_q,to_v"),
    ],
)
def test_a_lora_to_go_on_from_must_be_of_the_same_kind(lora, said, hint, sdxl, tmp_path):
    file, _ = written(opened("sdxl", sdxl), tmp_path)
    check_lora_init(opened("sdxl", sdxl, lora_init=file))
    check_lora_init(opened("sdxl", sdxl, lora_init=tmp_path))
    with pytest.raises(SettingsError) as caught:
        check_lora_init(opened("sdxl", sdxl, lora_init=file, **lora))
    assert said in caught.value.message and caught.value.hint == hint


def test_a_lora_that_diffusers_own_script_for_sdxl_has_written_is_gone_on_from(sdxl, shapes, tmp_path):
    """It names attention's layers `.lora.down` and `.lora.up`, others as peft does; here in float16."""
    layers = {"lora_target_modules": "to_q,to_k,to_v,to_out.0,ff.net.2"}
    weights = {name: value.half() for name, value in random_weights(opened("sdxl", sdxl, **layers)).items()}
    theirs = convert_state_dict_to_diffusers(weights)
    assert len({name.rpartition(".lora")[2] for name in theirs}) == 4
    StableDiffusionXLPipeline.save_lora_weights(tmp_path, unet_lora_layers=theirs)
    with trained("sdxl", sdxl, shapes, tmp_path, lora_init=tmp_path, **layers) as (_, state):
        found = state.weights()
        assert found.keys() == weights.keys()
        # Without metadata its alpha is its rank, as diffusers reads it: it computes here what it does there.
        scales = {name: RANK / ALPHA if "lora_B" in name else 1 for name in found}
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name].float() * scales[name], msg=name)


def test_a_lora_of_another_model_and_files_of_other_kinds_are_refused(sdxl, tmp_path):
    family = opened("sdxl", sdxl)
    file, weights = written(family, tmp_path)
    wider = {
        f"unet.{name}": torch.cat([value] * 2, dim=-1 if "lora_A" in name else 0) for name, value in weights.items()
    }
    save_file(wider, tmp_path / "wider.safetensors")
    save_file({"lora_unet_to_q.lora_down.weight": torch.zeros(4, 4)}, tmp_path / "kohya.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(file.read_bytes()[:1000])
    mixed = {f"unet.{name}": value for name, value in weights.items()}
    odd = next(name for name in mixed if "lora_A" in name)
    save_file({**mixed, odd: torch.zeros(2, mixed[odd].shape[1])}, tmp_path / "mixed.safetensors")
    for name, said in (
        ("mixed", r"has matrices of \(2, 64\) and \(64, 4\) for"),
        ("wider", "is of another model"),
        ("kohya", "has one matrix of two for to_q"),
        ("damaged", "cannot read"),
    ):
        with pytest.raises((SettingsError, EnvironmentNotReady), match=said):
            check_lora_init(opened("sdxl", sdxl, lora_init=tmp_path / f"{name}.safetensors"))


def test_a_model_that_names_its_attention_otherwise_needs_targets(sdxl):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    settings = opened("sdxl", sdxl).settings
    with pytest.raises(SettingsError, match="Sequential has no attention projection with") as caught:
        Adapter.of(model, settings, ())
    assert "lora_target_modules: it has 0" in caught.value.hint


def test_a_family_whose_pipeline_loads_no_lora_is_refused(pipelines):
    with pytest.raises(SettingsError, match="PixArtSigmaPipeline has no load_lora_weights"):
        _ = opened("pixart_sigma", pipelines("pixart_sigma")).adapter


def test_the_frozen_base_takes_two_bytes_per_weight_of_a_matrix(sdxl):
    family = opened("sdxl", sdxl)
    model = family.denoiser()
    freeze(model, torch.bfloat16)
    trained = adapter_of(family).attach(model.to("meta"))
    dtypes = {True: set(), False: set()}
    for module in model.modules():
        is_norm = isinstance(module, torch.nn.GroupNorm | torch.nn.LayerNorm)
        dtypes[is_norm] |= {each.dtype for each in module.parameters(recurse=False) if not each.requires_grad}
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}
    assert {each.dtype for each in trained.values()} == {torch.float32}
    assert sum(each.requires_grad for each in model.parameters()) == len(trained)


def test_new_matrices_depend_on_the_whole_seed(pipelines):
    def matrices(seed: int) -> list[torch.Tensor]:
        family = opened("flux", pipelines("flux"))
        adapter = dataclasses.replace(adapter_of(family), seed=seed)
        adapter.attach_new(model := diffusers_denoiser(family))
        trained = adapter_parameters(model)
        return [each for name, each in trained.items() if "lora_A" in name]

    first, again, above = (matrices(seed) for seed in (42, 42, 42 + (1 << 32)))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, above, strict=True))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"lora_type": "oft", "lora_rank": 5}, "rotates inputs in blocks of lora_rank = 5, which do not divide"),
        (
            {"lora_type": "oft", "lora_target_modules": "conv1"},
            "is for linear layers, and down_blocks.0.resnets.0.conv1 is",
        ),
        (
            {"lora_type": "dora", "lora_target_modules": "conv1"},
            "is for linear layers, and down_blocks.0.resnets.0.conv1 is",
        ),
    ],
)
def test_a_layer_that_a_kind_of_adapter_cannot_adapt_is_refused(lora, said, sdxl):
    with pytest.raises(SettingsError) as caught:
        _ = opened("sdxl", sdxl, **{"lora_alpha": None, **lora}).adapter
    assert said in caught.value.message
