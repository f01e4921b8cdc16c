from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.folder.diffusers_io import cast_inputs, component_class, text_folders
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.folder.weights import variant_of, weights_files


def folder_with(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def refusal(folder: Path, variant: str | None = None) -> EnvironmentNotReady:
    with pytest.raises(EnvironmentNotReady) as caught:
        weights_files(folder, variant)
    return caught.value


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("diffusion_pytorch_model-00001-of-00003.safetensors", None),
        ("diffusion_pytorch_model.fp16.safetensors", "fp16"),
        ("model.fp16-00001-of-00002.safetensors", "fp16"),
        ("diffusion_pytorch_model.non_ema.safetensors", "non_ema"),
    ],
)
def test_the_variant_is_read_from_the_file_name(name, variant):
    assert variant_of(Path("folder.with.dots") / name) == variant


def test_weights_are_those_of_the_variant_asked_for(tmp_path):
    folder_with(
        tmp_path,
        "model-00002-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        "model.fp16.safetensors",
        "config.json",
        "model.bin",
    )
    assert [path.name for path in weights_files(tmp_path)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert weights_files(tmp_path, "fp16") == [tmp_path / "model.fp16.safetensors"]


def test_a_variant_that_is_not_there_lists_the_ones_that_are(tmp_path):
    folder_with(tmp_path, "model.fp16.safetensors", "model.safetensors")
    error = refusal(tmp_path, "bf16")
    assert error.message == f"{tmp_path} holds no safetensors of variant bf16"
    assert error.hint == "found: fp16, no variant; set --variant"


def test_a_folder_of_nothing_but_a_variant_says_which(tmp_path):
    assert "found: fp16" in refusal(folder_with(tmp_path, "model.fp16.safetensors")).hint


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_a_pickle_is_refused_with_its_name_and_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    error = refusal(tmp_path)
    assert f"{tmp_path} holds {name}, a pickle" in error.message
    assert "safetensors" in error.hint
    assert not (tmp_path / "ran").exists()


def test_no_weights_at_all_is_said_even_of_a_missing_folder(tmp_path):
    assert refusal(folder_with(tmp_path, "config.json")).message == f"{tmp_path} holds no safetensors"
    error = refusal(tmp_path / "none")
    assert error.message == f"{tmp_path}/none holds no safetensors"
    assert "pretrained_model_name_or_path" in error.hint


def test_a_component_s_json_is_read_or_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(EnvironmentNotReady, match=f"cannot read {path}"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(EnvironmentNotReady, match=f"cannot read {path}"):
        read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_text_folders_are_the_tokenizers_and_text_encoders(tmp_path):
    for name in ("vae", "text_encoder_2", "tokenizer", "unet", "text_encoder", "tokenizer_2", "scheduler"):
        (tmp_path / name).mkdir()
    names = [path.name for path in text_folders(tmp_path)]
    assert names == ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"]


class Noting(nn.Module):
    def forward(self, sample, timestep, extra=None):
        return {
            "sample": sample.dtype,
            "timestep": timestep.dtype,
            **{name: value.dtype for name, value in (extra or {}).items()},
        }


def test_floating_inputs_are_cast_while_a_pipeline_samples_and_not_after():
    model = Noting()
    extra = {"text_embeds": torch.zeros(1), "time_ids": torch.zeros(1), "count": torch.zeros(1, dtype=torch.int64)}
    with cast_inputs(model, torch.bfloat16, except_for=("timestep", "time_ids")):
        seen = model(torch.zeros(1), timestep=torch.zeros(1), extra=extra)
    assert seen == {
        "sample": torch.bfloat16,
        "timestep": torch.float32,
        "text_embeds": torch.bfloat16,
        "time_ids": torch.float32,
        "count": torch.int64,
    }
    assert model(torch.zeros(1), timestep=torch.zeros(1))["sample"] == torch.float32


def test_only_classes_of_diffusers_and_transformers_are_components():
    index = {
        "text_encoder": ["kolors", "ChatGLMModel"],
        "vae": ["antigravity", "AutoencoderKL"],
        "unet": ["kolors", "X"],
    }
    assert component_class(index, "text_encoder", Path("base")).__module__ == "diffusers.pipelines.kolors.text_encoder"
    with pytest.raises(EnvironmentNotReady, match="takes vae from 'antigravity', which is not read"):
        component_class(index, "vae", Path("base"))
    assert "antigravity" not in sys.modules
    with pytest.raises(EnvironmentNotReady, match=r"diffusers [\d.]+ has no X"):
        component_class(index, "unet", Path("base"))


def test_a_denoiser_that_trains_no_lora_loads_and_predicts_without_peft(sdxl):
    script = "import sys, torch; from simpletuner.private_api.of_diffusers import leave_out\n"
    script += "leave_out(['peft', 'torchao', 'deepspeed'])\n"
    script += "from diffusers import UNet2DConditionModel; unet = UNet2DConditionModel.from_pretrained(sys.argv[1])\n"
    script += "text, size = torch.zeros(1, 77, unet.config.cross_attention_dim), torch.zeros(1, 6)\n"
    script += "pooled = unet.add_embedding.linear_1.in_features - 6 * unet.config.addition_time_embed_dim\n"
    script += "added = {'text_embeds': torch.zeros(1, pooled), 'time_ids': size}\n"
    script += "unet(torch.zeros(1, 4, 8, 8), 1, text, added_cond_kwargs=added)\n"
    script += "print([name for name in ('peft', 'torchao', 'deepspeed') if sys.modules[name] is not None])"
    run = [sys.executable, "-P", "-c", script, str(sdxl / "unet")]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "[]\n"
