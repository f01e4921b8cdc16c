from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import base
from safetensors.torch import load_file, save_file

from simpletuner.models.family.base import family_class
from simpletuner.models.opening.completeness import check_complete
from simpletuner.settings.declared.sections import Data, Model, Settings
from simpletuner.training.publishing.usage import usage_code

WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"
TABLE = "pos_embed.pos_embed"
STEP = ("--max_train_steps=1", "--train_batch_size=2")


@pytest.mark.parametrize(("asked", "tokens"), [(None, 256), (20, 20)])
def test_the_longest_prompt_is_counted_in_t5_tokens_after_those_of_clip(asked, tokens, pipelines):
    from diffusers import DiffusionPipeline

    model = Model(model_family="sd3")
    settings = Settings(model=model, data=Data(tokenizer_max_length=asked))
    family = family_class(model).open(pipelines("sd3"), settings)
    ours = family.text_encoder(torch.device("cpu"), torch.float32).encode(["a red circle"])
    pipeline = DiffusionPipeline.from_pretrained(pipelines("sd3"))
    theirs, _, pooled, _ = pipeline.encode_prompt("a red circle", None, None, max_sequence_length=tokens)
    assert ours["prompt_embeds"].shape == (1, 77 + tokens, 64)
    torch.testing.assert_close(ours["prompt_embeds"], theirs)
    torch.testing.assert_close(ours["pooled_prompt_embeds"], pooled)


def test_without_t5_it_is_trained_as_diffusers_samples(pipelines, tmp_path):
    """As its documentation saves it for small cards: T5's tokens are zeros."""
    from diffusers import StableDiffusion3Pipeline

    absent = {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(pipelines("sd3"), **absent)
    pipeline.save_pretrained(tmp_path)
    model = Model(model_family="sd3", pretrained_model_name_or_path=str(tmp_path))
    family = family_class(model).open(tmp_path, Settings(model=model))
    check_complete(family)
    ours = family.text_encoder(torch.device("cpu"), torch.float32).encode(["a red circle", ""])
    theirs, _, pooled, _ = pipeline.encode_prompt(["a red circle", ""], None, None, do_classifier_free_guidance=False)
    torch.testing.assert_close(ours, {"prompt_embeds": theirs, "pooled_prompt_embeds": pooled})
    assert ours["prompt_embeds"].shape[1:] == family.conditioning_shapes()["prompt_embeds"]
    assert "text_encoder_3=None, tokenizer_3=None)" in usage_code(family, tmp_path, None)


def test_the_position_table_is_that_of_the_base_model_and_no_step_changes_it(pipelines, shapes, train, tmp_path):
    folder = shutil.copytree(pipelines("sd3"), tmp_path / "base")
    weights = load_file(folder / WEIGHTS)
    weights[TABLE] = weights[TABLE] + 1  # not what the class would compute
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    output = train(tmp_path / "run", *base("sd3", folder, shapes), *STEP).output
    trained = load_file(output / "pipeline" / WEIGHTS)
    assert torch.equal(trained[TABLE], weights[TABLE])
    assert not torch.equal(trained["proj_out.weight"], weights["proj_out.weight"])


def test_version_3_has_neither_normed_queries_nor_a_second_attention(pipelines, shapes, train, tmp_path):
    from diffusers import SD3Transformer2DModel

    folder = shutil.copytree(pipelines("sd3"), tmp_path / "base")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    older = SD3Transformer2DModel.from_config(config | {"qk_norm": None, "dual_attention_layers": []})
    older.save_pretrained(folder / "transformer")
    output = train(tmp_path / "run", *base("sd3", folder, shapes), *STEP).output
    names = set(load_file(output / "pipeline" / WEIGHTS))
    assert names == set(older.state_dict())
    assert not any("norm_q" in name or "attn2" in name for name in names)
