"""Train a tiny VAE of the tiny pipelines, of images or of clips, on random scenes that it draws itself.

Shape letters: B batch, C channels, F frames, H and W height and width in pixels, or in latent cells after `encode`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import av
import numpy
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image
from scenes import Scenes, draw_scene
from video import build_video_vae, inflate, mean_colours, normalize_clips

SIDE_PX = 64
KL_WEIGHT = 5e-4
EDGE_WEIGHT = 0.25
COLOUR_WEIGHT = 1.0  # without it, and with a higher learning rate, the first thousand steps learn only grey


@dataclass
class Phase:
    """A part of the training: how many steps of what."""

    steps: int
    batch_size: int
    learning_rate: float
    scenes: Scenes


OF_IMAGES = [Phase(2500, 8, 5e-4, Scenes(SIDE_PX))]
# A frame costs as much in a clip as alone, but eight of nine show what the first does: so colours and edges are learned
# from images, and from small ones.
OF_CLIPS = [
    Phase(2000, 8, 2e-3, Scenes(32, most=4)),
    Phase(1200, 4, 1e-3, Scenes(32, frames=9, most=4)),
    Phase(1000, 4, 8e-4, Scenes(32, frames=9, most=2, spread=28)),
    Phase(400, 2, 1.2e-3, Scenes(SIDE_PX, frames=9, compact=True)),
]


def to_pixels(scenes: list[numpy.ndarray]) -> torch.Tensor:
    """Turn uint8 scenes of one size into pixels_BCFHW in -1..1."""
    return torch.from_numpy(numpy.stack(scenes)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def build_image_vae() -> AutoencoderKL:
    """An untrained VAE: 4 latent channels, a quarter of each side, no attention, and hardly any noise yet."""
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[16, 32, 48],
        norm_num_groups=2,
        latent_channels=4,
        sample_size=SIDE_PX,
        mid_block_add_attention=False,
    )
    torch.nn.init.constant_(vae.quant_conv.bias.data[4:], -6.0)  # the log variance; at 0, noise would drown the signal
    return vae


def without_grey(pixels: torch.Tensor) -> torch.Tensor:
    return pixels - pixels.mean(dim=1, keepdim=True)


def edges(pixels: torch.Tensor) -> list[torch.Tensor]:
    """Differences between neighbouring pixels, and between frames."""
    return [pixels.diff(dim=axis) for axis in range(2, pixels.ndim) if pixels.shape[axis] > 1]


def vae_loss(vae: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The mean absolute error of pixels, colours and edges, and a little KL divergence."""
    posterior = vae.encode(pixels).latent_dist
    decoded = vae.decode(posterior.sample()).sample
    colour_loss = F.l1_loss(without_grey(decoded), without_grey(pixels))
    edge_loss = sum(F.l1_loss(*pair) for pair in zip(edges(decoded), edges(pixels), strict=True))
    kl = posterior.kl().sum() / posterior.mean.numel()
    loss = F.l1_loss(decoded, pixels) + COLOUR_WEIGHT * colour_loss + EDGE_WEIGHT * edge_loss + KL_WEIGHT * kl
    if pixels.ndim == 5:  # a hint, with which 250 steps learn what they do not learn in 1,000 without it
        loss = loss + F.l1_loss(posterior.mean[:, :3], mean_colours(pixels))
    return loss


def train(vae: torch.nn.Module, phase: Phase, dice: random.Random) -> None:
    """Train in place; the learning rate rises over the first 5 % and falls to nothing."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=phase.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, phase.learning_rate, total_steps=phase.steps, pct_start=0.05
    )
    losses = []
    for step in range(1, phase.steps + 1):
        loss = vae_loss(vae, draw_pixels(vae, phase, phase.batch_size, dice))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}/{phase.steps}, mean loss {numpy.mean(losses[-100:]):.4f}", flush=True)


def draw_pixels(vae: torch.nn.Module, phase: Phase, count: int, dice: random.Random) -> torch.Tensor:
    """Draw scenes as the VAE takes them: pixels_BCHW of one of images, else pixels_BCFHW."""
    return as_taken(vae, to_pixels([draw_scene(dice, phase.scenes) for _ in range(count)]))


def as_taken(vae: torch.nn.Module, pixels_BCFHW: torch.Tensor) -> torch.Tensor:
    return pixels_BCFHW.squeeze(2) if isinstance(vae, AutoencoderKL) else pixels_BCFHW


@torch.no_grad()
def normalize_images(vae: AutoencoderKL, pixels_BCHW: torch.Tensor) -> None:
    """Centre the latents by moving their mean into the 1x1 convolutions, and set `scaling_factor` to 1 / std."""
    latents_BCHW = vae.encode(pixels_BCHW).latent_dist.mean
    mean_C = latents_BCHW.mean(dim=(0, 2, 3))
    vae.quant_conv.bias[: len(mean_C)] -= mean_C
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ mean_C
    std = (latents_BCHW - mean_C.view(1, -1, 1, 1)).square().mean().sqrt()
    vae.register_to_config(scaling_factor=round(1 / std.item(), 4), shift_factor=0.0)  # Flux pipelines need a number


def read_scenes(folder: Path) -> Iterator[numpy.ndarray]:
    """Yield the images and clips of a folder as uint8 frames x height x width x 3."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".png":
            yield numpy.asarray(Image.open(path).convert("RGB"))[None]
        elif path.suffix == ".mp4":
            with av.open(path) as container:
                yield numpy.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@torch.no_grad()
def evaluate(vae: torch.nn.Module, folder: Path) -> tuple[float, float]:
    """The mean absolute error in 0..255 and the mean PSNR in dB over the images or clips of a folder."""
    maes, psnrs = [], []
    for scene in read_scenes(folder):
        pixels = as_taken(vae, to_pixels([scene]))
        decoded = vae.decode(vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1)
        error = 127.5 * (decoded - pixels)
        maes.append(error.abs().mean().item())
        psnrs.append(10 * numpy.log10(255**2 / error.square().mean().item()))
    return float(numpy.mean(maes)), float(numpy.mean(psnrs))


def main() -> None:
    """Train, save in fp16, and print the reconstruction error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to save the VAE")
    parser.add_argument("scenes", type=Path, help="images, or clips, to evaluate on, from examples/shapes/draw.py")
    parser.add_argument("--video", action="store_true", help="a VAE of clips")
    parser.add_argument("--steps", type=int, help="of each phase")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    dice = random.Random(options.seed)
    vae = build_video_vae() if options.video else build_image_vae()
    phases = OF_CLIPS if options.video else OF_IMAGES
    for number, phase in enumerate(phases):
        if number == 1:
            inflate(vae)
        train(vae, phase if options.steps is None else replace(phase, steps=options.steps), dice)
    if options.video:
        normalize_clips(vae, draw_pixels(vae, phases[-1], 512, dice))
    else:
        normalize_images(vae, draw_pixels(vae, phases[-1], 512, dice))
    vae.half().save_pretrained(options.folder)
    mae, psnr = evaluate(type(vae).from_pretrained(options.folder), options.scenes)
    print(f"mean absolute error {mae:.2f} of 255, PSNR {psnr:.1f} dB")


if __name__ == "__main__":
    main()
