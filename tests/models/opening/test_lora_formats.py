"""LoRAs for other programs: diffusers reads them as its own file, and we train on what they write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import loaders
from safetensors.torch import load_file, save_file

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.models.family.adapter import layers_ending_with
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.opening.assistant_lora import read_assistants, read_merged
from simpletuner.models.opening.lora_config import check_formats, file_of, read_lora, write_formats
from simpletuner.models.opening.lora_file import LORA_WEIGHTS, check_lora_init, load_lora, read_layers, write_lora
from simpletuner.settings.declared.sections import Lora, Model, Settings

KNOWN = [(name, program) for name, each in presets().items() if each.has_class for program in each.lora_formats]
RANK, ALPHA = 4, 6
PUBLISHED_WIDTHS: dict[str, dict[str, Any]] = {
    # Diffusers' converters split rows by the widths of the published models.
    "flux": {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)},
    "chroma": {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)},
    "lumina2": {"hidden_size": 2304, "num_attention_heads": 24, "num_kv_heads": 8, "axes_dim_rope": (32, 32, 32)},
}
NAMES = {
    # ComfyUI: `model_lora_keys_unet` in comfy/lora.py, and the maps that it takes from comfy/utils.py.
    ("sdxl", "comfyui"): "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k",
    ("sd3", "comfyui"): "transformer.transformer_blocks.0.attn.add_q_proj",
    ("flux", "comfyui"): "transformer.single_transformer_blocks.0.proj_mlp",
    ("chroma", "comfyui"): "transformer.transformer_blocks.0.attn.to_out.0",
    ("flux2", "comfyui"): "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    ("auraflow", "comfyui"): "transformer.joint_transformer_blocks.0.attn.to_add_out",
    ("lumina2", "comfyui"): "diffusion_model.context_refiner.0.attention.qkv",
    ("qwen_image", "comfyui"): "diffusion_model.transformer_blocks.0.attn.add_k_proj",
    ("wan", "comfyui"): "diffusion_model.blocks.0.cross_attn.o",
    ("ltxvideo", "comfyui"): "diffusion_model.transformer_blocks.0.attn1.to_out.0",
    ("z_image", "comfyui"): "diffusion_model.layers.0.attention.to_out.0",
    # sd-scripts: networks/convert_flux_lora.py, networks/lora_sd3.py, networks/lora_lumina.py; its U-Nets: sdxl's of
    # Stability AI, sd1x's of diffusers. musubi-tuner: convert_lora.py, networks/convert_z_image_lora_to_comfy.py.
    ("sd1x", "kohya"): "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k",
    ("sdxl", "kohya"): "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k",
    ("sd3", "kohya"): "lora_unet_joint_blocks_0_context_block_attn_qkv",
    ("flux", "kohya"): "lora_unet_single_blocks_0_modulation_lin",
    ("chroma", "kohya"): "lora_unet_double_blocks_0_txt_attn_qkv",
    ("flux2", "kohya"): "lora_unet_single_blocks_0_linear2",
    ("lumina2", "kohya"): "lora_unet_layers_0_attention_qkv",
    ("qwen_image", "kohya"): "lora_unet_transformer_blocks_0_attn_to_add_out",
    ("wan", "kohya"): "lora_unet_blocks_0_self_attn_q",
    ("z_image", "kohya"): "lora_unet_layers_0_attention_to_q",
}
"""One name of each kind of file, of those that its program's own code has."""
READERLESS = {("sd3", "kohya"), ("lumina2", "kohya")}
"""Files of sd-scripts that diffusers does not read."""


def opened(key: str, folder: Path, **lora: Any) -> ModelFamily:
    model = Model(model_family=key, model_type="lora", pretrained_model_name_or_path=str(folder))
    settings = Settings(model=model, lora=Lora(**{"lora_rank": RANK, "lora_alpha": ALPHA, **lora}))
    family = family_class(model).open(folder, settings)
    family.config.update(PUBLISHED_WIDTHS.get(key, {}))
    return family


def written(family: ModelFamily, folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) / 8 for name, shape in family.trained_shapes().items()}
    assert family.adapter is not None
    write_lora(folder, family, family.adapter, weights)
    write_formats(folder, family, family.adapter, weights)
    return weights


def probe(width: int) -> torch.Tensor:
    """Inputs that tell matrices of this width apart: products of published widths would take gigabytes."""
    return torch.randn(width, 3, generator=torch.Generator().manual_seed(width))


def outputs(matrices: dict[str, torch.Tensor], scale: float = 1) -> dict[str, torch.Tensor]:
    """Return what each layer's pair makes of the inputs."""
    ends = (".lora_A.weight", ".lora_B.weight")
    layers = {name.removesuffix(ends[0]) for name in matrices if name.endswith(ends[0])}
    pairs = {name: [matrices[f"{name}{end}"].flatten(1) for end in ends] for name in layers}
    return {name: scale * up @ (down @ probe(down.shape[1])) for name, (down, up) in pairs.items()}


def as_diffusers_reads(family: ModelFamily, file: Path) -> dict[str, torch.Tensor]:
    """Return what a file adds to each layer, by the family's own pipeline."""
    if family.denoiser_name == "unet":
        cls = getattr(__import__("diffusers"), family.config["_class_name"])
        denoiser = cls.from_pretrained(family.folder / "unet")
        family.load_pipeline(vae=None, model=denoiser).load_lora_weights(file)
        layers = {name: each for name, each in denoiser.named_modules() if hasattr(each, "get_delta_weight")}
        deltas = {name: each.get_delta_weight("default_0").flatten(1).detach() for name, each in layers.items()}
        return {name: delta @ probe(delta.shape[1]) for name, delta in deltas.items()}
    read = family.pipeline_class.lora_state_dict(load_file(file))
    return outputs({name.removeprefix("transformer."): tensor for name, tensor in read.items()})


class WholeModel(dict[str, torch.Tensor]):
    """Weights of an original model, of which those that no LoRA changes are zeros."""

    def pop(self, name: str, *_: Any) -> torch.Tensor:
        return super().pop(name, torch.zeros(6, 1))


def as_merged_by_name(family: ModelFamily, file: Path) -> dict[str, torch.Tensor]:
    """Return what a file of sd-scripts adds to each layer, by its formula and diffusers' converters of whole models."""
    stored = load_file(file)
    names = {name.partition(".")[0] for name in stored}
    layers = [
        f"{stack}.{i}" for stack in ("joint_blocks", "layers", "noise_refiner", "context_refiner") for i in range(4)
    ]
    merged = WholeModel(
        {"context_embedder.weight": torch.zeros(2, 1)} if "sd3" in family.settings.model.model_family else {}
    )
    for name in names:
        down, up, alpha = (stored[f"{name}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        rest = name.removeprefix("lora_unet_")
        block = next(each for each in layers if rest.startswith(each.replace(".", "_") + "_"))
        rest = rest.removeprefix(block.replace(".", "_") + "_")
        for inner in (
            "x_block",
            "context_block",
            "attention",
            "attn2",
            "attn",
            "mlp",
            "feed_forward",
            "adaLN_modulation",
        ):
            rest = rest.replace(f"{inner}_", f"{inner}.")
        # Its converter splits rows alone, so that outputs are converted like weights.
        merged[f"{block}.{rest}.weight"] = alpha / down.shape[0] * up @ (down @ probe(down.shape[1]))
    convert = {
        "sd3": loaders.single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
        "lumina2": loaders.single_file_utils.convert_lumina2_to_diffusers,
    }[family.settings.model.model_family]
    return {name.removesuffix(".weight"): each for name, each in convert(merged).items()}


@pytest.mark.parametrize(("key", "program"), KNOWN)
def test_a_file_for_another_program_adds_what_diffusers_own_file_does(key, program, pipelines, tmp_path):
    everything = opened(key, pipelines(key))
    of_blocks = {name for name in layers_ending_with(everything.meta_denoiser, "") if re.search(r"\.\d+\.", name)}
    lora = {"export_format": program, "lora_target_modules": ",".join(sorted(of_blocks))}
    while True:  # norms that an original orders otherwise have no name there
        try:
            check_formats(family := opened(key, pipelines(key), **lora), family.adapter)
            break
        except SettingsError as error:
            of_blocks.remove(error.message.split(": ")[1].split()[0])
            lora["lora_target_modules"] = ",".join(sorted(of_blocks))
    weights = written(family, tmp_path)
    file = tmp_path / file_of(program)
    stored = load_file(file)
    ends = (
        ("lora_down.weight", "lora_up.weight", "alpha")
        if "lora_unet_" in next(iter(stored))
        else ("lora_A.weight", "lora_B.weight")
    )
    if layer := NAMES.get((key, program)):
        assert {f"{layer}.{end}" for end in ends} <= stored.keys()
    expected = outputs(weights, ALPHA / RANK)
    read = (as_merged_by_name if (key, program) in READERLESS else as_diffusers_reads)(family, file)
    assert expected.keys() <= read.keys() and len(expected) >= 4
    if (key, program) == ("sd3", "kohya"):  # the last block's shift and scale are in the other order there
        assert {f"transformer_blocks.{i}.norm1_context.linear" for i in (0, 2)} < expected.keys()
    for name, value in expected.items():
        assert (read[name] - value).norm() < 1e-5 * value.norm(), name

    goes_on = opened(key, pipelines(key), **lora | {"lora_init": file, "lora_alpha": 8})
    check_lora_init(goes_on)
    tensors = {name: torch.zeros_like(each) for name, each in weights.items()}
    load_lora(file, goes_on, tensors)
    for name, value in outputs(tensors, 8 / RANK).items():
        assert (value - expected[name]).norm() < 1e-5 * value.norm(), name


def test_the_last_layer_that_sd_scripts_adapts_of_lumina_is_read(pipelines, tmp_path):
    """Its `create_network` without options adapts FinalLayer, too (networks/lora_lumina.py)."""
    original = {"final_layer.linear": "norm_out.linear_2", "final_layer.adaLN_modulation.1": "norm_out.linear_1"}
    lora = {"lora_target_modules": ",".join(original.values()), "export_format": "kohya"}
    weights = written(family := opened("lumina2", pipelines("lumina2"), **lora), tmp_path)
    stored = load_file(tmp_path / file_of("kohya"))
    assert {name.partition(".")[0] for name in stored} == {f"lora_unet_{name.replace('.', '_')}" for name in original}
    convert = loaders.single_file_utils.convert_lumina2_to_diffusers
    whole = WholeModel({f"{name}.weight": torch.full((2, 2), i) for i, name in enumerate(original)})
    theirs = convert(WholeModel(whole))
    for name, ours in original.items():
        assert theirs[f"{ours}.weight"] is whole[f"{name}.weight"]
    found = read_layers(read_lora(tmp_path / file_of("kohya"), "transformer.", "lora_init"), family, ALPHA / RANK)
    assert found.keys() == weights.keys() and all(torch.equal(found[name], each) for name, each in weights.items())


def test_a_stack_whose_parts_share_one_matrix_is_taken_apart_and_text_encoders_are_refused(pipelines, tmp_path):
    """As sd-scripts trains FLUX.1: one pair for q, k and v. Absent parts of our own stacks are no layers of a LoRA."""
    block = "transformer_blocks.0.attn"
    lora = {"lora_target_modules": ",".join(f"{block}.to_{part}" for part in "qkv")}
    family = opened("flux", pipelines("flux"), **lora)
    width = family.meta_denoiser.get_parameter("transformer_blocks.0.attn.to_q.weight").shape[0]
    down, up = torch.randn(RANK, width), torch.randn(3 * width, RANK)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    dense = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up.half(), f"{name}.alpha": torch.tensor(2.0)}
    save_file(dense, file := tmp_path / "dense.safetensors")
    found = read_layers(read_lora(file, "transformer.", "lora_init"), family)
    stack = torch.cat([found[f"{block}.to_{part}.lora_B.weight"] for part in "qkv"])
    torch.testing.assert_close(stack, up.half().float() * 2 / RANK)
    assert all(torch.equal(found[f"{block}.to_{part}.lora_A.weight"], down) for part in "qkv")
    written(one := opened("flux", pipelines("flux"), export_format="kohya", lora_target_modules="attn.to_k"), tmp_path)
    check_lora_init(
        opened("flux", pipelines("flux"), lora_target_modules="attn.to_k", lora_init=tmp_path / file_of("kohya"))
    )
    assert (
        read_layers(read_lora(tmp_path / file_of("kohya"), "transformer.", "lora_init"), one).keys()
        == one.trained_shapes().keys()
    )
    for extra, said in (
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0)}, "has one matrix of two for"),
        (
            {"x.lora_up.weight": up.clone(), "x.lora_down.weight": down.clone()},
            "adapts x, which is no layer of FluxTransformer2DModel",
        ),
        ({f"{name}.dora_scale": down.clone()}, "is no LoRA that is known here: it has lora_unet_double"),
    ):
        save_file(dense | extra, file)
        with pytest.raises(SettingsError, match=said):
            check_lora_init(opened("flux", pipelines("flux"), lora_init=file, **lora))


def test_a_layer_without_a_known_name_is_refused_before_training(pipelines):
    lora = {"export_format": "kohya", "lora_target_modules": "to_q,proj_out,x_embedder"}
    with pytest.raises(
        SettingsError, match=r"export_format=kohya: (x_embedder|proj_out) has no name there that is known"
    ):
        check_formats(family := opened("flux", pipelines("flux"), **lora), family.adapter)


def test_an_assistant_must_be_a_lora_of_the_same_model(pipelines, tmp_path):
    family = opened("flux", pipelines("flux"))
    weights = written(family, tmp_path)
    file = tmp_path / LORA_WEIGHTS
    deltas = read_assistants(
        opened("flux", pipelines("flux"), assistant_lora=[str(file)] * 2, assistant_lora_strength=2)
    )
    assert deltas.keys() == {name.replace("lora_A.", "") for name in weights if "lora_A" in name}
    name = "transformer_blocks.0.attn.to_q"
    base = torch.randn(family.meta_denoiser.get_parameter(f"{name}.weight").shape)
    merged = {f"{name}.weight": torch.zeros(base.shape, dtype=torch.bfloat16), "other": torch.zeros(2)}

    def read(tensors: Mapping[str, torch.Tensor]) -> None:
        for each in tensors.values():
            each.copy_(base if each.shape == base.shape else torch.ones(2))

    read_merged(read, merged, deltas)
    product = weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
    # Rounded once: of a weight that was bf16 already, one in five rounds to another neighbour.
    unlike = merged[f"{name}.weight"] != (base + 2 * 2 * ALPHA / RANK * product).bfloat16()
    assert unlike.float().mean() < 1e-3 and merged["other"].tolist() == [1, 1]
    bad = tmp_path / "bad.safetensors"
    pair = {"lora_A.weight": torch.ones(2, 3), "lora_B.weight": torch.ones(3, 2)}
    for layer, said in (
        (f"transformer.{name}", "is of another model: its matrices for transformer_blocks.0.attn.to_q do not fit"),
        ("text_encoder.text_model.fc1", "adapts text_encoder.text_model.fc1, which is no layer of"),
    ):
        save_file({f"{layer}.{end}": each for end, each in pair.items()}, bad)
        with pytest.raises(SettingsError, match=said):
            read_assistants(opened("flux", pipelines("flux"), assistant_lora=[str(bad)]))
    save_file({f"transformer.{name}.lokr_w1": torch.ones(2, 2)}, bad)
    with pytest.raises(SettingsError, match="is of lora_type lokr, which is not merged"):
        read_assistants(opened("flux", pipelines("flux"), assistant_lora=[str(bad)]))
