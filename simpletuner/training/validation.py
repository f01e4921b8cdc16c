"""Draw validation pictures with the model that trains, sharded or not: all ranks take part in every round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from simpletuner.models.family import ModelFamily, SamplingParams
from simpletuner.models.text_encoding import Conditioning
from simpletuner.models.vae import Vae
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.world import World
from simpletuner.preparation import Prepared
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.files import write_file
from simpletuner.training.ema import EMA
from simpletuner.training.state import TrainingState

VARIANTS = {"none": ("trained",), "ema_only": ("ema",), "comparison": ("trained", "ema")}
"""Which weights draw, by the setting ema_validation."""


@dataclass(frozen=True)
class Validator:
    """What every round draws with; `prompts` and `negative` are already embedded."""

    family: ModelFamily
    engine: Engine
    world: World
    vae: Vae
    average: EMA | None
    variants: tuple[str, ...]
    prompts: Sequence[tuple[str, Conditioning]]
    negative: Conditioning
    sampling: SamplingParams
    dtype: torch.dtype
    folder: Path

    def draw(self, step: int) -> Path | None:
        """Draw every prompt with every variant of the weights; return the grid's path on the first rank."""
        folder = self.folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for variant in self.variants:
            with self._weights(variant):
                for number, latents in self._rounds():
                    write_png(folder / f"{variant}-{number:02d}.png", picture(self.vae.decode(latents)))
        self.world.barrier()
        if not self.world.is_first:
            return None
        rows = [[folder / f"{variant}-{n:02d}.png" for n in range(len(self.prompts))] for variant in self.variants]
        path = self._grid(step)
        write_png(path, grid(rows, [prompt for prompt, _ in self.prompts], list(self.variants)))
        return path

    def has_drawn(self, step: int) -> bool:
        """Return whether the images of a step are complete: their grid is written last. Collective."""
        return bool(self.world.gather_texts("1" if self._grid(step).is_file() else "")[0])

    def _grid(self, step: int) -> Path:
        return self.folder / f"grid-{step:06d}.png"

    def _weights(self, variant: str) -> AbstractContextManager[None]:
        if variant == "ema" and self.average is not None:
            return self.average.in_place()
        return nullcontext()

    def _rounds(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's pictures. Every rank calls the model equally often: one that has no prompt left draws the
        last one again and throws it away, because the others need its shards."""
        count = len(self.prompts)
        for first in range(0, count, self.world.size):
            number = first + self.world.rank
            with evaluating(self.engine.module), torch.no_grad(), self.engine.inference():
                latents = self._latents(min(number, count - 1))
            if number < count:
                yield number, latents

    def _latents(self, number: int) -> Tensor:
        sampling = SamplingParams(
            self.sampling.size, self.sampling.steps, self.sampling.guidance, self.sampling.seed + number
        )
        positive, negative = (
            {name: self._placed(value) for name, value in conditioning.items()}
            for conditioning in (self.prompts[number][1], self.negative)
        )
        return self.family.sample(self.engine.module, self.vae, sampling, positive, negative)

    def _placed(self, value: Tensor) -> Tensor:
        """Return one prompt's tensor as a batch on the device; masks stay what they are."""
        return value[None].to(self.world.device, self.dtype if value.is_floating_point() else None)


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a while."""
    module.eval()
    try:
        yield
    finally:
        module.train()


def picture(pixels_1CHW: Tensor) -> Image.Image:
    """Return a picture from pixels in -1..1."""
    values = ((pixels_1CHW[0].permute(1, 2, 0).numpy() + 1) * 127.5).round().clip(0, 255)
    return Image.fromarray(values.astype(np.uint8))


def write_png(path: Path, image: Image.Image) -> None:
    """Write an image, atomically."""
    content = BytesIO()
    image.save(content, "PNG")
    write_file(path, content.getvalue())


def grid(rows: list[list[Path]], prompts: list[str], variants: list[str]) -> Image.Image:
    """Return the pictures side by side under their prompts, one row per variant, on white."""
    pictures = [[Image.open(path).convert("RGB") for path in row] for row in rows]
    scale = max(1, 192 // pictures[0][0].width)
    width, height = pictures[0][0].width * scale, pictures[0][0].height * scale
    gap, head = 8, 34
    sheet = Image.new("RGB", (gap + (width + gap) * len(prompts), head + (height + gap) * len(rows)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, prompt in enumerate(prompts):
        left = gap + column * (width + gap)
        pen.text(
            (left, 6), shortened(prompt, lambda text: pen.textlength(text, font=font), width), fill="black", font=font
        )
        for line, row in enumerate(pictures):
            place = (left, head + line * (height + gap))
            sheet.paste(row[column].resize((width, height), Image.Resampling.NEAREST if scale > 1 else None), place)
            if len(variants) > 1:
                pen.text((place[0] + 4, place[1] + 2), variants[line], fill="#888888", font=font)
    return sheet


def shortened(text: str, length: Callable[[str], float], width_px: float) -> str:
    """Return text cut to a width, with an ellipsis."""
    if length(text) <= width_px:
        return text
    while text and length(text + "…") > width_px:
        text = text[:-1]
    return text + "…"


def open_validator(session: Session, family: ModelFamily, state: TrainingState, prepared: Prepared) -> Validator | None:
    """Return what draws validation pictures, or None without prompts."""
    settings, validation = session.settings, session.settings.validation
    if not validation.validation_prompt:
        return None
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    steps, guidance = validation.validation_num_inference_steps, validation.validation_guidance
    negative = validation.validation_negative_prompt
    return Validator(
        family=family,
        engine=state.engine,
        world=session.world,
        vae=family.vae(session.world.device),
        average=state.average,
        variants=VARIANTS[validation.ema_validation] if state.average is not None else ("trained",),
        prompts=[(prompt, prepared.text.read(prompt)) for prompt in validation.validation_prompt],
        negative=prepared.text.read(negative) if negative else prepared.source.no_caption,
        sampling=SamplingParams(picture_size(settings), steps, guidance, seed),
        dtype=compute_dtype(settings),
        folder=settings.training.output_dir / "validation",
    )


def picture_size(settings: Settings) -> tuple[int, int]:
    """Return the validation pictures' (width, height) in px."""
    wish = settings.validation.validation_resolution
    if wish:
        width, _, height = wish.partition("x")
        return int(width), int(height or width)
    data = settings.data
    edge = data.resolution if data.resolution_type != "area" else (data.resolution * 1_000_000) ** 0.5
    side = max(1, round(edge / data.aspect_bucket_alignment)) * data.aspect_bucket_alignment
    return side, side
