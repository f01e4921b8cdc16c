"""Generate validation images with the denoiser that trains, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from simpletuner.models.family import ModelFamily, SamplingParams
from simpletuner.models.lora import without_adapter
from simpletuner.models.text_encoding import Conditioning
from simpletuner.models.vae import Vae
from simpletuner.parallel.engine import Engine, compute_dtype, evaluation
from simpletuner.parallel.mesh import Mesh
from simpletuner.preparation import Prepared
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.settings.image_sizes import parse_sizes
from simpletuner.system.files import write_file
from simpletuner.training.ema import EMA, evaluated_variants, weights_of
from simpletuner.training.metrics import Metrics
from simpletuner.training.state import TrainingState

BASE = "base"
"""The base model without its LoRA, which comes before the others."""


@dataclass(frozen=True)
class Validator:
    """Generate one image per prompt, size and set of weights; `prompts` and `negative` are encoded already.

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
    sampling: Sequence[SamplingParams]
    """One for each size."""
    dtype: torch.dtype
    folder: Path
    metrics: Metrics | None
    """Where the grid is shown to a tracker; None on ranks that do not write."""
    interval: int
    title: str = "generating validation images"
    base_samples: list[tuple[str, Tensor]] = field(default_factory=list)
    """What the base model samples, which never changes, so it does so once."""

    @property
    def count(self) -> int:
        """How many images the next round samples."""
        variants = [variant for variant in self.variants if variant != BASE or not self.base_samples]
        return len(variants) * len(self.sampling) * len(self.prompts)

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        """Write every image, and on rank 0 a grid of them. Collective."""
        folder = self.folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for variant in self.variants:
            with self._weights(variant), self.vae.on(self.mesh.world.device):
                for name, latents_1CHW in self._samples_of(variant, advance):
                    write_png(folder / f"{variant}-{name}.png", to_image(self.vae.decode(latents_1CHW)))
        self.mesh.world.barrier()
        if self.mesh.world.is_first:
            write_png(self._grid(step), grid(self._rows(folder), [prompt for prompt, _ in self.prompts]))
            if self.metrics is not None:
                self.metrics.add_image(self._grid(step), step)

    def is_complete(self, step: int) -> bool:
        """Return whether the images of a step are all there: their grid is written last. Collective."""
        return bool(self.mesh.world.gather_texts("1" if self._grid(step).is_file() else "")[0])

    def _grid(self, step: int) -> Path:
        return self.folder / f"grid-{step:06d}.png"

    def _weights(self, variant: str) -> AbstractContextManager[None]:
        if variant == BASE:
            return without_adapter(self.engine.module)
        return weights_of(self.ema, variant)

    def _rows(self, folder: Path) -> dict[str, list[Path]]:
        """The images of a grid: one row for each set of weights and size, by its label."""
        return {
            " ".join([variant] * (len(self.variants) > 1) + [size_name(sampling)] * (len(self.sampling) > 1)): [
                folder / f"{variant}-{self._name(number, sampling)}.png" for number in range(len(self.prompts))
            ]
            for variant in self.variants
            for sampling in self.sampling
        }

    def _samples_of(self, variant: str, advance: Callable[[int], None]) -> Iterable[tuple[str, Tensor]]:
        if variant != BASE:
            return self._samples(advance)
        if not self.base_samples:
            self.base_samples.extend(self._samples(advance))
        return self.base_samples

    def _name(self, number: int, sampling: SamplingParams) -> str:
        """What tells images of one step and set of weights apart: by name, those of a prompt follow one another."""
        return f"{number:02d}" + (f"-{size_name(sampling)}" if len(self.sampling) > 1 else "")

    def _samples(self, advance: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, latents 1CHW) of this rank's images."""
        # Prompts are the inner loop: so ranks mostly work on images of one size, and wait little for one another.
        images = [(number, sampling) for sampling in self.sampling for number in range(len(self.prompts))]
        for first in range(0, len(images), self.mesh.data_size):
            index = first + self.mesh.data_rank
            # A rank without an image left repeats the last one: the others need its shards.
            number, sampling = images[min(index, len(images) - 1)]
            with evaluation(self.engine):
                latents = self._sample(number, sampling)
            if index < len(images) and self.mesh.cp_rank == 0:  # the others of its group have sampled the same
                yield self._name(number, sampling), latents
            advance(min(self.mesh.data_size, len(images) - first))

    def _sample(self, number: int, sampling: SamplingParams) -> Tensor:
        """Run the pipeline for one prompt. Each prompt has a seed of its own, whichever rank it falls to."""
        sampling = replace(sampling, seed=sampling.seed + number)
        positive, negative = (
            {name: self._as_batch(value) for name, value in conditioning.items()}
            for conditioning in (self.prompts[number][1], self.negative)
        )
        return self.family.sample(self.engine.module, self.vae, sampling, positive, negative)

    def _as_batch(self, value: Tensor) -> Tensor:
        """Return one prompt's tensor as a batch of one on the device; masks keep their dtype."""
        return value[None].to(self.mesh.world.device, self.dtype if value.is_floating_point() else None)


def size_name(sampling: SamplingParams) -> str:
    return "{}x{}".format(*sampling.size)


def to_image(pixels_1CHW: Tensor) -> Image.Image:
    """Convert pixels in [-1, 1] to an 8-bit image."""
    values = ((pixels_1CHW[0].permute(1, 2, 0).numpy() + 1) * 127.5).round().clip(0, 255)
    return Image.fromarray(values.astype(np.uint8))


def write_png(path: Path, image: Image.Image) -> None:
    content = BytesIO()
    image.save(content, "PNG")
    write_file(path, content.getvalue())


def grid(rows: dict[str, list[Path]], prompts: list[str]) -> Image.Image:
    """Lay out images under their prompts, on white; the images of a row have one size, and its label if it has one."""
    images = {label: [Image.open(path).convert("RGB") for path in row] for label, row in rows.items()}
    width = max(row[0].width for row in images.values())
    scale = max(1, 192 // width)
    width *= scale
    gap, head = 8, 34
    heights = [row[0].height * scale + gap for row in images.values()]
    sheet = Image.new("RGB", (gap + (width + gap) * len(prompts), head + sum(heights)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, prompt in enumerate(prompts):
        left = gap + column * (width + gap)
        pen.text(
            (left, 6), shortened(prompt, lambda text: pen.textlength(text, font=font), width), fill="black", font=font
        )
        for line, (label, row) in enumerate(images.items()):
            top, size = head + sum(heights[:line]), (row[column].width * scale, row[column].height * scale)
            sheet.paste(row[column].resize(size, Image.Resampling.NEAREST if scale > 1 else None), (left, top))
            pen.text((left + 4, top + 2), label, fill="#888888", font=font)
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
    variants = evaluated_variants(state.ema, validation)
    return Validator(
        family=family,
        engine=state.engine,
        mesh=session.mesh,
        vae=family.vae(torch.device("cpu")),  # on the GPU only while images are made
        ema=state.ema,
        variants=(BASE, *variants) if family.adapter else variants,
        prompts=[(prompt, prepared.prompts.read(prompt)) for prompt in validation.validation_prompt],
        negative=prepared.prompts.read(negative) if negative else prepared.reader.no_caption,
        sampling=[SamplingParams(size, steps, guidance, seed) for size in image_sizes(settings)],
        dtype=compute_dtype(settings),
        folder=settings.training.output_dir / "validation",
        metrics=metrics,
        interval=validation.validation_step_interval,
    )


def image_sizes(settings: Settings) -> list[tuple[int, int]]:
    """Return (width, height) in px: validation_resolution, or a square of the training resolution, aligned."""
    if settings.validation.validation_resolution:
        return parse_sizes(settings.validation.validation_resolution)
    data = settings.data
    edge = data.resolution if data.resolution_type != "area" else (data.resolution * 1_000_000) ** 0.5
    side = max(1, round(edge / data.aspect_bucket_alignment)) * data.aspect_bucket_alignment
    return [(side, side)]
