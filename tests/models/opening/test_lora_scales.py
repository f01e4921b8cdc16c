"""LoRAs that peft and diffusers write: what they add to each layer is what `load_lora_weights` makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from models.test_inputs import diffusers_denoiser
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.family.adapter import adapter_parameters
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.opening.assistant_lora import read_assistants
from simpletuner.models.opening.lora_file import LORA_WEIGHTS, check_lora_init, load_lora, lora_file
from simpletuner.settings.declared.sections import Lora, Model, Settings

RANK, ALPHA = 4, 6
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
BLOCK = "transformer_blocks.0.attn"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "alpha_pattern": {"alpha_pattern": {"to_k": 2, r".*to_v": 16}},
    "rank_pattern": {"rank_pattern": {"to_q": 2, "to_out.0": 1}},
    "all patterns": {"rank_pattern": {"to_q": 2}, "alpha_pattern": {".*to_q": 5}, "use_rslora": True},
    "DoRA": {"use_dora": True},
    "DoRA with rsLoRA": {"use_dora": True, "use_rslora": True},
    "bias": {"lora_bias": True},
    "gaussian": {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
"""Arguments of peft's LoraConfig."""


def opened(key: str, folder: Path, **lora: Any) -> ModelFamily:
    model = Model(model_family=key, model_type="lora", pretrained_model_name_or_path=str(folder))
    own = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_target_modules": ",".join(TARGETS)}
    return family_class(model).open(folder, Settings(model=model, lora=Lora(**{**own, **lora})))


def randomized(model: torch.nn.Module) -> None:
    """Give an adapter values that change every output."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if any(part in name for part in ("lora_", "hada_", "lokr_", "oft_R")):
                each.copy_(torch.randn_like(each).abs() + 1 if "magnitude" in name else torch.randn_like(each) / 8)


def of_layers(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return what an adapter adds to each layer that it adapts."""
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight") and layer.active_adapters:
            [adapter] = layer.active_adapters
            found[name] = {"weight": layer.get_delta_weight(adapter).flatten(1).detach()}
            if (bias := layer.lora_B[adapter].bias) is not None:
                found[name]["bias"] = layer.scaling[adapter] * bias.detach()
            if adapter in layer.lora_magnitude_vector:
                found[name]["lengths"] = layer.lora_magnitude_vector[adapter].weight.detach()
    return found


def begun(family: ModelFamily, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return what the adapter of a run that begins from `folder` adds to each layer, by peft's own layers."""
    adapter, model = family.adapter, diffusers_denoiser(family)
    assert adapter is not None
    adapter.attach_new(model)
    load_lora(lora_file(folder), family, {name: each.detach() for name, each in adapter_parameters(model).items()})
    return of_layers(model)


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*", "ignore:.*LoRA tensor.s. have invalid shape")
@pytest.mark.parametrize("key", ["flux", "sdxl"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_of_peft_has_the_effect_that_diffusers_gives_it(key, kind, pipelines, tmp_path):
    arguments = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, **KINDS[kind]}
    family = opened(key, pipelines(key))
    made = diffusers_denoiser(family)
    made.add_adapter(LoraConfig(**arguments))
    randomized(made)
    weights, name = get_peft_model_state_dict(made), family.denoiser_name
    if key == "sdxl":  # as diffusers' scripts name them
        weights = convert_state_dict_to_diffusers(weights)
    family.pipeline_class.save_lora_weights(
        tmp_path, **{f"{name}_lora_layers": weights}, **_collate_lora_metadata({name: made})
    )
    by_peft = get_peft_model(diffusers_denoiser(family), LoraConfig(**arguments))
    randomized(by_peft)
    by_peft.save_pretrained(tmp_path / "peft")
    loaded = diffusers_denoiser(family)
    family.load_pipeline(vae=None, model=loaded).load_lora_weights(tmp_path)
    expected = of_layers(loaded)
    assert expected and of_layers(
        PeftModel.from_pretrained(diffusers_denoiser(family), tmp_path / "peft").base_model.model
    )
    is_dora = "use_dora" in KINDS[kind]
    for folder in (tmp_path, tmp_path / "peft"):
        if kind == "bias":
            with pytest.raises(SettingsError, match="has lora_bias, which is not trained here"):
                check_lora_init(opened(key, pipelines(key), lora_init=folder))
        else:
            goes_on = opened(key, pipelines(key), lora_init=folder, lora_type="dora" if is_dora else "lora")
            assert check_lora_init(goes_on) is None
            torch.testing.assert_close(begun(goes_on, folder), expected, rtol=1e-5, atol=1e-6)
        assistant = opened(key, pipelines(key), assistant_lora=[str(folder)])
        if is_dora:
            with pytest.raises(SettingsError, match="is of lora_type dora, which is not merged"):
                read_assistants(assistant)
        elif kind == "bias" and key == "sdxl":
            with pytest.raises(SettingsError, match="has lora_bias, but .* has no bias to add it to"):
                read_assistants(assistant)
        else:
            added = {name: up @ down for name, [(down, up)] in read_assistants(assistant).items()}
            told = {f"{layer}.{part}": each for layer, parts in expected.items() for part, each in parts.items()}
            torch.testing.assert_close({name: each.view(told[name].shape) for name, each in added.items()}, told)


@pytest.mark.parametrize(
    ("kind", "config", "alpha"),
    [
        ("lokr", LoKrConfig(r=RANK, alpha=8, target_modules=TARGETS), 8),
        ("loha", LoHaConfig(r=RANK, alpha=8, target_modules=TARGETS), 8),
        ("oft", OFTConfig(oft_block_size=RANK, target_modules=TARGETS), None),
    ],
)
def test_a_folder_of_peft_of_another_kind_is_read_by_its_config(kind, config, alpha, flux, tmp_path):
    model = get_peft_model(diffusers_denoiser(opened("flux", flux)), config)
    randomized(model)
    model.save_pretrained(tmp_path)
    own = {"lora_type": kind, "lora_alpha": alpha, "lora_init": tmp_path}
    goes_on = opened("flux", flux, **own)
    assert check_lora_init(goes_on) is None
    tensors = {name: torch.zeros(shape) for name, shape in goes_on.trained_shapes().items()}
    load_lora(lora_file(tmp_path), goes_on, tensors)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == {name.removeprefix("base_model.model.") for name in stored}
    assert all(torch.equal(tensors[name.removeprefix("base_model.model.")], each) for name, each in stored.items())
    for lora_type in {"lora", "lokr", "oft"} - {kind}:
        with pytest.raises(SettingsError, match=f"is of lora_type {kind}, but lora_type = {lora_type}"):
            check_lora_init(opened("flux", flux, lora_init=tmp_path, lora_type=lora_type))
    rewrite(tmp_path, use_cayley_neumann=False, use_effective_conv2d=True)
    with pytest.raises(SettingsError, match=r"has use_(cayley_neumann|effective_conv2d) = (True|False), which"):
        check_lora_init(goes_on)


def rewrite(folder: Path, **changed: Any) -> None:
    """Change keys of peft's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.fixture(scope="module")
def of_peft(flux, tmp_path_factory) -> Path:
    """A LoRA of FLUX with large weights, as peft writes it."""
    model = get_peft_model(
        diffusers_denoiser(opened("flux", flux)), LoraConfig(r=RANK, lora_alpha=6, target_modules=TARGETS)
    )
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.fill_(100)
    model.save_pretrained(folder := tmp_path_factory.mktemp("peft"))
    return folder


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa, which changed its base model"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = olora"),
        ({"modules_to_save": ["proj_out"]}, r"has modules_to_save = \['proj_out'\], which (lora_init|assistant_lora)"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication"),
        ({"use_of_a_newer_peft": True}, "has use_of_a_newer_peft = True"),
        ({"lora_alpha": "8"}, "has a lora_alpha that is no number: 8"),
        ({"lora_alpha": [8]}, "has a lora_alpha that is no number"),
        ({"lora_alpha": float("nan")}, "has a lora_alpha that is no number: nan"),
        ({"lora_alpha": 1e38}, "has an alpha that is too large"),
        ({"lora_alpha": 0}, "changes nothing: its alpha is 0 in all layers"),
        ({"alpha_pattern": [1]}, "has alpha_pattern that is no table"),
        ({"alpha_pattern": {"(": 1}}, "has a key in alpha_pattern that is no regular expression"),
        ({"alpha_pattern": {"(t+)+o": 1}}, "has a key in alpha_pattern that repeats a group"),
        ({"use_dora": True}, "has use_dora, but no lora_magnitude_vector"),
    ],
)
def test_a_config_that_says_what_is_not_computed_is_refused_by_its_key(changed, said, flux, of_peft, tmp_path):
    shutil.copytree(of_peft, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, use_of_a_newer_peft=False)
    assert check_lora_init(opened("flux", flux, lora_init=tmp_path)) is None
    rewrite(tmp_path, **changed)
    with pytest.raises(SettingsError, match=said):
        check_lora_init(opened("flux", flux, lora_init=tmp_path))
    with pytest.raises(SettingsError, match=said):
        read_assistants(opened("flux", flux, assistant_lora=[str(tmp_path)]))


def test_files_that_hold_no_finite_matrices_are_refused_in_one_sentence(flux, tmp_path):
    pair = {f"transformer.{BLOCK}.to_q.lora_A.weight": torch.ones(4, 64)}
    pair |= {f"transformer.{BLOCK}.to_q.lora_B.weight": torch.ones(64, 4)}
    name = next(iter(pair)).removesuffix(".lora_A.weight")
    file, errors = tmp_path / LORA_WEIGHTS, (SettingsError, EnvironmentNotReady)

    def refused(tensors: dict[str, torch.Tensor], said: str, metadata: str = "{}") -> None:
        save_file(tensors, file, metadata={"lora_adapter_metadata": metadata})
        for setting, check in (("lora_init", check_lora_init), ("assistant_lora", read_assistants)):
            given = file if setting == "lora_init" else [str(file)]
            with pytest.raises(errors, match=said) as caught:
                check(opened("flux", flux, lora_target_modules=f"{BLOCK}.to_q", **{setting: given}))
            assert setting in caught.value.message and str(file) in caught.value.message
            assert "\n" not in caught.value.message and len(caught.value.message) < 400

    for end, value, said in (
        (".alpha", torch.ones(2), "has an alpha of 2 values"),
        (".alpha", torch.ones(0), "has an alpha of 0 values"),
        (".alpha", torch.zeros(()), "changes nothing: its alpha is 0"),
        (".alpha", torch.tensor(float("nan")), r"has NaN or infinite values in .*to_q.alpha"),
        (".lora_A.weight", torch.full((4, 64), torch.inf), r"has NaN or infinite values in .*to_q.lora_A.weight"),
        (".lora_A.weight", torch.ones(()), r"has matrices of \(\) and \(64, 4\) for transformer_blocks.0.attn.to_q"),
        (".lora_A.weight", torch.ones(0, 64), "has matrices of"),
        (".lora_B.weight", torch.ones(64, 3), r"has matrices of \(4, 64\) and \(64, 3\)"),
        (".lora_A.weight", torch.ones(4, 64, dtype=torch.complex64), "has no real numbers in .* of torch.complex64"),
        (".lora_A.weight", torch.ones(4, 64, dtype=torch.int8), "has no real numbers in .* of torch.int8"),
        (".lora_A.bias", torch.ones(4), "is no LoRA that is known here: it has"),
    ):
        refused({**pair, f"{name}{end}": value}, said)
    refused(pair, "cannot read", "[" * 100_000)
    refused(pair, "is no JSON object", "[1]")
    refused(pair, "has a lora_alpha that is no number", '{"transformer.r": 4, "transformer.lora_alpha": "6"}')
    config = {"peft_type": "BOFT", "boft_n_butterfly_factor": 1}
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    save_file({"base_model.model.to_q.boft_R": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(EnvironmentNotReady, match=r"adapter_config.json"):
        check_lora_init(opened("flux", flux, lora_init=tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=r"BOFT|has boft_n_butterfly_factor = 1"):
        check_lora_init(opened("flux", flux, lora_init=tmp_path))


def test_ranks_and_layers_that_a_file_lacks_begin_as_new_ones(flux, tmp_path):
    """As `resize_lora` of sd-scripts writes ranks, and as those train who adapt half of the blocks."""
    family = opened("flux", flux)
    layers = [name.removesuffix(".lora_A.weight") for name in family.trained_shapes() if name.endswith("lora_A.weight")]
    torch.manual_seed(0)
    ranks = {layer: 1 + i % RANK for i, layer in enumerate(layers) if i % 2}
    wide = {name: tuple(family.meta_denoiser.get_parameter(f"{name}.weight").shape) for name in ranks}
    tensors = {f"lora_unet_{name.replace('.', '_')}.alpha": torch.tensor(2.0) for name in ranks}
    for name, rank in ranks.items():
        own = f"lora_unet_{name.replace('.', '_')}"
        tensors[f"{own}.lora_down.weight"] = torch.randn(rank, wide[name][1])
        tensors[f"{own}.lora_up.weight"] = torch.randn(wide[name][0], rank)
    save_file(tensors, file := tmp_path / "resized.safetensors")
    goes_on = opened("flux", flux, lora_init=file)
    assert (
        check_lora_init(goes_on)
        == f"lora_init adapts {len(ranks)} of {len(layers)} layers: the others begin as new ones"
    )
    found = begun(goes_on, file)
    assert found.keys() == set(layers)
    for layer in layers:
        own = f"lora_unet_{layer.replace('.', '_')}"
        expected = torch.zeros(found[layer]["weight"].shape)
        if layer in ranks:
            expected = tensors[f"{own}.lora_up.weight"] @ tensors[f"{own}.lora_down.weight"] * 2 / ranks[layer]
        torch.testing.assert_close(found[layer]["weight"], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(SettingsError, match="is of rank 2 to 4, but lora_rank = 3") as caught:
        check_lora_init(opened("flux", flux, lora_init=file, lora_rank=3))
    assert caught.value.hint == "set lora_rank=4"
