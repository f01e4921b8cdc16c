"""Generate the validation images and clips of a round with the denoiser that trains, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from PIL.Image import Image
from torch import Tensor

from simpletuner.models.family.adapter import without_adapter
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.vae import Vae
from simpletuner.parallel.engine import Engine, compute_dtype, evaluation
from simpletuner.parallel.mesh import Mesh
from simpletuner.preparation.prepare import Prepared
from simpletuner.preparation.sampled_prompts import SampledPrompt
from simpletuner.runs.images import (
    REFERENCE,
    ImageInfo,
    copy_round,
    grid_file,
    require_video_writer,
    round_folder,
    round_folders,
    write_image,
    write_png,
    write_sample,
)
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.ema import EMA, evaluated_variants, weights_of
from simpletuner.training.metrics.metrics import Metrics
from simpletuner.training.validation.image_grid import Cell, grid

if TYPE_CHECKING:
    from simpletuner.data.images.sounds import Sound


@dataclass(frozen=True)
class PlannedImage:
    """An image of each round: its encoded prompts, and its sampling parameters."""

    prompt: SampledPrompt
    sampling: SamplingParams

    def info(self, variant: str, step: int) -> ImageInfo:
        params = self.sampling
        return ImageInfo(
            self.prompt.prompt.prompt,
            self.prompt.negative_prompt,
            params.seed,
            params.steps,
            params.guidance,
            params.shape.width,
            params.shape.height,
            step,
            variant,
            params.shape.frames,
            params.fps if params.shape.frames > 1 else 0.0,
            given=self.digest_of_references(),
        )

    def digest_of_references(self) -> str:
        """Return a hash of the images that it is made from; empty where there are none."""
        made = b"".join(repr(each.size).encode() + each.tobytes() for each in self.sampling.references)
        return xxhash.xxh3_128_hexdigest(made) if made else ""

    def digest(self, model: str) -> str:
        """Return a hash of all that a sample of a model that does not change depends on."""
        params = self.sampling
        made = xxhash.xxh3_128(
            repr((model, params.shape, params.steps, params.guidance, params.seed, params.fps)).encode()
        )
        for image in params.references:
            made.update(repr(image.size).encode() + image.tobytes())
        for conditioning in (self.prompt.positive, self.prompt.negative):
            for name, value in sorted(conditioning.items()):
                made.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                made.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return made.hexdigest()


def plan_images(settings: Settings, family: ModelFamily, sampled: Sequence[SampledPrompt]) -> list[PlannedImage]:
    """Return the images and clips of each round. Each prompt has its own seed, whichever rank samples it.

    Raises EnvironmentNotReady for clips where nothing can write them.
    """
    if any(each.shape.frames > 1 for each in sampled):
        require_video_writer()
    return [planned_image(settings, family, each) for each in sampled]


def planned_image(settings: Settings, family: ModelFamily, sampled: SampledPrompt) -> PlannedImage:
    validation, prompt = settings.validation, sampled.prompt
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    sampling = SamplingParams(
        shape=sampled.shape,
        steps=prompt.num_inference_steps or validation.validation_num_inference_steps,
        guidance=validation.validation_guidance if prompt.guidance is None else prompt.guidance,
        seed=seed + sampled.number if prompt.seed is None else prompt.seed,
        fps=validation.framerate or family.frame_rate,
        references=sampled.references,
    )
    return PlannedImage(sampled, sampling)


BASE = "base"
"""The base model without its LoRA, which comes before the others."""


@dataclass(frozen=True)
class Validator:
    """Generate the planned images with each set of weights.

    Sharded weights are gathered by all ranks together, so every rank calls the denoiser equally often.
    """

    family: ModelFamily
    engine: Engine
    mesh: Mesh
    vae: Vae
    ema: EMA | None
    variants: tuple[str, ...]
    images: Sequence[PlannedImage]
    dtype: torch.dtype
    folder: Path
    metrics: Metrics | None
    """Destination of the grid, for trackers; None on ranks that do not write."""
    interval: int
    base: str
    """Everything that images of the base model depend on, beside their own parameters."""
    starts_as_base: bool
    """Before the first step a LoRA changes nothing, unless it goes on from another one."""
    title: str = "generating validation images"

    def count(self, step: int) -> int:
        """Return the number of images to sample at a step. Collective."""
        return len(self._to_sample(step)) * len(self.images)

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        """Write every image, and on rank 0 a grid of them. Collective."""
        folder = round_folder(self.folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        for equal in self._to_sample(step):
            for planned, pixels, sound in self.pixels(equal[0], advance):
                for variant in equal:
                    path, info = self._path(folder, variant, planned), self._info(planned, variant, step)
                    write_sample(path, pixels, info, sound)
        self.mesh.world.barrier()
        if self.mesh.world.is_first:
            for _, path, image, info in self._references(step):
                write_image(path, image, info)
            write_png(self._grid(step), grid(self._columns(step)), {})
            if self.metrics is not None:
                self.metrics.add_image(self._grid(step), step)

    def pixels(
        self, variant: str, advance: Callable[[int], None]
    ) -> Iterator[tuple[PlannedImage, Tensor, Sound | None]]:
        """Yield this rank's images of a set of weights, decoded, with the sound of clips. Collective."""
        with self._weights(variant), self.vae.on(self.mesh.world.device):
            for planned, latents, sound in self._samples(advance):
                yield planned, self.vae.decode(latents), sound

    def is_complete(self, step: int) -> bool:
        """True if the grid of a step, which is written last, is there. Collective."""
        return bool(self.mesh.world.gather_texts("1" if self._grid(step).is_file() else "")[0])

    def _to_sample(self, step: int) -> list[list[str]]:
        """Return the sets of weights to sample with, equal ones together. Collective."""
        groups = [[variant] for variant in self.variants]
        if step == 0:  # an average begins as a copy of the weights
            groups = [[*self.variants]] if self.starts_as_base else [[*self.variants[:1]], [*self.variants[1:]]]
        if BASE in self.variants and self.mesh.world.gather_texts(self._copied_base(step))[0]:
            groups = [[each for each in group if each != BASE] for group in groups]
        return [group for group in groups if group]

    def _copied_base(self, step: int) -> str:
        """Copy the base model's images from another round, on rank 0; empty text where none has them.

        They never change, neither by training nor when the run is started again.
        """
        if not self.mesh.world.is_first:
            return ""
        wanted = {
            self._path(round_folder(self.folder, step), BASE, each): self._info(each, BASE, step)
            for each in self.images
        }
        return "1" if any(copy_round(wanted, each) for each in round_folders(self.folder)) else ""

    def _info(self, planned: PlannedImage, variant: str, step: int) -> ImageInfo:
        info = planned.info(variant, step)
        return replace(info, made_from=planned.digest(self.base)) if variant == BASE else info

    def _grid(self, step: int) -> Path:
        return grid_file(self.folder, step)

    def _path(self, folder: Path, variant: str, planned: PlannedImage) -> Path:
        return folder / f"{variant}-{planned.prompt.name}.png"

    def _references(self, step: int) -> Iterator[tuple[PlannedImage, Path, Image, ImageInfo]]:
        for planned in self.images:
            several = len(planned.sampling.references) > 1
            for place, image in enumerate(planned.sampling.references):
                name = f"{REFERENCE}-{planned.prompt.name}" + f"-{place}" * several
                info = replace(planned.info(REFERENCE, step), width=image.width, height=image.height, frames=1)
                yield planned, round_folder(self.folder, step) / f"{name}.png", image, info

    def _columns(self, step: int) -> list[list[Cell]]:
        """Return the images of each prompt below its references, those of each set of weights together."""
        columns: dict[int, list[Cell]] = {}
        for planned, path, _, info in self._references(step):
            columns.setdefault(planned.prompt.number, []).append((path, info))
        for variant in self.variants:
            for planned in self.images:
                path = self._path(round_folder(self.folder, step), variant, planned)
                columns.setdefault(planned.prompt.number, []).append((path, planned.info(variant, step)))
        return list(columns.values())

    def _weights(self, variant: str) -> AbstractContextManager[None]:
        if variant == BASE:
            return without_adapter(self.engine.module)
        return weights_of(self.ema, variant)

    def _samples(self, advance: Callable[[int], None]) -> Iterator[tuple[PlannedImage, Tensor, Sound | None]]:
        """Yield this rank's images with their latents (1CHW), clips with theirs (1CFHW) and their sound."""
        for images in group_by_denoiser_calls(self.images):
            for first in range(0, len(images), self.mesh.data_size):
                index = first + self.mesh.data_rank
                # A rank without an image left repeats the last one: the others need its shards.
                planned = images[min(index, len(images) - 1)]
                with evaluation(self.engine):
                    latents, sound = self._sample(planned)
                if index < len(images) and self.mesh.cp_rank == 0:  # the others of its group have sampled the same
                    yield planned, latents, sound
                advance(min(self.mesh.data_size, len(images) - first))

    def _sample(self, planned: PlannedImage) -> tuple[Tensor, Sound | None]:
        positive, negative = (
            {name: self._as_batch(value) for name, value in conditioning.items()}
            for conditioning in (planned.prompt.positive, planned.prompt.negative)
        )
        return self.family.sample_with_sound(self.engine.module, self.vae, planned.sampling, positive, negative)

    def _as_batch(self, value: Tensor) -> Tensor:
        """Return one prompt's tensor as a batch of one on the device; masks keep their dtype."""
        return value[None].to(self.mesh.world.device, self.dtype if value.is_floating_point() else None)


def group_by_denoiser_calls(images: Sequence[PlannedImage]) -> list[list[PlannedImage]]:
    """Group images that ranks may sample at the same time: their pipelines call the denoiser equally often.

    Many pipelines call it twice per step above some guidance; ranks that wait for shards would hang.
    """
    groups: dict[tuple[int, float], list[PlannedImage]] = {}
    for image in images:
        groups.setdefault((image.sampling.steps, image.sampling.guidance), []).append(image)
    # Prompts are the inner loop: ranks mostly work on images of one shape, and wait little.
    shapes = list(dict.fromkeys(image.sampling.shape for image in images))
    return [sorted(group, key=lambda image: shapes.index(image.sampling.shape)) for group in groups.values()]


def open_validator(
    session: Session, family: ModelFamily, state: TrainingState, prepared: Prepared, metrics: Metrics | None
) -> Validator:
    """Build what generates validation images."""
    settings, validation = session.settings, session.settings.validation
    variants = evaluated_variants(state.ema, validation)
    family.sampling_components(session.world.device, compute_dtype(settings))  # now, not between two steps
    return Validator(
        family=family,
        engine=state.engine,
        mesh=session.mesh,
        vae=family.vae(torch.device("cpu")),  # on the GPU only while images are made
        ema=state.ema,
        variants=(BASE, *variants) if family.adapter else variants,
        images=plan_images(settings, family, prepared.validation),
        dtype=compute_dtype(settings),
        base=f"{sorted(state.base_fingerprints.items())} {settings.model} {settings.lora} {compute_dtype(settings)}",
        starts_as_base=settings.lora.lora_init is None,
        folder=settings.training.output_dir / "validation",
        metrics=metrics,
        interval=validation.validation_step_interval,
    )
