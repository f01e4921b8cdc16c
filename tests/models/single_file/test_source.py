"""Models in one file: written in the original layout, opened by diffusers, trained on, and refused."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from conftest import base
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from simpletuner.checkpoints.export import export_single_file
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.family.base import family_class
from simpletuner.models.single_file.conversion import TEXT_ENCODERS, convert, unet_name, vae_name
from simpletuner.models.single_file.source import check_single_file, named_file
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.rules.rules import SINGLE_FILE_FAMILIES

IN_TEXT_ENCODER = {
    "sd1x": "cond_stage_model.transformer.text_model.final_layer_norm.weight",
    "sd2x": "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight",
    "sdxl": "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight",
}
UNET = {"layers_per_block": 2, "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]}


def test_names_are_those_of_published_files():
    assert set(SINGLE_FILE_FAMILIES) == TEXT_ENCODERS.keys()
    names = {
        "conv_in.weight": "input_blocks.0.0.weight",
        "down_blocks.0.resnets.1.conv1.weight": "input_blocks.2.0.in_layers.2.weight",
        "down_blocks.0.downsamplers.0.conv.bias": "input_blocks.3.0.op.bias",
        "down_blocks.1.resnets.0.conv_shortcut.weight": "input_blocks.4.0.skip_connection.weight",
        "down_blocks.2.attentions.1.transformer_blocks.9.attn1.to_out.0.bias": (
            "input_blocks.8.1.transformer_blocks.9.attn1.to_out.0.bias"
        ),
        "mid_block.resnets.1.time_emb_proj.weight": "middle_block.2.emb_layers.1.weight",
        "mid_block.attentions.0.proj_in.weight": "middle_block.1.proj_in.weight",
        "up_blocks.0.upsamplers.0.conv.weight": "output_blocks.2.2.conv.weight",
        "up_blocks.2.resnets.2.norm2.bias": "output_blocks.8.0.out_layers.0.bias",
        "add_embedding.linear_2.bias": "label_emb.0.2.bias",
        "conv_out.bias": "out.2.bias",
    }
    assert {name: unet_name(name, UNET) for name in names} == names
    names = {
        "encoder.down_blocks.3.resnets.1.norm1.weight": "encoder.down.3.block.1.norm1.weight",
        "decoder.up_blocks.0.upsamplers.0.conv.weight": "decoder.up.3.upsample.conv.weight",
        "decoder.up_blocks.2.resnets.0.conv_shortcut.bias": "decoder.up.1.block.0.nin_shortcut.bias",
        "encoder.mid_block.attentions.0.to_out.0.weight": "encoder.mid.attn_1.proj_out.weight",
        "encoder.mid_block.attentions.0.group_norm.bias": "encoder.mid.attn_1.norm.bias",
        "decoder.mid_block.resnets.1.conv2.bias": "decoder.mid.block_2.conv2.bias",
        "decoder.conv_norm_out.bias": "decoder.norm_out.bias",
        "quant_conv.weight": "quant_conv.weight",
    }
    assert {name: vae_name(name, 4) for name in names} == names


@pytest.mark.parametrize("family", SINGLE_FILE_FAMILIES)
def test_what_is_written_opens_in_diffusers_with_equal_tensors_attention_of_the_vae_included(
    family, pipelines, tmp_path
):
    from diffusers import AutoencoderKL, DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(pipelines(family))
    config = {**pipeline.vae.config, "mid_block_add_attention": True}
    pipeline.vae = AutoencoderKL.from_config(config)
    pipeline.unet.half()
    folder = tmp_path / "whole"
    pipeline.save_pretrained(folder)
    # As they were published first: attention under other names, and a buffer among the weights.
    [vae], [text] = ((folder / name).glob("*.safetensors") for name in ("vae", list(TEXT_ENCODERS[family])[-1]))
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    save_file({re.sub("|".join(old), lambda part: old[part[0]], name): x for name, x in load_file(vae).items()}, vae)
    save_file(load_file(text) | {"text_model.embeddings.position_ids": torch.arange(77)[None]}, text)
    export_single_file(folder, tmp_path / "model.safetensors", family)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {"first_stage_model.encoder.mid.attn_1.q.weight", IN_TEXT_ENCODER[family]} < names
    assert not [name for name in names if "position_ids" in name and ".transformer.text_model." not in name]
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    again = type(pipeline).from_single_file(
        str(tmp_path / "model.safetensors"), config=str(folder), local_files_only=True
    )
    for name in ("unet", "vae", *TEXT_ENCODERS[family]):
        one, other = getattr(pipeline, name).state_dict(), getattr(again, name).state_dict()
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key].float(), other[key].float()) for key in one), name


def test_a_run_from_one_file_equals_one_from_the_folder_and_leaves_such_a_file(sdxl, shapes, train, tmp_path):
    flags = ("--train_batch_size=4", "--max_train_steps=1", "--use_ema")
    whole = train(tmp_path / "whole", *base("sdxl", sdxl, shapes), *flags)
    start = tmp_path / "start.safetensors"
    export_single_file(sdxl, start, "sdxl")
    bare = tmp_path / "configs"
    shutil.copytree(sdxl, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    given = (*base("sdxl", start, shapes), *flags, f"--single_file_config={bare}")
    single = train(tmp_path / "single", *given)
    assert single.losses == whole.losses
    written = single.output / "base-start" / "single_file.json"
    before = written.stat().st_mtime_ns
    assert train(tmp_path / "single", *given, "--max_train_steps=2").losses[0] == single.losses[0]
    assert written.stat().st_mtime_ns == before, "converted once"
    finished = train(whole.output, *base("sdxl", sdxl, shapes), *flags, "--export_single_file").said
    assert "finished already" in finished and finished.count("writing") == 2, "only the two files"
    assert "one file" in " ".join(finished.split())
    unet = load_file(whole.output / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    exported = load_file(whole.output / "pipeline.safetensors")
    assert torch.equal(exported["model.diffusion_model.out.2.weight"], unet["conv_out.weight"])
    average = load_file(whole.output / "pipeline-ema.safetensors")
    assert average.keys() == exported.keys()


def test_one_file_is_opened_without_a_class(sdxl, shapes, train, tmp_path):
    export_single_file(sdxl, tmp_path / "start.safetensors", "sdxl")
    given = (*base("auto", tmp_path / "start.safetensors", shapes), f"--single_file_config={sdxl}")
    run = train(tmp_path / "auto", *given, "--train_batch_size=4", "--max_train_steps=1")
    assert len(run.losses) == 1 and (run.output / "pipeline" / "unet").is_dir()


def test_a_file_that_is_not_whole_is_refused_unless_the_folder_has_what_it_lacks(sdxl, tmp_path):
    file, bare = tmp_path / "model.safetensors", tmp_path / "configs"
    export_single_file(sdxl, file, "sdxl")
    shutil.copytree(sdxl, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(file)
    save_file({name: each for name, each in tensors.items() if "input_blocks.1." not in name}, file)
    with pytest.raises(EnvironmentNotReady, match="lacks weights that") as refused:
        convert(file, bare, tmp_path / "made", "unet")
    assert "single_file_config" in refused.value.hint
    save_file({name: each for name, each in tensors.items() if not name.startswith("first_stage")}, file)
    with pytest.raises(EnvironmentNotReady, match="together are no whole StableDiffusionXLPipeline"):
        convert(file, bare, tmp_path / "made", "unet")
    shutil.copytree(sdxl / "vae", bare / "vae", dirs_exist_ok=True)
    convert(file, bare, tmp_path / "made", "unet")
    for component in ("unet", "vae", "text_encoder_2"):
        [one], [other] = ((folder / component).glob("*.safetensors") for folder in (sdxl, tmp_path / "made"))
        ours, theirs = load_file(one), load_file(other)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def without_fused_projections(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return Z-Image's tensors under the names that its authors published them with."""
    names = {"all_final_layer.2-1.": "final_layer.", "all_x_embedder.2-1.": "x_embedder."}
    names |= {".attention.to_out.0.": ".attention.out.", ".norm_k.": ".k_norm.", ".norm_q.": ".q_norm."}
    original = {}
    for name, tensor in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if ".to_q." in name:
            parts = [state[name.replace(".to_q.", f".to_{part}.")] for part in "qkv"]
            original[name.replace(".to_q.", ".qkv.")] = torch.cat(parts)
        elif ".to_k." not in name and ".to_v." not in name:
            original[f"model.diffusion_model.{name}"] = tensor
    return {name if "diffusion_model" in name else f"model.diffusion_model.{name}": x for name, x in original.items()}


def unet_alone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    config = {"layers_per_block": 1, "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]}
    return {f"model.diffusion_model.{unet_name(name, config)}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("sdxl", unet_alone), ("z_image", without_fused_projections), ("qwen_image", dict), ("flux", dict)],
)
def test_a_denoiser_alone_takes_all_else_from_the_folder(family, layout, pipelines, tmp_path):
    folder = pipelines(family)
    name = family_class(Model(model_family=family)).denoiser_name
    state = {}
    for weights in (folder / name).glob("*.safetensors"):
        state |= load_file(weights)
    save_file({key: x.bfloat16().contiguous() for key, x in layout(state).items()}, tmp_path / "denoiser.safetensors")
    convert(tmp_path / "denoiser.safetensors", folder, tmp_path / "made", name)
    [made] = (tmp_path / "made" / name).glob("*.safetensors")
    converted = load_file(made)
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[key], state[key].bfloat16()) for key in state)
    for file in folder.glob("*/*"):
        if file.parent.name != name:
            assert (tmp_path / "made" / file.relative_to(folder)).read_bytes() == file.read_bytes()

    bare = tmp_path / "configs"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(
        EnvironmentNotReady, match=rf"holds a {name} alone, and .* has no weights of text_encoder, .*vae"
    ):
        convert(tmp_path / "denoiser.safetensors", bare, tmp_path / "none", name)
    save_file({"other.weight": torch.ones(2, 2)}, tmp_path / "denoiser.safetensors")
    with pytest.raises(EnvironmentNotReady, match=r"denoiser\.safetensors lacks weights"):
        convert(tmp_path / "denoiser.safetensors", folder, tmp_path / "none", name)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.ckpt", "is a pickle"),
        ("model.safetensors", "holds no configs and no tokenizers"),
    ],
)
def test_other_files_are_refused_before_more_than_a_header_is_read(name, said, tmp_path):
    (tmp_path / "model.ckpt").write_bytes(b"")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=said):
        check_single_file(Model(pretrained_model_name_or_path=str(tmp_path / name)))
    (tmp_path / "configs").mkdir()
    whole = Model(pretrained_model_name_or_path=str(tmp_path / "model.safetensors"), single_file_config=tmp_path)
    (tmp_path / "model_index.json").touch()
    for tensors, said in (
        ({"unet.to_q.lora_A.weight": torch.ones(2)}, "is a LoRA, not a model"),
        ({"lora_unet_mid_block.alpha": torch.ones(2)}, "is a LoRA, not a model"),
        ({"a": torch.ones(9).to(torch.float8_e4m3fn), "b": torch.ones(2)}, "holds F8_E4M3 weights"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(SettingsError, match=said):
            check_single_file(whole)
    for content in (b"", b"\xff" * 20):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(EnvironmentNotReady, match=r"model\.safetensors cannot be opened"):
            check_single_file(whole)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=r"has no model_index\.json"):
        model = {"single_file_config": tmp_path / "configs"}
        check_single_file(Model(pretrained_model_name_or_path=str(tmp_path / "model.safetensors"), **model))
    assert named_file(Model(pretrained_model_name_or_path="owner/name")) is None
    assert named_file(Model(pretrained_model_name_or_path="owner/model.ckpt")) is None, "an id on the hub"
    assert named_file(Model(pretrained_model_name_or_path=str(tmp_path / "gone.safetensors"))) is None
    assert named_file(Model(pretrained_model_name_or_path=str(tmp_path))) is None
