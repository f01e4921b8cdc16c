from __future__ import annotations

import json
from pathlib import Path

import av
import pytest
import torch
from conftest import base
from diffusers import LTX2ImageToVideoPipeline
from models import test_inputs
from models.test_image_to_video import clip_of, first_image
from models.test_inputs import CLIP, CPU, PROMPT, SHAPE, diffusers_pipeline, opened, recorded_call, same, sampling
from video_files import write_video

from simpletuner.data.prefetch import FIRST_FRAME
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import load_preset
from simpletuner.models.families.ltxvideo2 import LTXVideo2
from simpletuner.models.tiny.build import build_preset
from simpletuner.settings.declared.sections import Data, Model, Settings

ISOLATED = {"number": 4, "modality_scale": 3.0}
"""The pipeline then calls the denoiser twice in each step, the second time without attention to the other's tokens."""


OF_2_3 = {
    "transformer": {
        **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True),
        "use_prompt_embeddings": False,
        "perturbed_attn": True,
    },
    "connectors": {
        "per_modality_projections": True,
        "video_hidden_dim": 128,
        "audio_hidden_dim": 64,
        "proj_bias": True,
        "video_connector_attention_head_dim": 32,
        "video_gated_attn": True,
        "audio_gated_attn": True,
    },
}


OF_2_5 = OF_2_3 | {
    "transformer": OF_2_3["transformer"] | {"ff_bias": False, "use_keyframes_abs_pos_embedding": True},
}


@pytest.fixture(scope="module", params=[OF_2_3, OF_2_5], ids=["2.3", "2.5"])
def later(request, tmp_path_factory) -> Path:
    """Return a pipeline as that of 2.3 or 2.5, but for its text encoder: texts that the connectors project, gates,
    modulated cross-attention."""
    preset = load_preset("ltxvideo2")
    assert preset and preset.tiny
    folder = tmp_path_factory.mktemp("ltx")
    build_preset(preset.tiny, **request.param).save_pretrained(folder)
    return folder


def test_a_later_one_is_given_and_samples_what_its_pipeline_does(later):
    family = opened("ltxvideo2", later)
    test_inputs.expect_same_inputs(family, CLIP, **ISOLATED)
    test_inputs.expect_same_picture(family, SHAPE)
    assert family.conditioning_shapes()["audio_prompt_embeds"] == (1024, 64)
    used = {name for name, each in family.denoiser().named_parameters() if each.requires_grad}
    assert "prompt_adaln.linear.weight" in used and not any("audio" in name or "keyframes" in name for name in used)


@pytest.mark.parametrize("shape", [SHAPE, CLIP])
def test_the_denoiser_sees_what_the_pipeline_shows_it_where_it_isolates_the_video(shape, pipelines):
    test_inputs.expect_same_inputs(opened("ltxvideo2", pipelines("ltxvideo2")), shape, **ISOLATED)


def test_a_first_frame_is_given_as_the_pipeline_gives_it_where_it_isolates_the_video(pipelines):
    family, image = opened("ltxvideo2", pipelines("ltxvideo2")), first_image()
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(pipelines("ltxvideo2"))
    pipeline.set_progress_bar_config(disable=True)
    params = sampling(1.0, CLIP, (image,))
    # The image as it is: by default the pipeline compresses it first.
    arguments = family.pipeline_kwargs({}, {}, params) | {"image": image, "image_crf": 0, "modality_scale": 3.0}
    theirs = recorded_call(pipeline.transformer, lambda: pipeline(prompt=PROMPT, **arguments), ISOLATED["number"])

    noised = family.unpack_latents(theirs["hidden_states"].clone(), CLIP.in_cells(family.cell))
    noised[:, :, 0] = 7  # what stands there is replaced
    first = {FIRST_FRAME: family.vae(CPU).encode(clip_of(image))[:, :, :1]}
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT]) | first
    times = pipeline.scheduler.timesteps[1:2] / 1000
    ours = recorded_call(
        pipeline.transformer, lambda: family.predict(pipeline.transformer, noised, times, conditioning)
    )
    for name in theirs.keys() - set(family.unused_inputs):
        same(ours.get(name), theirs[name], name)
    assert (ours["timestep"] == 0).sum() == CLIP.in_cells(family.cell).area


def test_the_prediction_of_a_video_depends_on_no_audio(pipelines):
    family = opened("ltxvideo2", pipelines("ltxvideo2"))
    model = diffusers_pipeline(family).transformer
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    noised = torch.randn(1, 8, 9, 8, 12, generator=torch.Generator().manual_seed(0))

    def with_audio(_, args, kwargs):
        return args, kwargs | {name: torch.randn_like(kwargs[name]) for name in family.unused_inputs}

    with torch.no_grad():
        silent = family.predict(model, noised, torch.full((1,), 0.5), conditioning)
        hook = model.register_forward_pre_hook(with_audio, with_kwargs=True)
        assert torch.equal(family.predict(model, noised, torch.full((1,), 0.5), conditioning), silent)
        hook.remove()
        assert silent.std() > 0.1


def test_exactly_the_weights_of_the_video_get_gradients(pipelines):
    family = opened("ltxvideo2", pipelines("ltxvideo2"))
    model = diffusers_pipeline(family).transformer
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    noised = torch.randn(1, 8, 8, 12, generator=torch.Generator().manual_seed(0))
    family.predict(model, noised, torch.full((1,), 0.5), conditioning).square().mean().backward()
    moved = {name for name, each in model.named_parameters() if each.grad is not None}
    assert moved == {name for name, each in family.denoiser().named_parameters() if each.requires_grad}
    assert not any("audio" in name for name in moved) and len(moved) > 40


def test_texts_are_kept_behind_the_connectors(pipelines):
    family = opened("ltxvideo2", pipelines("ltxvideo2"))
    pipeline = diffusers_pipeline(family)
    ours = family.text_encoder(CPU, torch.float32).encode([PROMPT, "two blue stars on a hill"])
    embeds, mask, _, _ = pipeline.encode_prompt([PROMPT, "two blue stars on a hill"], do_classifier_free_guidance=False)
    with torch.no_grad():
        theirs = pipeline.connectors(embeds, mask, padding_side="left")
    assert family.max_length == 1024
    for name, value in zip(("prompt_embeds", "audio_prompt_embeds", "prompt_attention_mask"), theirs, strict=True):
        torch.testing.assert_close(ours[name], value)
    assert {name: (2, *shape) for name, shape in family.conditioning_shapes().items()} == {
        name: tuple(value.shape) for name, value in ours.items()
    }


def test_a_lora_is_loaded_by_the_pipeline(pipelines, shapes, train, tmp_path):
    from diffusers import LTX2Pipeline

    run = train(
        tmp_path / "run",
        *base("ltxvideo2", pipelines("ltxvideo2"), shapes),
        "--aspect_bucket_alignment=32",
        *("--model_type=lora", "--lora_rank=4", "--max_train_steps=1"),
    )
    pipeline = LTX2Pipeline.from_pretrained(pipelines("ltxvideo2"))
    pipeline.load_lora_weights(run.output / "pipeline_lora_weights")
    adapted = [name for name, _ in pipeline.transformer.named_parameters() if ".lora_A." in name]
    assert len(adapted) == 2 * 2 * 4 and not any("audio" in name for name in adapted)  # q, k, v, out of two attentions


def test_a_length_that_the_connectors_cannot_fill_is_refused(pipelines):
    settings = Settings(model=Model(model_family="ltxvideo2"), data=Data(tokenizer_max_length=100))
    with pytest.raises(SettingsError, match="tokenizer_max_length = 100: .* take multiples of 8 tokens") as refused:
        LTXVideo2.open(pipelines("ltxvideo2"), settings)
    assert refused.value.hint == "set tokenizer_max_length=96"


def test_clips_train_and_resume_alike_and_validation_generates_clips(pipelines, train, tmp_path):
    (videos := tmp_path / "videos").mkdir()
    for number in range(4):
        write_video(videos / f"disc {number}.mp4", frames=9)
    entry = {"id": "clips", "type": "local", "dataset_type": "video", "instance_data_dir": str(videos)}
    entry |= {"caption_strategy": "filename", "resolution": 64, "video": {"num_frames": 9}}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    flags = (
        *base("ltxvideo2", pipelines("ltxvideo2"), videos)[:2],
        *(
            "--tokenizer_max_length=24",
            "--aspect_bucket_alignment=32",
            f"--data_backend_config={tmp_path / 'data.json'}",
        ),
        *("--validation_prompt=disc 0", "--validation_num_inference_steps=2", "--validation_resolution=64x32"),
        *(f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}"),
    )
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=4")
    for steps in (2, 4):
        halves = train(tmp_path / "halves", *flags, f"--max_train_steps={steps}")
    assert halves.losses == whole.losses and len({*whole.losses}) == 4
    with av.open(whole.output / "validation" / "step-000004" / "trained-00.mp4") as container:
        assert len(list(container.decode(video=0))) == 9 and container.streams.video[0].average_rate == 24

    (tmp_path / "data.json").write_text(json.dumps([entry | {"video": {"num_frames": 9, "is_i2v": True}}]))
    given = ("--train_batch_size=3", "--eval_split=0.2", "--validation_pairs=1")
    continued = train(tmp_path / "i2v", *flags, "--max_train_steps=1", *given)
    files = {path.name for path in (continued.output / "validation" / "step-000001").iterdir()}
    assert {"reference-01.png", "trained-01.mp4"} <= files and continued.losses[0] != whole.losses[0]
