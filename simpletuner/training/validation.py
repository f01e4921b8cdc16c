"""Generate validation images with the denoiser that trains, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from simpletuner.parallel.mesh import Mesh
from simpletuner.preparation import Prepared
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.files import write_file
from simpletuner.training.ema import EMA
from simpletuner.training.metrics import Metrics
from simpletuner.training.state import TrainingState

VARIANTS = {"none": ("trained",), "ema_only": ("ema",), "comparison": ("trained", "ema")}
"""Sets of weights to generate with, by the setting ema_validation."""


@dataclass(frozen=True)
class Validator:
    """Generate one image per prompt and set of weights; `prompts` and `negative` are encoded already.

    Sharded weights are gathered by all ranks together, so every rank calls the denoiser equally often.
    """

    family: ModelFamily
    engine: Engine
    mesh: Mesh
    vae: Vae
    ema: EMA | None
    variants: tuple[str, ...]
    prompts: Sequence[tuple[str, Conditioning]]
    negative: Conditioning
    sampling: SamplingParams
    dtype: torch.dtype
    folder: Path
    metrics: Metrics | None
    """Where the grid is shown to a tracker; None on ranks that do not write."""

    def generate(self, step: int) -> None:
        """Write every image, and on rank 0 a grid of them. Collective."""
        folder = self.folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for variant in self.variants:
            with self._weights(variant):
                for number, latents_1CHW in self._samples():
                    write_png(folder / f"{variant}-{number:02d}.png", to_image(self.vae.decode(latents_1CHW)))
        self.mesh.world.barrier()
        if self.mesh.world.is_first:
            rows = [[folder / f"{variant}-{n:02d}.png" for n in range(len(self.prompts))] for variant in self.variants]
            write_png(self._grid(step), grid(rows, [prompt for prompt, _ in self.prompts], list(self.variants)))
            if self.metrics is not None:
                self.metrics.add_image(self._grid(step), step)

    def is_complete(self, step: int) -> bool:
        """Return whether the images of a step are all there: their grid is written last. Collective."""
        return bool(self.mesh.world.gather_texts("1" if self._grid(step).is_file() else "")[0])

    def _grid(self, step: int) -> Path:
        return self.folder / f"grid-{step:06d}.png"

    def _weights(self, variant: str) -> AbstractContextManager[None]:
        return self.ema.swapped_in() if variant == "ema" and self.ema is not None else nullcontext()

    def _samples(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the prompt, latents 1CHW) of this rank's prompts."""
        count = len(self.prompts)
        for first in range(0, count, self.mesh.data_size):
            number = first + self.mesh.data_rank
            with evaluating(self.engine.module), torch.no_grad(), self.engine.inference():
                # a rank without a prompt left repeats the last one: the others need its shards
                latents = self._sample(min(number, count - 1))
            if number < count:
                yield number, latents

    def _sample(self, number: int) -> Tensor:
        """Run the pipeline for one prompt. Each prompt has a seed of its own, whichever rank it falls to."""
        sampling = replace(self.sampling, seed=self.sampling.seed + number)
        positive, negative = (
            {name: self._as_batch(value) for name, value in conditioning.items()}
            for conditioning in (self.prompts[number][1], self.negative)
        )
        return self.family.sample(self.engine.module, self.vae, sampling, positive, negative)

    def _as_batch(self, value: Tensor) -> Tensor:
        """Return one prompt's tensor as a batch of one on the device; masks keep their dtype."""
        return value[None].to(self.mesh.world.device, self.dtype if value.is_floating_point() else None)


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the block."""
    module.eval()
    try:
        yield
    finally:
        module.train()


def to_image(pixels_1CHW: Tensor) -> Image.Image:
    """Convert pixels in [-1, 1] to an 8-bit image."""
    values = ((pixels_1CHW[0].permute(1, 2, 0).numpy() + 1) * 127.5).round().clip(0, 255)
    return Image.fromarray(values.astype(np.uint8))


def write_png(path: Path, image: Image.Image) -> None:
    content = BytesIO()
    image.save(content, "PNG")
    write_file(path, content.getvalue())


def grid(rows: list[list[Path]], prompts: list[str], variants: list[str]) -> Image.Image:
    """Lay out images under their prompts, one row per set of weights, on white."""
    images = [[Image.open(path).convert("RGB") for path in row] for row in rows]
    scale = max(1, 192 // images[0][0].width)
    width, height = images[0][0].width * scale, images[0][0].height * scale
    gap, head = 8, 34
    sheet = Image.new("RGB", (gap + (width + gap) * len(prompts), head + (height + gap) * len(rows)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, prompt in enumerate(prompts):
        left = gap + column * (width + gap)
        pen.text(
            (left, 6), shortened(prompt, lambda text: pen.textlength(text, font=font), width), fill="black", font=font
        )
        for line, row in enumerate(images):
            place = (left, head + line * (height + gap))
            sheet.paste(row[column].resize((width, height), Image.Resampling.NEAREST if scale > 1 else None), place)
            if len(variants) > 1:
                pen.text((place[0] + 4, place[1] + 2), variants[line], fill="#888888", font=font)
    return sheet


def shortened(text: str, length: Callable[[str], float], width_px: float) -> str:
    """Cut text to a width, with an ellipsis; `length` measures it in px."""
    if length(text) <= width_px:
        return text
    while text and length(text + "…") > width_px:
        text = text[:-1]
    return text + "…"


def open_validator(
    session: Session, family: ModelFamily, state: TrainingState, prepared: Prepared, metrics: Metrics | None
) -> Validator | None:
    """Build what generates validation images; None without prompts."""
    settings, validation = session.settings, session.settings.validation
    if not validation.validation_prompt:
        return None
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    steps, guidance = validation.validation_num_inference_steps, validation.validation_guidance
    negative = validation.validation_negative_prompt
    return Validator(
        family=family,
        engine=state.engine,
        mesh=session.mesh,
        vae=family.vae(session.world.device),
        ema=state.ema,
        variants=VARIANTS[validation.ema_validation] if state.ema is not None else ("trained",),
        prompts=[(prompt, prepared.text.read(prompt)) for prompt in validation.validation_prompt],
        negative=prepared.text.read(negative) if negative else prepared.reader.no_caption,
        sampling=SamplingParams(image_size(settings), steps, guidance, seed),
        dtype=compute_dtype(settings),
        folder=settings.training.output_dir / "validation",
        metrics=metrics,
    )


def image_size(settings: Settings) -> tuple[int, int]:
    """Return (width, height) in px: validation_resolution, or a square of the training resolution, aligned."""
    wanted = settings.validation.validation_resolution
    if wanted:
        width, _, height = wanted.partition("x")
        return int(width), int(height or width)
    data = settings.data
    edge = data.resolution if data.resolution_type != "area" else (data.resolution * 1_000_000) ** 0.5
    side = max(1, round(edge / data.aspect_bucket_alignment)) * data.aspect_bucket_alignment
    return side, side
