#!/usr/bin/env bash
# `add_noise` of diffusers gives bfloat16 latents no noise at all at the first two timesteps of Stable Diffusion.
#
# The cumulative alphas are rounded to the latents' type before they are taken from 1: 0.99915 and 0.9983 are 1 in
# bfloat16. The next four timesteps share one level, and 1000 timesteps have 192 levels. `get_velocity` rounds alike.
# Latents that come from a VAE in bfloat16 are of that type unless somebody makes them float32 first.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 numpy
HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2> "$folder/log" <<'PY' || { tail -20 "$folder/log"; exit 1; }
import diffusers
import torch
from diffusers import DDIMScheduler, DDPMScheduler

STEPS = torch.arange(1000)
found = {}
for kind in (DDPMScheduler, DDIMScheduler):
    scheduler = kind(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, num_train_timesteps=1000)
    for dtype in (torch.float32, torch.bfloat16):
        noise = torch.ones(1000, 1, dtype=dtype)
        added = scheduler.add_noise(torch.zeros_like(noise), noise, STEPS).flatten()
        velocity = scheduler.get_velocity(noise, torch.zeros_like(noise), STEPS).flatten()
        assert torch.equal(velocity, -added)
        found[kind.__name__, dtype] = [round(level, 4) for level in added[:7].tolist()], len(added.unique())
print(f"diffusers {diffusers.__version__}, torch {torch.__version__}: parts of noise at timesteps 0 to 6")
for (kind, dtype), (levels, count) in found.items():
    print(f"{kind} of {str(dtype)[6:]}: {levels}, {count} levels in all")
for kind in ("DDPMScheduler", "DDIMScheduler"):
    assert found[kind, torch.float32] == ([0.0292, 0.0413, 0.0506, 0.0585, 0.0655, 0.0718, 0.0777], 1000), found
    assert found[kind, torch.bfloat16] == ([0, 0, 0.0625, 0.0625, 0.0625, 0.0625, 0.0884], 192), found
PY
