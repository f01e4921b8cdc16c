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
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function
from video_files import damage_sound, tone, write_film, write_video

from simpletuner.data.images.sounds import SoundFormat
from simpletuner.data.prefetch import FIRST_FRAME
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import load_preset
from simpletuner.models.families.ltxvideo2 import LTXVideo2
from simpletuner.models.tiny.build import build_preset
from simpletuner.settings.declared.sections import Data, Model, ObjectiveSettings, Settings

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

    # The same call with both, of a family that trains sound.
    both, of_image = with_sound(pipelines("ltxvideo2")), {"image": image, "image_crf": 0}
    arguments = both.pipeline_kwargs({}, {}, params) | of_image
    theirs = recorded_call(pipeline.transformer, lambda: pipeline(prompt=PROMPT, **arguments), 2)
    noised = family.unpack_latents(theirs["hidden_states"].clone(), CLIP.in_cells(family.cell))
    noised[:, :, 0] = 7
    streams = {"latents": noised, "sound": theirs["audio_hidden_states"]}
    ours = recorded_call(
        pipeline.transformer, lambda: both.predict_streams(pipeline.transformer, streams, times, conditioning)
    )
    assert ours.keys() == theirs.keys() and not ours["isolate_modalities"] and theirs["audio_hidden_states"].std() > 0.5
    for name, value in theirs.items():
        same(ours[name], value, name)


def with_sound(folder: Path, weight: float = 0.5) -> LTXVideo2:
    objective = ObjectiveSettings(sound_loss_weight=weight)
    return LTXVideo2.open(folder, Settings(model=Model(model_family="ltxvideo2"), objective=objective))


def expect_same_with_sound(family: LTXVideo2) -> None:
    """Compare all that the denoiser is given of a clip with sound, and of a second caption."""
    pipeline = diffusers_pipeline(family)
    arguments = family.pipeline_kwargs({}, {}, sampling(1.0, CLIP))
    theirs = recorded_call(pipeline.transformer, lambda: pipeline(prompt=PROMPT, **arguments), 2)
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    times = pipeline.scheduler.timesteps[1:2] / 1000
    noised = {
        "latents": family.unpack_latents(theirs["hidden_states"], CLIP.in_cells(family.cell)),
        "sound": theirs["audio_hidden_states"],
    }
    assert noised["sound"].shape[1:] == family.sound_shape(CLIP.frames) and noised["sound"].std() > 0.5
    ours = recorded_call(
        pipeline.transformer, lambda: family.predict_streams(pipeline.transformer, noised, times, conditioning)
    )
    assert ours.keys() == theirs.keys() and not ours["isolate_modalities"]
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-6, msg=name)
        else:
            assert ours[name] == value, name


def test_clips_with_sound_are_given_as_the_pipeline_gives_both(pipelines):
    expect_same_with_sound(with_sound(pipelines("ltxvideo2")))


def test_a_later_one_is_given_video_and_sound_as_its_pipeline_gives_them(later):
    expect_same_with_sound(with_sound(later))


def test_sampled_sound_is_that_of_the_pipeline(pipelines):
    family = with_sound(pipelines("ltxvideo2"))
    pipeline, params = diffusers_pipeline(family), sampling(4.0, CLIP)
    theirs = pipeline(prompt=PROMPT, **(family.pipeline_kwargs({}, {}, params) | {"output_type": "pt"}))[1]
    encoder = family.text_encoder(CPU, torch.float32)
    texts = encoder.encode([PROMPT]), family.unconditional(encoder.encode([""]))
    with torch.no_grad():
        _, sound = family.sample_with_sound(pipeline.transformer, family.vae(CPU), params, *texts)
    assert sound is not None and sound.rate == 16000 and float(theirs.std()) > 1e-3
    torch.testing.assert_close(torch.from_numpy(sound.waveform), theirs[0].float(), atol=1e-5, rtol=0)


def test_sound_is_encoded_by_the_spectrogram_of_the_published_encoder_and_comes_back_normalized(pipelines):
    family = with_sound(pipelines("ltxvideo2"))
    vae, generator = family.sound_vae(CPU), torch.Generator().manual_seed(0)
    assert vae.format == family.sound_format == SoundFormat(16000, 2, 24)
    wave = torch.randn(1, 2, vae.format.samples(17), generator=generator) / 4
    filters = mel_filter_bank(513, 8, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    settings = {"hop_length": 160, "power": 1.0, "mel_filters": filters, "mel_floor": 1e-5, "log_mel": "log"}
    theirs = spectrogram(wave[0, 1].numpy(), window_function(1024, "hann"), 1024, **settings)
    torch.testing.assert_close(vae.spectrogram(wave)[0, 1].T, torch.from_numpy(theirs).float(), atol=1e-4, rtol=1e-4)

    tokens, width = family.sound_shape(17)
    encoded = vae.encode(wave, tokens)
    assert encoded.shape == (1, tokens, width) == (1, 18, 4)
    # As LTX2Pipeline takes latents of sound: unpacked and as the VAE makes them.
    latents = vae.model.encode(vae.spectrogram(wave)).latent_dist.mode()[:, :, :tokens]
    pipeline = diffusers_pipeline(family)
    torch.testing.assert_close(encoded, pipeline.prepare_audio_latents(latents=latents), atol=1e-6, rtol=1e-6)
    # A token depends on no later sound, so encoding more than is kept changes nothing.
    wave[..., 4 * 160 * 10 :] = 0
    torch.testing.assert_close(vae.encode(wave, tokens)[:, :8], encoded[:, :8])


def test_all_weights_get_gradients_from_clips_with_sound(pipelines):
    family = with_sound(pipelines("ltxvideo2"))
    model, generator = diffusers_pipeline(family).transformer, torch.Generator().manual_seed(0)
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    noised = {"latents": torch.randn(1, 8, 9, 8, 12, generator=generator)}
    noised["sound"] = torch.randn(1, *family.sound_shape(17), generator=generator)
    predicted = family.predict_streams(model, noised, torch.full((1,), 0.5), conditioning)
    assert {name: each.shape for name, each in predicted.items()} == {name: each.shape for name, each in noised.items()}
    sum(each.square().mean() for each in predicted.values()).backward()
    without = {name for name, each in model.named_parameters() if each.grad is None}
    assert without == {name for name, each in family.denoiser().named_parameters() if not each.requires_grad} == set()


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


def test_clips_with_sound_train_resume_and_are_sampled_with_it_on_one_rank_and_two(pipelines, train, tmp_path):
    """Some begin with a given first frame, others do not, and some have no sound."""
    (films := tmp_path / "films").mkdir()
    (begun := tmp_path / "begun").mkdir()
    for number in range(3):
        write_film(films / f"tone {number}.mov", tone(200 + 100 * number, 1), frames=12)
        write_film(begun / f"tone {number}.mov", tone(500 + 100 * number, 1), frames=12)
    for number in range(2):
        write_video(films / f"silent {number}.mp4", frames=9, rate=24)
    entry = {"type": "local", "dataset_type": "video", "caption_strategy": "filename", "resolution": 64}
    own = {"id": "films", "instance_data_dir": str(films), "video": {"num_frames": 9}}
    given = {"id": "begun", "instance_data_dir": str(begun), "video": {"num_frames": 9, "is_i2v": True}}
    (tmp_path / "data.json").write_text(json.dumps([entry | own, entry | given]))
    flags = (
        *base("ltxvideo2", pipelines("ltxvideo2"), films)[:2],
        *("--tokenizer_max_length=24", "--aspect_bucket_alignment=32", "--sound_loss_weight=0.5", "--eval_split=0.3"),
        *(f"--data_backend_config={tmp_path / 'data.json'}", "--allow_dataset_oversubscription"),
        *(f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}"),
        *("--log_sample_losses", "--max_train_steps=4"),
    )
    sampled = ("--validation_prompt=tone 0", "--validation_num_inference_steps=2", "--validation_resolution=64x32@9")
    sampled += ("--validation_pairs=1",)
    whole = train(tmp_path / "whole", *flags, "--train_batch_size=2", *sampled)
    rows = [json.loads(line) for line in (whole.output / "sample_losses.jsonl").read_text().splitlines()]
    assert {row["bucket"] for row in rows} == {"64x64@9", "64x64@9+sound", "64x64@9+first_frame+sound"}
    for steps in (2, 4):
        halves = train(tmp_path / "halves", *flags, "--train_batch_size=2", f"--max_train_steps={steps}")
    assert halves.losses == whole.losses and len({*whole.losses}) == 4
    sharded = train(tmp_path / "sharded", *flags, "--train_batch_size=1", "--fsdp_enable", world=2)
    copies = train(tmp_path / "copies", *flags, "--train_batch_size=1", world=2)
    for ranks in (sharded, copies):
        assert ranks.losses == pytest.approx(whole.losses, rel=1e-5)

    measured = [json.loads(line) for line in (whole.output / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in measured if "eval_loss" in row]
    for row in measured:
        assert row["eval_loss"] == pytest.approx(row["eval_loss_video"] + 0.5 * row["eval_loss_sound"])
    assert measured[-1]["eval_loss_sound"] < measured[0]["eval_loss_sound"]
    drawn = whole.output / "validation" / "step-000004"
    assert (drawn / "reference-01.png").is_file()
    for name in ("trained-00.mp4", "trained-01.mp4"):  # the second goes on from a held-out first frame
        with av.open(drawn / name) as container:
            assert sum(each.samples for each in container.decode(audio=0)) / 16000 == pytest.approx(9 / 24, abs=0.07)

    from diffusers import LTX2Pipeline

    exported = LTX2ImageToVideoPipeline.from_pretrained(whole.output / "pipeline").transformer.state_dict()
    for name, each in LTX2Pipeline.from_pretrained(pipelines("ltxvideo2")).transformer.state_dict().items():
        assert not torch.equal(each, exported[name]), name
    again = (
        *flags,
        f"--pretrained_model_name_or_path={whole.output / 'pipeline'}",
        "--model_type=lora",
        "--lora_rank=4",
    )
    lora = train(tmp_path / "again", *again, "--max_train_steps=1")
    pipeline = LTX2Pipeline.from_pretrained(whole.output / "pipeline")
    pipeline.load_lora_weights(lora.output / "pipeline_lora_weights")
    assert any("audio_attn1" in name and ".lora_A." in name for name, _ in pipeline.transformer.named_parameters())


def test_films_with_damaged_sound_are_left_out_and_a_dataset_may_leave_sound_out(pipelines, train, tmp_path):
    (films := tmp_path / "films").mkdir()
    for number in range(2):
        write_film(films / f"tone {number}.mp4", tone(200, 1), frames=12, codec="aac")
    content = damage_sound(write_film(films / "damaged.mp4", tone(200, 1), frames=12, codec="aac")).read_bytes()
    (others := tmp_path / "others").mkdir()
    (others / "kept.mp4").write_bytes(content)
    entry = {"type": "local", "dataset_type": "video", "caption_strategy": "filename", "resolution": 64}
    own = {"id": "films", "instance_data_dir": str(films), "video": {"num_frames": 9}}
    other = {"id": "others", "instance_data_dir": str(others), "video": {"num_frames": 9, "sound": False}}
    (tmp_path / "data.json").write_text(json.dumps([entry | own, entry | other]))
    flags = (
        *base("ltxvideo2", pipelines("ltxvideo2"), films)[:2],
        *("--tokenizer_max_length=24", "--aspect_bucket_alignment=32", "--sound_loss_weight=1", "--max_train_steps=1"),
        *("--train_batch_size=1", f"--data_backend_config={tmp_path / 'data.json'}"),
    )
    said = train(tmp_path / "run", *flags).said
    assert "films/damaged.mp4: has a damaged sound track" in said
    assert "(64x64@9: 1, 64x64@9+sound: 2)" in said
    (tmp_path / "data.json").write_text(json.dumps([entry | other]))
    said = train(tmp_path / "silent", *flags, code=4).said
    assert "sound_loss_weight is set, and no clip of the datasets is known to have a sound track" in said
    (others / "kept.mp4").rename(others / "kept.txt")
    said = train(tmp_path / "empty", *flags, code=4).said
    assert "dataset `others`: no usable" in said and "sound_loss_weight" not in said, "what comes first is said"
