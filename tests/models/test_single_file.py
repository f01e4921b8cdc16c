"""Models in one file: written in the original layout, opened by diffusers, trained on, and refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from conftest import base
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from simpletuner.checkpoints.single_file import export_single_file
from simpletuner.errors import SettingsError
from simpletuner.models.original_layout import unet_name, vae_name
from simpletuner.models.single_file import check_single_file, named_file
from simpletuner.settings.sections import Model

UNET = {"layers_per_block": 2, "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]}


def test_names_are_those_of_published_files():
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


def test_what_is_written_opens_in_diffusers_with_equal_tensors_attention_of_the_vae_included(sdxl, tmp_path):
    from diffusers import AutoencoderKL, StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl)
    config = {**pipeline.vae.config, "mid_block_add_attention": True}
    pipeline.vae = AutoencoderKL.from_config(config)
    pipeline.unet.half()
    pipeline.save_pretrained(tmp_path / "whole")
    export_single_file(tmp_path / "whole", tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight" in names
    assert "first_stage_model.encoder.mid.attn_1.q.weight" in names
    for weights in (tmp_path / "whole").rglob("*.safetensors"):
        weights.unlink()
    again = StableDiffusionXLPipeline.from_single_file(
        str(tmp_path / "model.safetensors"), config=str(tmp_path / "whole"), local_files_only=True
    )
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        one, other = getattr(pipeline, name).state_dict(), getattr(again, name).state_dict()
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key].float(), other[key].float()) for key in one), name


def test_a_run_from_one_file_equals_one_from_the_folder_and_leaves_such_a_file(sdxl, shapes, train, tmp_path):
    flags = ("--train_batch_size=4", "--max_train_steps=1", "--use_ema")
    whole = train(tmp_path / "whole", *base("sdxl", sdxl, shapes), *flags, "--export_single_file")
    start = tmp_path / "start.safetensors"
    export_single_file(sdxl, start)
    bare = tmp_path / "configs"
    shutil.copytree(sdxl, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    given = (*base("sdxl", start, shapes), *flags, f"--single_file_config={bare}")
    single = train(tmp_path / "single", *given)
    assert single.losses == whole.losses
    written = single.output / "base-start" / "single_file.json"
    before = written.stat().st_mtime_ns
    assert train(tmp_path / "single", *given, "--max_train_steps=2").losses[0] == single.losses[0]
    assert written.stat().st_mtime_ns == before, "converted once"
    unet = load_file(whole.output / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    exported = load_file(whole.output / "pipeline.safetensors")
    assert torch.equal(exported["model.diffusion_model.out.2.weight"], unet["conv_out.weight"])
    average = load_file(whole.output / "pipeline-ema.safetensors")
    assert average.keys() == exported.keys()
    assert train(tmp_path / "single", *given, "--max_train_steps=2", "--export_single_file").said.count("writing") == 2

    tensors = load_file(start)
    save_file({name: each for name, each in tensors.items() if "input_blocks.1." not in name}, start)
    refused = train(tmp_path / "torn", *given, code=3).said
    assert "lacks weights that" in refused and "single_file_config" in refused
    save_file({name: each for name, each in tensors.items() if not name.startswith("first_stage")}, start)
    refused = train(tmp_path / "torn", *given, code=3).said
    assert "together are no whole StableDiffusionXLPipeline" in refused
    shutil.copytree(sdxl / "vae", bare / "vae", dirs_exist_ok=True)
    assert train(tmp_path / "vae", *given).losses == whole.losses


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.ckpt", "is a pickle"),
        ("model.safetensors", "holds no configs and no tokenizers"),
    ],
)
def test_other_files_are_refused_before_anything_is_read(name, said, tmp_path):
    for file in ("model.ckpt", "model.safetensors"):
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(SettingsError, match=said):
        check_single_file(Model(pretrained_model_name_or_path=str(tmp_path / name)))
    (tmp_path / "configs").mkdir()
    with pytest.raises(SettingsError, match=r"has no model_index\.json"):
        model = {"single_file_config": tmp_path / "configs"}
        check_single_file(Model(pretrained_model_name_or_path=str(tmp_path / "model.safetensors"), **model))
    assert named_file(Model(pretrained_model_name_or_path="owner/name")) is None
    assert named_file(Model(pretrained_model_name_or_path="owner/model.ckpt")) is None, "an id on the hub"
    assert named_file(Model(pretrained_model_name_or_path=str(tmp_path / "gone.safetensors"))) is None
    assert named_file(Model(pretrained_model_name_or_path=str(tmp_path))) is None
