"""`simpletuner sample`: an image of a prompt, asked of a run that trains, or sampled here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from simpletuner.checkpoints.layout import EXPORTS, Checkpoint, list_checkpoints
from simpletuner.checkpoints.verification import Verification
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.support import unfit_shapes
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.folder.weights import weights_files
from simpletuner.models.opening.loading import load_family
from simpletuner.models.opening.lora_file import load_lora, lora_file
from simpletuner.models.opening.stored_weights import StoredTensors
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.sampled_prompts import Images, read_references
from simpletuner.report import Report
from simpletuner.runs.images import write_sample
from simpletuner.runs.settings_record import SAMPLED, recorded_settings
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape, parse_shapes
from simpletuner.system.files.locks import removed_lock
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.checkpoint_export import StoredWeights, find_checkpoint
from simpletuner.training.run_folder.resuming import check_fits
from simpletuner.training.validation.requested_samples import REFERENCE, check_references, planned, scaled
from simpletuner.training.validation.sample_requests import (
    IN_METADATA,
    SampleAnswer,
    SampleRequest,
    ask,
    read_answer,
    withdraw,
)
from simpletuner.training.validation.whole_denoiser import Read, build_denoiser, encode_pair, sample_pixels

LOOK_SECONDS = 0.2
NAMING = ".naming.lock"


@dataclass(frozen=True)
class SampleOptions:
    """Options of the command; what is None or empty is as in the run's validation."""

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = None
    size: str = ""
    steps: int | None = None
    guidance: float | None = None
    strength: float = 1.0
    weights: tuple[str, ...] = ("trained",)
    checkpoint: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    """The user's values of settings, as `recorded_settings` takes them."""
    images: tuple[Path, ...] = ()
    """Reference images."""
    keeps_aspect: bool = False
    """True for references in their own aspect, as `reference_loose`; else they are cropped to the size."""


def settings_of_run(output: Path, options: SampleOptions) -> Settings:
    return recorded_settings(output, options.named, "sample", SAMPLED)


def open_run_family(settings: Settings, options: SampleOptions, world: World) -> ModelFamily:
    family = load_family(settings, world, StopRequest().check, skips_checked=True)
    try:
        check_references(family, len(options.images))
    except ValueError as error:
        hint = "name it with --image, several with several" if not options.images else "give fewer --image, or none"
        raise SettingsError(str(error), hint) from None
    return family


def references_of(options: SampleOptions, request: SampleRequest, settings: Settings) -> Images:
    """Read the references as validation does. Raises SettingsError for what cannot be decoded."""
    shape = Shape(1, request.height, request.width)
    multiple = settings.data.aspect_bucket_alignment if options.keeps_aspect else None
    return read_references(options.images, multiple, shape)


def request_of(settings: Settings, family: ModelFamily, options: SampleOptions) -> SampleRequest:
    """Fill in what the options leave open. Raises SettingsError for what the model cannot sample."""
    validation = settings.validation
    shape = shape_of(settings, options.size)
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    negative = options.negative_prompt
    if options.strength != 1 and (not family.adapter or family.adapter.kind == "oft"):
        raise SettingsError("--strength is for a LoRA, and this run has none to scale", "leave it out")
    try:
        return SampleRequest(
            prompt=options.prompt,
            negative_prompt=validation.validation_negative_prompt if negative is None else negative,
            seed=seed if options.seed is None else options.seed,
            steps=options.steps or validation.validation_num_inference_steps,
            guidance=float(validation.validation_guidance if options.guidance is None else options.guidance),
            width=shape.width,
            height=shape.height,
            frames=shape.frames,
            fps=float(validation.framerate or family.frame_rate),
            strength=float(options.strength),
            weights=options.weights,  # pyright: ignore[reportArgumentType]
        )
    except ValueError as error:
        raise SettingsError(f"{str(error).splitlines()[1]}: {str(error).splitlines()[2].strip()}") from None


def shape_of(settings: Settings, size: str) -> Shape:
    """Return the shape that --size names, else the first of the run's validation, else its square."""
    validation = settings.validation
    try:
        shape = [*parse_shapes(size or validation.validation_resolution), settings.data.square][0]
    except ValueError as error:
        raise SettingsError(f"--size={size}: {error}", "write 1024, 1024x768, or 832x480@81 for a clip") from None
    if shape.frames == 1 and validation.validation_num_video_frames:
        shape = shape._replace(frames=validation.validation_num_video_frames)
    if mistakes := [*unfit_shapes("--size", str(shape), "validation_resolution", settings.model)]:
        raise SettingsError(mistakes=mistakes)
    return shape


def encode(
    family: ModelFamily, request: SampleRequest, device: torch.device, dtype: torch.dtype, references: Images = ()
) -> dict[str, Conditioning]:
    encoder = family.text_encoder(device, dtype)
    return encode_pair(family, encoder, request.prompt, request.negative_prompt, references)


def ask_run(output: Path, options: SampleOptions, report: Report, is_over: Callable[[], bool]) -> SampleAnswer | None:
    """Ask the run that trains in a folder, and wait for its answer; None where it ends without one.

    Prompts are encoded here, on the CPU: the run loads no text encoder beside its training. Raises
    SettingsError for what the run refuses.
    """
    settings = settings_of_run(output, options)
    with libraries_silenced(), joined_world({}, use_cpu=True) as world:
        family = open_run_family(settings, options, world)
        request = request_of(family.settings, family, options)
        family.prove_sampling(Shape(request.frames, request.height, request.width), len(options.images), world.device)
        references = references_of(options, request, family.settings)
        with report.phase("encoding the prompt"):
            tensors = encode(family, request, torch.device("cpu"), compute_dtype(family.settings), references)
    pixels = {str(number): torch.from_numpy(np.array(image)) for number, image in enumerate(references)}
    tensors |= {REFERENCE: pixels} if pixels else {}
    named = {f"{sign}.{name}": each.contiguous().clone() for sign, own in tensors.items() for name, each in own.items()}
    name = ask(output, safetensors.torch.save(named, {IN_METADATA: request.model_dump_json()}))
    try:
        with report.phase("waiting for the run's next step"):
            while (found := read_answer(output, name)) is None:
                if is_over():
                    return read_answer(output, name)
                time.sleep(LOOK_SECONDS)
    finally:
        withdraw(output, name)
    if found.refused:
        raise SettingsError(f"the run answers: {found.refused}", found.hint)
    return found


def sample_here(output: Path, options: SampleOptions, folder: Path, report: Report) -> list[Path]:
    """Sample by the weights in a run's folder, in this process; return the images.

    Raises SettingsError where there are no such weights, EnvironmentNotReady where they are damaged.
    """
    settings = settings_of_run(output, options)
    with libraries_silenced(), joined_world({}, settings.launch.use_cpu) as world, torch.no_grad():
        family = open_run_family(settings, options, world)
        request, device, dtype = (
            request_of(family.settings, family, options),
            world.device,
            compute_dtype(family.settings),
        )
        family.prove_sampling(Shape(request.frames, request.height, request.width), len(options.images), device)
        sources = {each: open_weights(output, options.checkpoint, each, family, world) for each in request.weights}
        with report.phase("encoding the prompt"):
            references = references_of(options, request, family.settings)
            image = planned(request, encode(family, request, device, dtype, references), references)
        vae, written = family.vae(device), list[Path]()
        folder.mkdir(parents=True, exist_ok=True)
        for weights, (step, read) in sources.items():
            with report.phase(f"sampling with the {weights} weights"):
                model = build_denoiser(family, read, device, dtype)
                with scaled(model, request.strength):
                    pixels, sound = sample_pixels(family, model, vae, image, device, dtype)
                del model  # before the next set of weights
            write = partial(write_sample, pixels=pixels, info=image.info(weights, step), sound=sound)
            written.append(write_new(folder, f"step-{step:06d}-{weights}-{request.seed}", write))
    return written


def write_new(folder: Path, stem: str, write: Callable[[Path], object]) -> Path:
    """Write under the first name that is free, which another command may look for at the same moment."""
    with removed_lock(folder / NAMING, partial(time.sleep, LOOK_SECONDS)):
        write(path := free_name(folder, stem))
    return path


def free_name(folder: Path, stem: str) -> Path:
    names = (f"{stem}{f'-{number}' if number else ''}.png" for number in range(10_000))
    return next(path for name in names if not (path := folder / name).exists())


def open_weights(
    output: Path, checkpoint: str, weights: str, family: ModelFamily, world: World
) -> tuple[int, Read | None]:
    """Return the step, and what reads trained weights by name: None for the base model's own.

    Of the checkpoint that is named, else the newest, else of what the run has exported.
    """
    if weights == "base":
        return 0, None
    if checkpoint or list_checkpoints(output / "checkpoints"):
        found = find_checkpoint(output, checkpoint)
        return int(found.step), verified(found, weights, family, world)
    exported = output / (EXPORTS[family.settings.model.model_type] + ("-ema" if weights == "ema" else ""))
    if not exported.is_dir():
        raise SettingsError(f"{output} has neither a checkpoint nor {exported.name}", "name a run that has trained")
    if family.adapter is None:
        return 0, StoredTensors(weights_files(exported / family.denoiser_name)).read
    tensors = {name: torch.zeros(shape) for name, shape in family.trained_shapes().items()}
    load_lora(lora_file(exported), family, tensors)
    return 0, tensors.__getitem__


def verified(checkpoint: Checkpoint, weights: str, family: ModelFamily, world: World) -> Read:
    if weights == "ema" and checkpoint.state["ema_updates"] is None:
        raise SettingsError(f"{checkpoint.folder} has no EMA", "leave --ema out")
    verification = Verification(checkpoint, world)
    check_fits(checkpoint, family, world, verification)
    verification.wait()
    return StoredWeights(checkpoint, family, "ema" if weights == "ema" else "model").read
