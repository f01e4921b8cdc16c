from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from simpletuner.models.family.objectives import (
    Diffusion,
    FlowMatching,
    diffused,
    interpolated,
    logit_normal,
    min_snr_weights,
    per_sample,
    sample_losses,
    shifted,
    signal_to_noise,
    velocity,
)

CLEAN = torch.tensor([2.0, -4.0]).view(2, 1, 1, 1)
NOISE = torch.tensor([1.0, 0.5]).view(2, 1, 1, 1)


def close(got: torch.Tensor, wanted: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got.flatten(), torch.tensor(wanted), atol=atol, rtol=1e-6)


def random_latents(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(batch, 4, 8, 8, generator=generator) for _ in range(2))
    return latents, noise, torch.rand(batch, generator=generator)


def test_values_per_sample_multiply_along_the_batch():
    assert per_sample(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 4, 5)).shape == (2, 1, 1, 1)
    assert per_sample(torch.tensor([1.0, 2.0]), torch.zeros(2, 7)).shape == (2, 1)


def test_diffused_latents_by_hand():
    # a = 0.64: 0.8 * 2 + 0.6 * 1 = 2.2; a = 0.36: 0.6 * -4 + 0.8 * 0.5 = -2.0
    close(diffused(CLEAN, NOISE, torch.tensor([0.64, 0.36])), [2.2, -2.0])


def test_diffusion_keeps_latents_at_one_and_noise_at_zero():
    close(diffused(CLEAN, NOISE, torch.ones(2)), [2.0, -4.0])
    close(diffused(CLEAN, NOISE, torch.zeros(2)), [1.0, 0.5])


def test_velocity_by_hand():
    # a = 0.64: 0.8 * 1 - 0.6 * 2 = -0.4; a = 0.36: 0.6 * 0.5 - 0.8 * -4 = 3.5
    close(velocity(CLEAN, NOISE, torch.tensor([0.64, 0.36])), [-0.4, 3.5])


def test_signal_to_noise_by_hand():
    close(signal_to_noise(torch.tensor([0.5, 0.8, 0.0])), [1.0, 4.0, 0.0])


def test_min_snr_weights_for_epsilon_by_hand():
    snr = torch.tensor([10.0, 5.0, 0.1, 0.0])
    close(min_snr_weights(snr, 5.0, "epsilon"), [0.5, 1.0, 1.0, 1.0])


def test_min_snr_weights_for_v_by_hand():
    snr = torch.tensor([9.0, 4.0, 0.25, 0.0])
    close(min_snr_weights(snr, 5.0, "v_prediction"), [0.5, 0.8, 0.2, 0.0])


def test_logit_normal_is_the_sigmoid_of_the_normal_quantile():
    for u in (0.5, 0.1, 0.9, 0.001, 0.75):
        for scale in (1.0, 0.5, 2.0):
            wanted = 1 / (1 + math.exp(-scale * NormalDist().inv_cdf(u)))
            close(logit_normal(torch.tensor([u]), scale), [wanted], atol=1e-5)
    close(logit_normal(torch.tensor([0.8413447])), [1 / (1 + math.exp(-1))])


def test_logit_normal_is_finite_symmetric_and_rising_up_to_the_ends():
    u = torch.tensor([0.0, 1e-8, 0.2, 0.4, 0.6, 0.8, 1 - 1e-7])
    sigmas = logit_normal(u)
    assert sigmas.dtype == u.dtype
    assert bool(((sigmas > 0) & (sigmas < 1)).all())
    assert bool((sigmas.diff() >= 0).all())
    close(sigmas[2:6] + sigmas[2:6].flip(0), [1.0] * 4)


def test_shifted_by_hand():
    # 3 * 0.5 / (1 + 2 * 0.5) = 0.75; 3 * 0.25 / 1.5 = 0.5; the ends stay
    close(shifted(torch.tensor([0.5, 0.25, 0.0, 1.0]), 3.0), [0.75, 0.5, 0.0, 1.0])
    close(shifted(torch.tensor([0.3, 0.9]), 1.0), [0.3, 0.9])


def test_shift_is_that_of_the_scheduler_which_draws():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    unshifted = FlowMatchEulerDiscreteScheduler(shift=1.0)
    torch.testing.assert_close(shifted(unshifted.sigmas, 3.0), scheduler.sigmas, atol=1e-6, rtol=1e-6)


def test_interpolated_by_hand():
    # 0.75 * 2 + 0.25 * 1 = 1.75; 0.5 * -4 + 0.5 * 0.5 = -1.75
    close(interpolated(CLEAN, NOISE, torch.tensor([0.25, 0.5])), [1.75, -1.75])


def test_a_loss_is_each_sample_s_weighted_mean_in_float32():
    prediction = torch.tensor([[1.0, 3.0], [0.0, 4.0]]).view(2, 2, 1, 1).bfloat16()
    target = torch.zeros(2, 2, 1, 1)
    losses = sample_losses(prediction, target, torch.tensor([1.0, 0.5]))
    assert losses.dtype == torch.float32
    close(losses, [5.0, 4.0])


def test_a_masked_loss_is_the_mean_over_what_counts():
    prediction = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]] * 3)  # errors of cells: (1 + 9) / 2 and (4 + 16) / 2
    mask = torch.tensor([[1.0, 0.5], [0.0, 0.25], [0.0, 0.0]]).view(3, 1, 1, 2)
    losses = sample_losses(prediction, torch.zeros_like(prediction), torch.tensor([1.0, 3.0, 1.0]), mask)
    close(losses, [(5 + 0.5 * 10) / 1.5, 3 * 10, 0.0])


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_the_scheduler_brings_back_clean_latents_from_the_target(prediction, zero_terminal_snr):
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        clip_sample=False,
        rescale_betas_zero_snr=zero_terminal_snr,
    )
    scheduler.set_timesteps(1000)
    latents, noise, u = random_latents()
    if prediction == "v_prediction":
        u[0] = 1 - 1e-7  # the last timestep, where epsilon says nothing about the picture
    noised = Diffusion(scheduler.alphas_cumprod, prediction).add_noise(latents, noise, u)
    for row, t in enumerate(noised.timesteps.tolist()):
        step = scheduler.step(noised.target[row], t, noised.x_t[row])
        torch.testing.assert_close(step.pred_original_sample, latents[row], atol=2e-3, rtol=1e-3)


def test_noisy_latents_are_those_of_the_scheduler():
    scheduler = DDIMScheduler(beta_schedule="scaled_linear")
    latents, noise, u = random_latents()
    noised = Diffusion(scheduler.alphas_cumprod, "v_prediction").add_noise(latents, noise, u)
    torch.testing.assert_close(noised.x_t, scheduler.add_noise(latents, noise, noised.timesteps))
    torch.testing.assert_close(noised.target, scheduler.get_velocity(latents, noise, noised.timesteps))


def test_diffusion_timesteps_are_uniform_over_the_table():
    table = torch.linspace(0.99, 0.01, 10)
    u = torch.tensor([0.0, 0.0999, 0.1, 0.55, 0.999999, 1.0])
    latents = torch.zeros(6, 1, 2, 2)
    noised = Diffusion(table, "epsilon").add_noise(latents, torch.ones_like(latents), u)
    assert noised.timesteps.tolist() == [0, 0, 1, 5, 9, 9]
    assert noised.timesteps.dtype == torch.int64
    assert torch.equal(noised.target, torch.ones_like(latents))
    assert torch.equal(noised.weights, torch.ones(6))


@pytest.mark.parametrize(("prediction", "weights"), [("epsilon", [5 / 9, 1.0, 1.0]), ("v_prediction", [0.5, 0.5, 0.0])])
def test_diffusion_weighs_by_min_snr_on_request(prediction, weights):
    # a = 0.9, 0.5, 0: SNR = 9, 1, 0
    latents = torch.zeros(3, 1, 2, 2)
    objective = Diffusion(torch.tensor([0.9, 0.5, 0.0]), prediction, snr_gamma=5.0)
    close(objective.add_noise(latents, latents, torch.tensor([0.0, 0.4, 0.9])).weights, weights)


def test_flow_matching_brings_back_clean_latents_and_noise_from_the_target():
    latents, noise, u = random_latents()
    noised = FlowMatching().add_noise(latents, noise, u)
    s = noised.timesteps.view(-1, 1, 1, 1)
    torch.testing.assert_close(noised.x_t - s * noised.target, latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(noised.x_t + (1 - s) * noised.target, noise, atol=1e-5, rtol=1e-5)
    assert torch.equal(noised.weights, torch.ones(6))


def test_a_step_of_the_scheduler_that_draws_undoes_flow_matching():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=[0.6])
    latents, noise, _ = random_latents(1)
    sigma = scheduler.sigmas[:1]
    noisy = interpolated(latents, noise, sigma)
    step = scheduler.step(noise - latents, scheduler.timesteps[0], noisy)
    torch.testing.assert_close(step.prev_sample, latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scheduler.timesteps[:1] / 1000, sigma)


def test_flow_matching_noise_levels_by_hand():
    latents = torch.zeros(2, 1, 2, 2)
    u = torch.tensor([0.5, 0.8413447])
    close(FlowMatching(3.0, uniform=True).add_noise(latents, latents, torch.tensor([0.5, 0.25])).timesteps, [0.75, 0.5])
    one = 1 / (1 + math.exp(-1))
    close(FlowMatching(1.0).add_noise(latents, latents, u).timesteps, [0.5, one])
    close(FlowMatching(3.0).add_noise(latents, latents, u).timesteps, [0.75, 3 * one / (1 + 2 * one)])
    close(FlowMatching(1.0, sigmoid_scale=2.0).add_noise(latents, latents, u).timesteps, [0.5, 1 / (1 + math.exp(-2))])
