from __future__ import annotations

import torch
from models.test_inputs import CPU, PROMPT, diffusers_pipeline, opened, recorded_call, sampling
from models.test_predictions import conditioning_of, rows, steps_of


def test_guidance_counts_from_one_as_in_other_families(pipelines):
    family = opened("z_image", pipelines("z_image"))
    pipeline, encoder = diffusers_pipeline(family), family.text_encoder(CPU, torch.float32)
    time, noisy, theirs = steps_of(family, pipeline, guidance=4.0)[0]
    with torch.no_grad():
        with_caption, without = (
            family.predict(pipeline.transformer, noisy, time, conditioning_of(family, rows(encoder.encode([caption]))))
            for caption in (PROMPT, "")
        )
    torch.testing.assert_close(without + 4.0 * (with_caption - without), theirs, atol=1e-5, rtol=1e-4)


def test_sampling_in_bf16_keeps_the_time_in_float32(pipelines):
    family = opened("z_image", pipelines("z_image"))
    denoiser = diffusers_pipeline(family).transformer
    text = family.text_encoder(CPU, torch.bfloat16).encode([PROMPT])

    def sample() -> None:
        family.sample(denoiser, family.vae(CPU), sampling(1.0), text, text)

    assert recorded_call(denoiser.t_embedder, sample)["t"].dtype == torch.float32
    assert recorded_call(denoiser.all_x_embedder["2-1"], sample)["input"].dtype == torch.bfloat16
