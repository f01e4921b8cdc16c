"""Train the tiny VAE that the tiny pipelines share, on random scenes that it draws itself: no images are needed.

Shape letters: B batch, C channels, H and W height and width in pixels, or in latent cells after `encode`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw

SIDE_PX = 64
BATCH_SIZE = 8
KL_WEIGHT = 5e-4
EDGE_WEIGHT = 0.25
COLOUR_WEIGHT = 1.0  # without it, and with a higher learning rate, the first thousand steps learn only grey
LEARNING_RATE = 5e-4


def random_colour(dice: random.Random) -> tuple[int, ...]:
    """Any colour; with a probability of a quarter, a light grey."""
    return (dice.randint(225, 255),) * 3 if dice.random() < 0.25 else tuple(dice.randint(0, 255) for _ in "RGB")


def draw_background(dice: random.Random) -> Image.Image:
    """A plain background or a slanted gradient between two colours, at twice the final size."""
    start = numpy.array(random_colour(dice))
    end = start if dice.random() < 0.5 else numpy.array(random_colour(dice))
    ramp = numpy.linspace(0, 1, 2 * SIDE_PX)
    slant = dice.random()
    mix = (slant * ramp[:, None] + (1 - slant) * ramp[None, :])[..., None]
    return Image.fromarray((start * (1 - mix) + end * mix).astype(numpy.uint8))


def draw_scene(dice: random.Random) -> numpy.ndarray:
    """One image of ellipses, polygons and lines in any colours, as uint8 height x width x 3."""
    image = draw_background(dice)
    brush = ImageDraw.Draw(image)
    for _ in range(dice.randint(1, 6)):
        points = [(dice.gauss(SIDE_PX, 40), dice.gauss(SIDE_PX, 40)) for _ in range(dice.randint(3, 5))]
        low, high = (tuple(pick(axis) for axis in zip(*points[:2], strict=True)) for pick in (min, max))
        colour = random_colour(dice)
        kind = dice.choice(["ellipse", "box", "polygon", "line"])
        if kind == "ellipse":
            brush.ellipse((low, high), fill=colour)
        elif kind == "box":
            brush.rectangle((low, high), fill=colour)
        elif kind == "polygon":
            brush.polygon(points, fill=colour)
        else:
            brush.line(points, fill=colour, width=dice.randint(2, 10))
    return numpy.asarray(image.resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX))


def to_pixels(images: list[numpy.ndarray]) -> torch.Tensor:
    """Turn uint8 images of one size into pixels_BCHW in -1..1."""
    return torch.from_numpy(numpy.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def build_vae() -> AutoencoderKL:
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


def without_grey(pixels_BCHW: torch.Tensor) -> torch.Tensor:
    return pixels_BCHW - pixels_BCHW.mean(dim=1, keepdim=True)


def edges(pixels_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences between neighbouring pixels, vertical and horizontal."""
    return pixels_BCHW.diff(dim=2), pixels_BCHW.diff(dim=3)


def vae_loss(vae: AutoencoderKL, pixels_BCHW: torch.Tensor) -> torch.Tensor:
    """The mean absolute error of pixels, colours and edges, and a little KL divergence."""
    posterior = vae.encode(pixels_BCHW).latent_dist
    decoded_BCHW = vae.decode(posterior.sample()).sample
    colour_loss = F.l1_loss(without_grey(decoded_BCHW), without_grey(pixels_BCHW))
    edge_loss = sum(F.l1_loss(*pair) for pair in zip(edges(decoded_BCHW), edges(pixels_BCHW), strict=True))
    kl = posterior.kl().sum() / posterior.mean.numel()
    pixel_loss = F.l1_loss(decoded_BCHW, pixels_BCHW)
    return pixel_loss + COLOUR_WEIGHT * colour_loss + EDGE_WEIGHT * edge_loss + KL_WEIGHT * kl


def train(vae: AutoencoderKL, steps: int, dice: random.Random) -> None:
    """Train in place; the learning rate rises over the first 5 % and falls to nothing."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    for step in range(1, steps + 1):
        loss = vae_loss(vae, to_pixels([draw_scene(dice) for _ in range(BATCH_SIZE)]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}/{steps}, loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def normalize(vae: AutoencoderKL, dice: random.Random) -> None:
    """Centre the latents by moving their mean into the 1x1 convolutions, and set `scaling_factor` to 1 / std."""
    latents_BCHW = vae.encode(to_pixels([draw_scene(dice) for _ in range(512)])).latent_dist.mean
    mean_C = latents_BCHW.mean(dim=(0, 2, 3))
    vae.quant_conv.bias[: len(mean_C)] -= mean_C
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ mean_C
    std = (latents_BCHW - mean_C.view(1, -1, 1, 1)).square().mean().sqrt()
    vae.register_to_config(scaling_factor=round(1 / std.item(), 4), shift_factor=0.0)  # Flux pipelines need a number


@torch.no_grad()
def evaluate(vae: AutoencoderKL, folder: Path) -> tuple[float, float]:
    """The mean absolute error in 0..255 and the mean PSNR in dB over the images of a folder."""
    maes, psnrs = [], []
    for path in sorted(folder.glob("*.png")):
        pixels_BCHW = to_pixels([numpy.asarray(Image.open(path).convert("RGB"))])
        decoded_BCHW = vae.decode(vae.encode(pixels_BCHW).latent_dist.mean).sample.clamp(-1, 1)
        error_BCHW = 127.5 * (decoded_BCHW - pixels_BCHW)
        maes.append(error_BCHW.abs().mean().item())
        psnrs.append(10 * numpy.log10(255**2 / error_BCHW.square().mean().item()))
    return float(numpy.mean(maes)), float(numpy.mean(psnrs))


def main() -> None:
    """Train, save in fp16, and print the reconstruction error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to save the VAE")
    parser.add_argument("pictures", type=Path, help="folder of images to evaluate on, from examples/shapes/draw.py")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    dice = random.Random(options.seed)
    vae = build_vae()
    train(vae, options.steps, dice)
    normalize(vae, dice)
    vae.half().save_pretrained(options.folder)
    mae, psnr = evaluate(AutoencoderKL.from_pretrained(options.folder), options.pictures)
    print(f"mean absolute error {mae:.2f} of 255, PSNR {psnr:.1f} dB")


if __name__ == "__main__":
    main()
