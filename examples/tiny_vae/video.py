"""The tiny VAE of clips: a causal one, first trained on images.

Shape letters: B batch, C channels, F frames, H and W height and width in pixels, or in latent cells after `encode`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan

CHANNELS = 8
FRAMES, SIDE = 4, 8  # of a latent cell; the first frame is a cell of its own
HE_NORMAL = 6**0.5  # torch's own initial weights are smaller by this


def build_video_vae() -> AutoencoderKLWan:
    """An untrained causal VAE: 8 latent channels, a quarter of the frames, an eighth of each side."""
    # Patches of 2x2 px, as Wan 2.2 has them: without them a step takes twice as long with as many weights.
    vae = AutoencoderKLWan(
        base_dim=16,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
    )
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.weight.data *= HE_NORMAL  # without, 250 steps reach twice the error
    torch.nn.init.constant_(vae.quant_conv.bias.data[CHANNELS:], -6.0)  # the log variance
    return vae


def inflate(vae: AutoencoderKLWan) -> None:
    """Let a VAE of single frames begin with clips: each frame by itself, and a cell has the mean of its frames."""
    for name, module in vae.named_modules():
        if not isinstance(module, torch.nn.Conv3d) or module.kernel_size[0] == 1:
            continue
        weight = module.weight.data
        if not name.endswith("time_conv"):
            weight[:, :, :-1] = 0  # of frames before, which were all padding
            continue
        one = torch.eye(weight.shape[1])[..., None, None]
        weight.zero_()
        module.bias.data.zero_()
        if module.stride[0] == 2:
            weight[:, :, 1] = weight[:, :, 2] = one / 2
        else:
            weight[:, :, 2] = one.repeat(2, 1, 1, 1)


def mean_colours(pixels_BCFHW: torch.Tensor) -> torch.Tensor:
    """The mean colour of each latent cell."""
    first = F.avg_pool3d(pixels_BCFHW[:, :, :1], (1, SIDE, SIDE))
    if pixels_BCFHW.shape[2] == 1:
        return first
    return torch.cat([first, F.avg_pool3d(pixels_BCFHW[:, :, 1:], (FRAMES, SIDE, SIDE))], dim=2)


@torch.no_grad()
def normalize_clips(vae: AutoencoderKLWan, pixels_BCFHW: torch.Tensor) -> None:
    """Set `latents_mean` and `latents_std` of each channel."""
    latents_BCFHW = torch.cat([vae.encode(part).latent_dist.mean for part in pixels_BCFHW.split(16)])
    std_C, mean_C = torch.std_mean(latents_BCFHW, dim=(0, 2, 3, 4))
    statistics = {"latents_mean": mean_C, "latents_std": std_C}
    vae.register_to_config(**{name: [round(value, 4) for value in of.tolist()] for name, of in statistics.items()})
