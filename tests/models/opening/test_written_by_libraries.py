"""All that peft, diffusers and torchao can write of one model: read as they read it, or refused by its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from models.opening.test_lora_scales import of_layers, opened, randomized
from models.test_inputs import diffusers_denoiser
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file

from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.family.adapter import adapter_parameters
from simpletuner.models.family.base import family_class
from simpletuner.models.folder.weights import weights_files
from simpletuner.models.opening.completeness import check_denoiser_weights, warn_of_eight_bits
from simpletuner.models.opening.lora_file import check_lora_init, load_lora, lora_file
from simpletuner.parallel.world import joined_world
from simpletuner.settings.declared.sections import Model, Settings

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
READ = {"LORA": "lora", "LOKR": "lokr", "LOHA": "loha", "OFT": "oft"}
OF_LANGUAGE_MODELS = {
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"),
    *("ADAPTION_PROMPT", "XLORA", "POLY", "TRAINABLE_TOKENS"),
}
"""Kinds that peft makes for language models alone: they add tokens, or route between adapters."""


@pytest.fixture(scope="module")
def flux(pipelines, tmp_path_factory) -> Path:
    """A pipeline whose denoiser has one block of each kind: all that is written here, of a third of the layers."""
    folder = tmp_path_factory.mktemp("one-block") / "flux"
    shutil.copytree(pipelines("flux"), folder, copy_function=os.link)
    whole = diffusers_denoiser(opened("flux", folder))
    torch.manual_seed(1)
    denoiser = type(whole).from_config({**whole.config, "num_layers": 1, "num_single_layers": 1})
    shutil.rmtree(folder / "transformer")
    denoiser.save_pretrained(folder / "transformer")
    return folder


def made(kind: str, denoiser: torch.nn.Module) -> Any:
    """Return a model with an adapter of a kind, by as few arguments as peft wants; None where it makes none."""
    for arguments in (
        {"target_modules": TARGETS},
        {"target_modules": TARGETS, "feedforward_modules": []},
        {"target_modules": TARGETS, "total_step": 10},
        {"target_modules": TARGETS, "r": 4},
        {"target_modules": ["norm_out.linear"]},
        {},
    ):
        try:
            config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**arguments)
            return get_peft_model(deepcopy(denoiser), config)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError, ImportError):
            continue
    return None


@pytest.mark.filterwarnings("ignore")
def test_every_kind_is_loaded_or_refused_by_its_name(flux, tmp_path):
    kinds = sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING)
    assert len(kinds) >= 40
    loaded, refused, not_made = [], [], []
    denoiser = diffusers_denoiser(opened("flux", flux))
    for kind in sorted(set(kinds) - OF_LANGUAGE_MODELS):
        adapted = made(kind, denoiser)
        if adapted is None:
            not_made.append(kind)
            continue
        randomized(adapted)
        folder = tmp_path / kind
        adapted.save_pretrained(folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == kind
        if kind not in READ:
            with pytest.raises(SettingsError) as caught:
                check_lora_init(opened("flux", flux, lora_init=folder))
            assert f"is a {kind} of peft" in caught.value.message
            refused.append(kind)
            continue
        rank = config.get("r") or 1
        own = {"lora_type": READ[kind], "lora_rank": rank, "lora_init": folder}
        own |= {"lora_alpha": config.get("lora_alpha", config.get("alpha", rank))}
        goes_on = opened("flux", flux, **own)
        try:
            check_lora_init(goes_on)
        except SettingsError as error:  # peft's defaults of OFT and LoKr are not all ours: then it says which
            assert any(word in error.message for word in (kind.lower(), "lora_rank", "oft_", "decompose", "use_")), (
                error
            )
            refused.append(kind)
            continue
        fresh = deepcopy(denoiser)
        goes_on.adapter.attach_new(fresh)
        tensors = {name: each.detach() for name, each in adapter_parameters(fresh).items()}
        load_lora(lora_file(folder), goes_on, tensors)
        if kind == "LORA":
            expected = of_layers(PeftModel.from_pretrained(deepcopy(denoiser), folder).base_model.model)
            torch.testing.assert_close(of_layers(fresh), expected, rtol=1e-5, atol=1e-6)
        else:  # tests of the scales compare what these compute
            stored = load_file(folder / "adapter_model.safetensors")
            assert {f"base_model.model.{name}" for name in tensors} == stored.keys()
            torch.testing.assert_close({f"base_model.model.{name}": each for name, each in tensors.items()}, stored)
        loaded.append(kind)
    print(f"loaded {loaded}, refused {refused}, not made by peft {not_made}")
    assert set(loaded) >= {"LORA", "LOHA"} and len(refused) >= 20, (loaded, refused, not_made)
    assert not set(not_made) & set(READ)


def with_lora(model: Any) -> Any:
    model.add_adapter(LoraConfig(r=4, target_modules=TARGETS))
    randomized(model)
    return model


def fused_and_unloaded(model: Any) -> None:
    with_lora(model).fuse_lora()
    model.unload_lora()


def write_int8(model: Any, folder: Path) -> None:
    """Write a quantized model by torchao's own helper: diffusers' save_pretrained cannot."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    model.save_config(folder)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata)


def in_float8(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


SHARDS = {"max_shard_size": "40KB"}
WAYS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "plain": (lambda model: model, {}),
    "half": (lambda model: model.half(), {}),
    "variant": (lambda model: model.half(), {"variant": "fp16"}),
    "shards": (lambda model: model, SHARDS),
    "shards of a variant": (lambda model: model.half(), {**SHARDS, "variant": "fp16"}),
    "mixed dtypes": (lambda model: model.transformer_blocks[0].to(torch.bfloat16), {}),
    "fused projections": (lambda model: model.fuse_qkv_projections(), {}),
    "channels last": (lambda model: model.to(memory_format=torch.channels_last), {}),
    "float8": (in_float8, {}),
    "LoRA fused and unloaded": (fused_and_unloaded, {}),
    "LoRA loaded": (with_lora, {}),
    "torchao int8": (lambda model: model, {}),
}
"""How a denoiser is changed before it is saved, and with what it is."""
REFUSED_WAYS = {"LoRA loaded": "saved with a LoRA loaded", "torchao int8": "saved quantized by torchao"}


@pytest.mark.filterwarnings("ignore")
def test_a_denoiser_is_read_as_diffusers_reads_it_or_refused_by_what_it_is(flux, tmp_path):
    with joined_world({}, use_cpu=True):
        for way, (change, options) in WAYS.items():
            folder = tmp_path / way.replace(" ", "-").replace(",", "")
            shutil.copytree(flux, folder, copy_function=os.link)
            shutil.rmtree(folder / "transformer")
            written = diffusers_denoiser(opened("flux", flux))
            change(written)
            if way == "torchao int8":
                write_int8(written, folder / "transformer")
            else:
                written.save_pretrained(folder / "transformer", **options)
            place = str(folder)
            model = Model(model_family="flux", pretrained_model_name_or_path=place, variant=options.get("variant"))
            family = family_class(model).open(folder, Settings(model=model))
            if way in REFUSED_WAYS:
                with pytest.raises(EnvironmentNotReady) as caught:
                    check_denoiser_weights(family)
                assert REFUSED_WAYS[way] in caught.value.hint, way
                continue
            check_denoiser_weights(family)
            theirs = type(written).from_pretrained(
                folder / "transformer", variant=model.variant, torch_dtype=torch.float32
            )
            ours = {name: torch.empty(each.shape) for name, each in family.meta_denoiser.state_dict().items()}
            read_tensors(weights_files(folder / "transformer", model.variant), ours, "it")
            found = {name: each.float() for name, each in theirs.state_dict().items() if name in ours}
            assert found.keys() == ours.keys(), way
            torch.testing.assert_close(ours, found, rtol=0, atol=0, msg=way)
            assert ("8 bits" in warn_of_eight_bits(family)) is (way == "float8"), way
