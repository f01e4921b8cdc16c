"""model_family=auto: any pipeline of diffusers that turns a prompt into an image, if it passes its proof.

No part of a pipeline's call is copied or guessed: each prediction, encoding and sample is a run of it
(`hooks.py`). What has to be known besides is studied and proven at every start.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.data.prefetch import FIRST_FRAME, named_references, references_in
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.automatic.components import (
    AutomaticVae,
    MetaCalls,
    denoiser_of,
    library_versions,
    load_shared,
    open_pipeline,
    pipeline_class_of,
    remember_encodings,
)
from simpletuner.models.automatic.findings import Check, Findings
from simpletuner.models.automatic.hooks import FRAMES, IMAGE, HookedPipeline, image_argument
from simpletuner.models.automatic.pipeline_run import PipelineRun, refused
from simpletuner.models.automatic.prediction import Denoise, Predictor, capture, encode_no_caption, guided_arguments
from simpletuner.models.automatic.proof import Proof
from simpletuner.models.automatic.study import Study
from simpletuner.models.automatic.text import LENGTHS, padded_records
from simpletuner.models.catalog.registry import presets
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import Objective, diffusion, flow_matching, samples_by_diffusion
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder, clean_texts
from simpletuner.models.folder.diffusers_io import cast_floating
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.parallel.engine import compute_dtype
from simpletuner.private_api.of_torch import FakeTensor
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

OTHER_SHAPE = "change validation_resolution, or validation_num_video_frames"
MOST_REFERENCES = 10
ANY_PIPELINE = "DiffusionPipeline"
SMALLEST = Shape(1, 64, 64)
"""Shape in px that is studied where no bucket is known."""


class AutomaticFamily(ModelFamily):
    """A pipeline without a class here: any for model_family=auto, else of the family's preset."""

    pipelines = (ANY_PIPELINE,)
    host_inputs = (LENGTHS,)

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.denoiser_name = self.denoiser_in(folder)
        super().__init__(folder, settings)
        self.max_length = settings.data.tokenizer_max_length
        self._found: Findings | None = None
        self.checks: list[Check] = []
        self.proven = frozenset[tuple[Shape, int]]()
        """Shapes in px and numbers of given images of which samples may be."""
        self._predictors: dict[torch.device, Predictor] = {}

    @classmethod
    def opens(cls, pipeline: DiffusionPipeline) -> bool:
        return ANY_PIPELINE in cls.pipelines or pipeline in cls.pipelines

    @classmethod
    def denoiser_in(cls, folder: Path) -> str:
        return denoiser_of(folder)

    @property
    def pipeline_class(self) -> Any:
        return pipeline_class_of(self.index)

    @property
    def pipeline_name(self) -> str:
        return self.pipeline_class.__name__

    def optional_encoders(self) -> tuple[str, ...]:
        optional = getattr(self.pipeline_class, "_optional_components", ())
        return tuple(name for name in optional if name.startswith("text_encoder"))

    def published_scheduler_config(self) -> dict[str, object]:
        # Blocks may make their own scheduler (FLUX.3), which the index names in an export.
        own = None if "scheduler" in self.index else getattr(self.pipeline_class, "default_scheduler", lambda: None)()
        if own is None:
            return super().published_scheduler_config()
        self.index["scheduler"] = ["diffusers", type(own).__name__]
        return dict(own.config)

    # Study and proof.

    @property
    def found(self) -> Findings:
        """Findings that were proven at the start of a run, or else are now."""
        if self._found is None:
            if not any(self.folder.rglob("*.safetensors")):  # a published model's configs alone (`plan`)
                raise EnvironmentNotReady(
                    f"{self.settings.model.model_family} trains by its pipeline's call, which only its weights show",
                    "name a folder with them: pretrained_model_name_or_path; a run's start downloads them",
                )
            smallest, cpu = self.smallest_sample(), torch.device("cpu")
            try:
                self.prove([smallest], cpu, any_size=True)
            except SettingsError:
                if smallest.is_given or self.image_parameter is None:
                    raise
                # Its call needs an image (LTXImageToVideoPipeline).
                self.prove([self.sample_with_image()], cpu, any_size=True)
        assert self._found is not None
        return self._found

    def smallest_sample(self) -> SampleShape:
        """Return what is studied where no data are known, with the image that the call requires, if any."""
        is_given = self.image_to_video == "always" or self.least_references
        return self.sample_with_image() if is_given else SampleShape(SMALLEST)

    def sample_with_image(self, references: int = 1) -> SampleShape:
        """Return the smallest clip with its first frame, or the smallest image with references."""
        if self.image_to_video == "never":
            return SampleShape(SMALLEST, (SMALLEST,) * references)
        return SampleShape(SMALLEST._replace(frames=1 + self.cell.frames), (), True)

    def prove_sampling(self, shape: Shape, references: int, device: torch.device) -> None:
        frames = 1 + self.cell.frames if shape.frames > 1 else 1
        alone = SampleShape(SMALLEST._replace(frames=frames))
        with torch.enable_grad():  # the proof compares gradients, and samples are made without
            self.prove([self.sample_with_image(references) if references else alone], device, [shape], any_size=True)

    def prove(
        self,
        shapes: Sequence[Shape | SampleShape],
        device: torch.device,
        sampled: Sequence[Shape] = (),
        any_size: bool = False,
    ) -> None:
        """Study the pipeline at the smallest of these shapes in px, and prove what was found; `sampled` are
        others. With `any_size` references get the size to which the call brings them (Qwen-Image-Edit).

        Raises SettingsError where it cannot be trained, or does not keep to one of the shapes.
        """
        samples = [each if isinstance(each, SampleShape) else SampleShape(each) for each in shapes]
        if self.settings.data.reference_dropout_probability:
            samples += [SampleShape(each.target) for each in samples if each.references]
        (first, *others), settings = smallest_of(samples), self.settings
        vae = AutomaticVae(self, device, lambda model: None)
        remember_encodings(vae.model)
        hooked = open_pipeline(self, device, compute_dtype(settings), vae.model)
        self.frame_rate = hooked.frame_rate
        module = load_shared(self, device).requires_grad_(False)
        longest = {} if self.max_length is None else {"max_sequence_length": self.max_length}
        self.checks = []
        study = Study(hooked, module, first.target, settings.objective.flux_guidance_value, longest, self.checks)
        study.reads_images = self.reads_references
        if any_size and first.references:
            samples = [first := study.at_own_size(first)]
        study = study.given_images(first)
        found = study.find()
        vae.predictor = Predictor(hooked, found)
        proof = Proof(study, found, vae)
        found = proof.prove()
        for each in others:
            found = Proof(replace(study, shape=each.target).given_images(each), found, vae).confirm()
        self._predictors.clear()
        in_training = open_pipeline(self, device, None, None)
        proof.check_training(Predictor(in_training, found))
        module.requires_grad_(True)
        unused, zeros = proof.without_gradient(lambda: module.named_parameters(remove_duplicate=False))
        for each in samples:
            if why := study.given_images(each).shape_error(each.target, found):
                raise study.refused(why)
        for shape in sampled:
            if why := study.shape_error(shape, found):
                raise SettingsError(f"{study.name} does not sample {shape} px: {why}", OTHER_SHAPE)
        names = ("clips" if each.target.frames > 1 else "images" for each in (first, *others))
        kinds = " and ".join(dict.fromkeys(names))
        kinds = f", proven on {kinds}" if found.layout.frames is not None else ""
        self._found = replace(found, unused=unused, zero_gradients=zeros, kinds=kinds)
        self._keep_predictor(device, in_training)
        counts = {len(each.references) + each.has_first_frame for each in samples}
        self.proven = frozenset(product({*(each.target for each in samples), *sampled}, counts))
        for name in ("meta_denoiser", "adapter"):  # which weights are trained is known only now
            self.__dict__.pop(name, None)

    def check_proven(self, shape: Shape, references: int) -> None:
        if (shape, references) not in self.proven:
            known = sorted(str(own) for own, count in self.proven if count == references)
            given = f"from {count_noun(references, 'image')} " if references else ""
            proven = ", ".join(known) or "another number of images"
            raise ValueError(f"{shape} px {given}was not proven at the start, but {proven}: name a checkpoint")

    def facts(self) -> Mapping[str, str]:
        """Results of the proof, for the summary, the model card and checkpoints."""
        found = self.found
        versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
        calls = f"one call for each sample, since {found.unbatched}" if found.unbatched else "one call for all samples"
        if found.joins:
            calls = "one call for all samples of one shape"
        guided = f"without guidance, since {found.unguided}" if found.unguided else "with guidance"
        images = found.images
        given = {} if images is None else {"given": f"{images.kind} by {', '.join(images.inputs)}"}
        return {
            **super().facts(),
            "pipeline": f"{self.pipeline_class.__name__} by its own call, proven with {versions}",
            **given,
            "found": f"{found.schedule.objective}, {calls}, sampled {guided}{found.kinds}",
        }

    @property
    def cache_facts(self) -> Mapping[str, str]:
        # Without the second, latents that were cached before components had their classes would be taken.
        return {"pipeline": self.pipeline_class.__name__, "components": "with their classes", **library_versions()}

    def predictor(self, device: torch.device) -> Predictor:
        """Predictor on a device, without text encoders and VAE."""
        if device not in self._predictors:
            self._keep_predictor(device, open_pipeline(self, device, None, None))
        return self._predictors[device]

    def _keep_predictor(self, device: torch.device, hooked: HookedPipeline) -> None:
        hooked.remember_images()
        self._predictors[device] = Predictor(hooked, self.found)

    @cached_property
    def meta_calls(self) -> MetaCalls:
        return MetaCalls(self.predictor(torch.device("cpu")))

    # What a family defines.

    def objective(self) -> Objective:
        return diffusion(self) if samples_by_diffusion(self.scheduler()) else flow_matching(self)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return AutomaticTextEncoder(self, device, dtype)

    def vae(self, device: torch.device) -> AutomaticVae:
        cpu = torch.device("cpu")
        return AutomaticVae(self, device, lambda model: Predictor(open_pipeline(self, cpu, None, model), self.found))

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode captions one by one, as `encode_prompt` does; the empty one as a negative prompt."""
        return padded_records([self.encode_caption(pipeline, caption) for caption in captions])

    def encode_edits(
        self, pipeline: DiffusionPipeline, captions: list[str], references: Sequence[Image]
    ) -> Conditioning:
        (caption,) = captions
        return self.encode_caption(pipeline, caption, references)

    def encode_caption(self, hooked: Any, caption: str, images: Sequence[Image] = ()) -> Conditioning:
        found, name = self.found, self.pipeline_class.__name__
        if found.images is not None and not images:
            images = [PIL.Image.new("RGB", each.size) for each in found.images.sizes(found.shape)]
        if caption or found.guidance is None or not found.guidance.negative:
            given = image_argument(images)
            return found.text.record(hooked.encode([caption], found.shape, **found.arguments, **given), name)
        return found.text.record_of(encode_no_caption(hooked, found.guidance, found.shape, found, images))

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        if noised_BCHW.is_meta or isinstance(noised_BCHW, FakeTensor):
            return self.meta_calls.predict(model, noised_BCHW, conditioning, images_in(conditioning))
        predictor, denoise = self.predictor(noised_BCHW.device), self.denoise(model, noised_BCHW.dtype)
        return predictor.predict(denoise, noised_BCHW.float(), timesteps_B, conditioning, images_in(conditioning))

    def denoise(self, model: nn.Module, dtype: torch.dtype) -> Denoise:
        # The pipeline itself stays in float32.
        kept = self.found.float32_inputs
        return lambda given: model(**cast_floating(given, dtype, kept))

    def unused_parameters(self) -> tuple[str, ...]:
        return self._found.unused if self._found is not None else ()

    def zero_gradients(self) -> tuple[str, ...]:
        return self.found.zero_gradients

    # What it overrides.

    @cached_property
    def sequence_plan(self) -> SequencePlan | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Split of the class of such pipelines, if there is one: its denoiser is given the same."""
        name = self.pipeline_name
        key = next((key for key, each in presets().items() if each.has_class and name in each.pipelines), None)
        return family_class(Model(model_family=key)).sequence_plan if key else None

    @cached_property
    def image_parameter(self) -> inspect.Parameter | None:
        return inspect.signature(self.pipeline_class.__call__).parameters.get(IMAGE)

    @property
    def makes_clips(self) -> bool:
        return not {*FRAMES}.isdisjoint(inspect.signature(self.pipeline_class.__call__).parameters)

    @property
    def image_to_video(self) -> Literal["never", "optional", "always"]:
        if self.image_parameter is None or not self.makes_clips:
            return "never"
        return "always" if self.image_parameter.default is inspect.Parameter.empty else "optional"

    @property
    def most_references(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        # The proof refuses those that the call does not take.
        return MOST_REFERENCES if self.image_parameter is not None and not self.makes_clips else 0

    @property
    def least_references(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        # The proof refuses samples without an image that must have one.
        has_default = self.image_parameter is None or self.image_parameter.default is not inspect.Parameter.empty
        return 0 if has_default or self.makes_clips else 1

    @property
    def reads_references(self) -> bool:
        if self.image_parameter is None:
            return False
        given = inspect.signature(self.pipeline_class.encode_prompt).parameters
        return IMAGE in given or any(self.index.get("image_encoder") or ())

    @property
    def encodes_first_frame(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.image_to_video == "never" or self.found.images is None:
            return False
        return self.found.images.frames > 1 or self.found.images.is_alone

    @property
    def encodes_frame_alone(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.encodes_first_frame and self.found.images is not None and self.found.images.is_alone

    def first_latent_frame(self, latents_CFHW: Tensor) -> Tensor:
        return self.found.layout.first_frame(latents_CFHW)

    @property
    def skips_first_frame(self) -> bool:
        return self.found.images is not None and self.found.images.replaces_noise

    @property
    def has_any_text_length(self) -> bool:
        return self.found.text.has_any_length

    def mu(self, shape: Shape, config: Mapping[str, object]) -> float:
        """Return the shift that the pipeline itself computes, by a shape in latent cells."""
        predictor, layout = self.predictor(torch.device("cpu")), self.found.layout
        text = self.found.text.example(torch.device("cpu"))
        run = PipelineRun(text=text, time=torch.zeros(1), denoise=predictor.blank)
        px = layout.in_px(layout.axes(shape))
        predictor.hooked.run(run, ["x"], px, **predictor.arguments(px))
        if run.mu is None:
            raise refused(self.pipeline_class.__name__, "it gives no shift to a scheduler that has none of its own")
        return run.mu

    def input_shapes(
        self, target: Shape, references: Sequence[Shape] = (), has_first_frame: bool = False, has_sound: bool = False
    ) -> dict[str, tuple[int, ...]]:
        latents, *others = (self.found.layout.axes_for(each) for each in (target, *references))
        if not (has_first_frame or self.image_to_video == "always"):
            return {"latents": latents, **self.conditioning_shapes(), **named_references(others)}
        is_whole = self.encodes_first_frame and not self.encodes_frame_alone
        alone = target if is_whole else target._replace(frames=1)
        return {"latents": latents, **self.conditioning_shapes(), FIRST_FRAME: self.found.layout.axes_for(alone)}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.found.text.shapes)

    def sample_with_sound(
        self, model: nn.Module, vae: Any, sampling: SamplingParams, positive: Conditioning, negative: Conditioning
    ) -> tuple[Tensor, None]:
        """Sample by the pipeline's own loop, up to `vae.decode`; return latents (1, ...)."""
        found, device = self.found, positive["prompt_embeds"].device
        predictor = Predictor(open_pipeline(self, device, None, vae.model), found)
        seen: list[Tensor] = []
        run = PipelineRun(denoise=self.denoise(model, positive["prompt_embeds"].dtype), decode=capture(seen))
        run.encodes = "drawn"
        guidance = None if found.embeds_guidance or sampling.guidance <= 1 else found.guidance
        if guidance is None:
            run.text, arguments = found.text.one(positive, 0), dict(found.arguments)
            if found.embeds_guidance:
                arguments["guidance_scale"] = sampling.guidance
        else:
            (own, images), (other, _) = (found.text.of_caption(each, 0) for each in (positive, negative))
            run.text = guidance.build(own, other, images)
            arguments = guided_arguments(found, sampling.guidance) | {"negative_prompt": ["x"]}
        arguments |= {"output_type": "pt", "num_inference_steps": sampling.steps, **image_argument(sampling.references)}
        # On the CPU, where a seed draws the same noise whatever the device is.
        arguments["generator"] = torch.Generator().manual_seed(sampling.seed)
        with torch.no_grad():
            predictor.hooked.run(run, ["x"], sampling.shape, guidance is not None, **arguments)
        return vae.normalize(seen[0]), None


def smallest_of(shapes: Iterable[SampleShape]) -> list[SampleShape]:
    """Return the smallest sample of each kind: with so many references or a first frame, clip or image.

    Those that are given most come first, and clips before images.
    """
    smallest: dict[tuple[int, bool], SampleShape] = {}
    for each in sorted(shapes, key=attrgetter("pixels")):
        smallest.setdefault((len(each.references) + each.has_first_frame, each.target.frames > 1), each)
    return [smallest[kind] for kind in sorted(smallest, reverse=True)]


def images_in(conditioning: Conditioning) -> list[Tensor]:
    """Return the latents of the images that samples are given: references, or a first frame."""
    return [conditioning[FIRST_FRAME]] if FIRST_FRAME in conditioning else references_in(conditioning)


class AutomaticTextEncoder(TextEncoder):
    """A pipeline with its text encoders, which is run as far as it encodes."""

    def __init__(self, family: AutomaticFamily, device: torch.device, dtype: torch.dtype) -> None:
        self.family = family
        self.pipeline = open_pipeline(family, device, dtype, None)
        clean_texts(self.pipeline.pipeline)
