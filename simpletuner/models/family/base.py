"""Base class of model families, the interface of the rest of the program to a model.

A subclass states the differences: diffusers' pipeline, encoding of captions, call of the denoiser. Loading,
caching, sampling and export are the same for all. `docs/families.md` shows how to add a family.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import FIRST_FRAME, LATENTS, SOUND, named_references
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_model, class_path_of, import_object, preset_of
from simpletuner.models.family.adapter import Adapter, adapter_parameters, freeze
from simpletuner.models.family.objectives import EVERY_SIGMA, Objective, keep_float32
from simpletuner.models.family.pipeline_folder import PipelineFolder
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder
from simpletuner.models.family.vae import Vae
from simpletuner.models.folder.diffusers_io import cast_inputs
from simpletuner.models.folder.weights import BASE_COMMIT, commit_of, repository_of
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.parallel.model.blocks import block_paths, count_parameters, is_hidden_matrix, recommended_blocks
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.shape import SampleShape, Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from simpletuner.data.images.sounds import Sound, SoundFormat
    from simpletuner.models.family.sound import SoundVae

CLIP_TOKENS = 77
"""Length of every prompt that CLIP encodes."""


class ModelFamily(PipelineFolder, ABC):
    """A model family, opened from one pipeline folder in diffusers format.

    A subclass defines `pipelines`, `objective`, `encode_prompts` and `predict`, and overrides anything else
    only if its pipeline differs. `PipelineFolder` has its folder, configs and components.
    """

    float32_inputs: ClassVar[tuple[str, ...]] = ("timestep",)
    """Arguments of the denoiser's `forward` (or keys of a dict among them) that stay float32 while
    sampling in bf16: times, sizes and positions, which bf16 would round above 256. All other
    floating-point inputs are cast."""

    host_inputs: ClassVar[tuple[str, ...]] = ()
    """Conditioning that `predict` reads, such as masks whose lengths become shapes. In training it stays
    in the host's memory, pinned, because `.item()` on a CUDA tensor synchronizes the stream."""

    unused_inputs: ClassVar[tuple[str, ...]] = ()
    """Arguments of the denoiser's `forward` that it must be given, and that no prediction depends on."""

    round_sigmas_in_bf16: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(keep_float32)
    """Flow matching in bf16: maps a batch's sigmas to those that the denoiser uses (objectives.py)."""

    outputs_vae_latents: ClassVar[bool] = False
    """True if the pipeline returns latents as its VAE decodes them, not as the denoiser sees them."""

    padding_mask: ClassVar[str] = ""
    """Name of the denoiser's padding mask, so that embeddings are cached without padding. Empty if padding is
    attended to, as in Flux, or is zeros, which are not stored either."""

    text_width: ClassVar[str] = "joint_attention_dim"
    """Key of the denoiser's config that holds the width of `prompt_embeds`."""

    packing: ClassVar[int] = 1
    """The denoiser's input channels for each channel of the latents: 4 where it is given 2x2 patches."""

    least_references: int = 0
    most_references: int = 0
    """Number of reference images that the pipeline takes."""

    encodes_first_frame: bool = False
    """True if the denoiser gets the latents of a clip that is grey after its first frame, not that frame's.
    """

    encodes_frame_alone: bool = False
    """True if that clip ends with its first frame: CogVideoX's latents of a whole clip begin with others."""

    shifts_levels: ClassVar[bool] = False
    """True if the pipeline gives its scheduler noise levels that it has shifted itself, by exp(`mu`)."""

    frame_rate: ClassVar[float] = 24
    """Frames per second of the clips that its published models generate."""
    fuses_qkv: ClassVar[bool] = False
    """True if diffusers' `fuse_qkv_projections` leaves the denoiser's output as it is: it passes over
    norms of SD3.5, and many attention classes ignore it."""

    pipeline_options: Mapping[str, object] = MappingProxyType({})
    """Arguments of every call of the pipeline."""

    lora_options: Mapping[str, object] = MappingProxyType({})
    """Arguments for the pipeline's `load_lora_weights` to load a LoRA into this denoiser."""

    sequence_plan: ClassVar[SequencePlan | None] = None
    """Split of the denoiser's tokens for context parallelism; None where it is not supported."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        longest = self.default_max_length()
        self.max_length = (settings.data.tokenizer_max_length or longest) if longest else None

    # What a family defines.

    @abstractmethod
    def objective(self, /) -> Objective:
        """Return the training objective: assign `objectives.diffusion` or `objectives.flow_matching`."""

    @abstractmethod
    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode captions by `encode_prompt` of a pipeline that holds only tokenizers and text encoders.

        Must return `prompt_embeds`, and a mask where texts of different length are padded.
        """

    @abstractmethod
    def predict(self, model: nn.Module, noised: Tensor, timesteps_B: Tensor, conditioning: Conditioning, /) -> Tensor:
        """Call the denoiser as the pipeline does and return its prediction with the axes of `noised`, BCHW or
        BCFHW.

        `noised` sets the dtype to compute in. `timesteps_B` are the objective's: 0..999 for diffusion, sigmas
        in 0..1 for flow matching. The prediction is compared with the objective's target.
        """

    # What a family may override.

    def predict_streams(
        self, model: nn.Module, noised: Mapping[str, Tensor], timesteps_B: Tensor, conditioning: Conditioning, /
    ) -> Mapping[str, Tensor]:
        """Return the prediction of each stream of `noised` (`models/family/streams.py`); here, one."""
        return {LATENTS: self.predict(model, noised[LATENTS], timesteps_B, conditioning)}

    @property
    def stream_weights(self) -> Mapping[str, float]:
        """Weights in the loss of the streams that are trained beside the latents, by name."""
        return {}

    def sound_shape(self, frames: int) -> tuple[int, ...]:
        """Shape of the latents of a clip's sound, of a family that has SOUND among its `stream_weights`."""
        raise NotImplementedError(f"{type(self).__name__} trains no sound")

    @property
    def sound_format(self) -> SoundFormat:
        from simpletuner.models.family.sound import sound_format  # a run without sound does not need it

        return sound_format(self.folder, self.frame_rate)

    def sound_vae(self, device: torch.device) -> SoundVae:
        from simpletuner.models.family.sound import SoundVae

        return SoundVae(self.folder, device, self.settings.model, self.frame_rate)

    @property
    def sigma_range(self) -> tuple[float, float]:
        """The least and the highest noise level at which the pipeline calls the denoiser."""
        return EVERY_SIGMA

    def sampling_components(self, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        """Components for sampling, besides VAE and trained denoiser; each call returns the same ones."""
        return {}

    def encode_edits(
        self, pipeline: DiffusionPipeline, captions: list[str], references: Sequence[Image]
    ) -> Conditioning:
        """Encode captions with references, for text encoders that read them; returns as `encode_prompts`."""
        raise NotImplementedError(f"{type(self).__name__} has reads_references, and no encode_edits")

    def default_max_length(self) -> int | None:
        """Longest prompt in tokens, unless tokenizer_max_length is set; None if text encoders fix it."""
        return None

    def unconditional(self, empty: Conditioning) -> Conditioning:
        """Conditioning for `no caption`, given the encoding of the empty caption."""
        return empty

    def size_conditioning(self, geometry: Geometry) -> Conditioning:
        """Conditioning on the size and crop of one image; no batch axis."""
        return {}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all conditioning of one sample with the longest caption, by name: what `plan` counts
        with.

        Raises SettingsError for a denoiser whose config does not have the key `text_width`.
        """
        tokens, masks = self.max_length or CLIP_TOKENS, (self.padding_mask, *self.host_inputs)
        width = self.exported_config().get(self.text_width)
        if width is None:
            raise SettingsError(
                f"how wide {type(self).__name__}'s captions are is not known: its config has no {self.text_width}",
                "set `text_width` in the family's class, or override `conditioning_shapes` (docs/families.md)",
            )
        shapes = {"prompt_embeds": (tokens, width)}
        return shapes | {name: (tokens,) for name in masks if name}

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        """Arguments of the pipeline's call; here for classifier-free guidance with negative embeddings."""
        embeds = {f"negative_{name}": value for name, value in negative.items()}
        if negative:
            # Some pipelines have a default negative prompt, which they refuse together with embeddings.
            embeds["negative_prompt"] = None
        return {**positive, **embeds, **sampling.kwargs(), **self.pipeline_options}

    def reference_kwargs(self, references: Sequence[Image]) -> dict[str, object]:
        """Arguments of the pipeline's `__call__` for reference images."""
        return {"image": list(references)}

    def enter_pipeline(self, pipeline: DiffusionPipeline, positive: Conditioning) -> None:
        """Set on a pipeline that samples what its call has no argument for."""

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        """Convert what the pipeline returns to BCHW, or BCFHW of a clip; `shape` is in latent cells."""
        return latents

    def image_tokens(self, shape: Shape) -> int:
        """Return the tokens of a sample, whose shape is in latent cells, as its pipeline counts them."""
        patch = math.isqrt(self.packing) if self.packing > 1 else self.exported_config().get("patch_size", 1)
        return shape.frames * (shape.height // patch) * (shape.width // patch)

    def mu(self, shape: Shape, config: Mapping[str, object]) -> float:
        """Shift that the pipeline gives to a scheduler with dynamic shifting, by a shape in latent cells."""
        return self.shift_exponent(self.image_tokens(shape), config)

    def shift_exponent(self, tokens: int, config: Mapping[str, Any]) -> float:
        """`mu` for a scheduler with dynamic shifting: linear in the number of tokens."""
        first, last = config["base_image_seq_len"], config["max_image_seq_len"]
        slope = (config["max_shift"] - config["base_shift"]) / (last - first)
        return config["base_shift"] + slope * (tokens - first)

    def prove(self, shapes: Sequence[Shape | SampleShape], device: torch.device, sampled: Sequence[Shape] = ()) -> None:
        """Check what has to be run to be known, before anything is encoded for samples of these shapes in px.

        `sampled` are the shapes of validation.
        """

    def prove_sampling(self, shape: Shape, references: int, device: torch.device) -> None:
        """Check what has to be run to be known before a prompt is sampled in a shape, from so many images."""

    def check_proven(self, shape: Shape, references: int) -> None:
        """Raise ValueError for a sample that a run cannot take on, since only its start could prove it."""

    def facts(self) -> Mapping[str, str]:
        """Return rows for the summary, the model card and checkpoints."""
        commit = commit_of(self.folder)
        return {BASE_COMMIT: f"{repository_of(self.folder)}@{commit}"} if commit else {}

    @property
    def cache_facts(self) -> Mapping[str, str]:
        """Further parts of the keys of cached latents and texts."""
        return {}

    @property
    def reads_references(self) -> bool:
        """True if text encoders read the references: `encode_edits` then replaces `encode_prompts`."""
        return False

    def first_latent_frame(self, latents_CFHW: Tensor) -> Tensor:
        """Return the first latent frame of a clip, with an axis of one frame."""
        return latents_CFHW[:, :1]

    @property
    def skips_first_frame(self) -> bool:
        """True if the first latent frame of clips that continue it has no loss."""
        return not self.encodes_first_frame

    @property
    def image_to_video(self) -> Literal["never", "optional", "always"]:
        """Use of a clip's first frame as an input of the model."""
        return "never"

    # What is the same for all families.

    @property
    def images_of_sample(self) -> tuple[int, int]:
        """Fewest and most images that a sample is made from."""
        needs_one = self.image_to_video == "always" or self.reads_references
        return max(self.least_references, int(needs_one)), max(
            self.most_references, int(self.image_to_video != "never")
        )

    def input_shapes(
        self, target: Shape, references: Sequence[Shape] = (), has_first_frame: bool = False, has_sound: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of a sample's streams and conditioning, by SampleShape in px; latents: (C, [F,] H, W)."""
        channels = self.exported_config()["in_channels"] // self.packing
        latents, *others = ((channels, *each.in_cells(self.cell).axes) for each in (target, *references))
        first = {FIRST_FRAME: (channels, 1, *latents[-2:])} if has_first_frame else {}
        more = {SOUND: self.sound_shape(target.frames)} if has_sound else {}
        return {LATENTS: latents, **more, **self.conditioning_shapes(), **named_references(others), **first}

    @cached_property
    def adapter(self) -> Adapter | None:
        """The LoRA that is trained in place of the weights; None with model_type=full.

        Raises SettingsError where the pipeline could not load it, or for layers that the denoiser does not
        have.
        """
        if self.settings.model.model_type != "lora":
            return None
        preset = preset_of(self.settings.model)
        # By the preset (test_adapter.py): importing the pipeline takes 1 CPU s, with transformers.
        knows = preset is not None and preset.has_class and preset.loads_lora
        if not (knows or hasattr(self.pipeline_class, "load_lora_weights")):
            raise SettingsError(
                f"model_type=lora: {self.pipeline_name} has no load_lora_weights to open the result with",
                "set model_type=full, or take another family",
            )
        return Adapter.of(self.meta_denoiser, self.settings, self.unused_parameters())

    @cached_property
    def trained_on_meta(self) -> nn.Module:
        """Float32 denoiser without memory, with the trainable parameters of the one that is trained. Not to
        be modified: an adapter of FLUX takes 0.4 CPU s to attach."""
        if self.adapter is None:
            return self.meta_denoiser
        model = self.denoiser(include_buffers=True)
        freeze(model, torch.float32)
        self.adapter.attach(model)
        return model

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of everything that a checkpoint holds of the model, by name."""
        model = self.trained_on_meta
        trained = adapter_parameters(model) if self.adapter else model.state_dict()
        return {name: tuple(tensor.shape) for name, tensor in trained.items()}

    @cached_property
    def block_classes(self) -> tuple[str, ...]:
        """Classes of the denoiser that should become sharding units (`recommended_blocks`, 18 ms of FLUX)."""
        return recommended_blocks(self.meta_denoiser)

    @cached_property
    def trained_weights(self) -> TrainedWeights:
        """The shapes of what a run trains, as its optimizer is given them, counted on the meta device."""
        model, trained = self.meta_denoiser, self.trained_shapes()
        saved = sum(map(math.prod, trained.values()))
        if self.adapter is None:
            trained = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
        blocks = block_paths(model, self.block_classes)
        shapes = [(shape, is_hidden_matrix(name, len(shape), blocks)) for name, shape in trained.items()]
        return TrainedWeights(shapes, count_parameters(model) if self.adapter is None else saved, saved)

    def trained_facts(self) -> dict[str, Any]:
        """Return a checkpoint's facts about its weights."""
        adapter = self.adapter
        facts = {"model_type": "lora", "lora": adapter.as_settings()} if adapter else {"model_type": "full"}
        if proven := dict(self.facts()):
            facts["proven"] = proven
        if self.other_denoiser:
            facts["denoiser"] = self.denoiser_name
        return facts

    @property
    def lora_prefix(self) -> str:
        """Return with what the names of a LoRA's tensors begin in the file that the pipeline loads."""
        return self.denoiser_name

    @property
    def has_any_text_length(self) -> bool:
        """True if batches of texts have any length up to `max_length`, False if always that length."""
        return bool(self.padding_mask or self.host_inputs)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return TextEncoder(self, device, dtype)

    def sample(
        self, model: nn.Module, vae: Vae, sampling: SamplingParams, positive: Conditioning, negative: Conditioning
    ) -> Tensor:
        """Sample an image or clip with diffusers' pipeline and scheduler; returns latents (1CHW or 1CFHW)."""
        return self.sample_with_sound(model, vae, sampling, positive, negative)[0]

    def sample_with_sound(
        self, model: nn.Module, vae: Vae, sampling: SamplingParams, positive: Conditioning, negative: Conditioning
    ) -> tuple[Tensor, Sound | None]:
        """Return what `sample` does, and the sound of a clip, where it is trained."""
        dtype = positive["prompt_embeds"].dtype
        others = self.sampling_components(vae.device, dtype)
        cls = (
            self.image_to_video_class if self.image_to_video != "never" and sampling.references else self.pipeline_class
        )
        pipeline = self.load_pipeline(vae=vae.model, model=model, others=others, cls=cls)
        pipeline.set_progress_bar_config(disable=True)
        self.enter_pipeline(pipeline, positive)
        kwargs = self.pipeline_kwargs(positive, negative, sampling)
        if sampling.references:
            kwargs |= self.reference_kwargs(sampling.references)
        with cast_inputs(model, dtype, except_for=self.float32_inputs), vae.casting():
            made = pipeline(**kwargs)
        latents = vae.normalize(made[0]) if self.outputs_vae_latents else made[0]
        sound = self.decode_sound(made[1], vae.device, sampling) if self.stream_weights else None
        return self.unpack_latents(latents, sampling.shape.in_cells(vae.cell)), sound

    def decode_sound(self, latents: Tensor, device: torch.device, sampling: SamplingParams) -> Sound | None:
        """Decode what the pipeline returns of a clip's sound; nothing for an image."""
        return None


def family_class(model: Model) -> type[ModelFamily]:
    """Import a family's class. Raises SettingsError if a user's own fails or is no ModelFamily."""
    if not (path := class_path_of(model)):
        check_model(model)
        raise SettingsError(
            f"{model.model_family} is known by its blocks alone", "`simpletuner models` lists the others"
        )
    cls = import_object(path, f"model_families: {model.model_family} = {path}", "package.module:ClassName")
    if not (isinstance(cls, type) and issubclass(cls, ModelFamily)):
        is_what = f"the class {cls.__name__}" if isinstance(cls, type) else f"of type {type(cls).__name__}"
        raise SettingsError(
            f"model_families: {model.model_family} = {path}: it is {is_what}, but must be a subclass of ModelFamily",
            "write it as a class, `class MyFamily(ModelFamily)`: docs/families.md has a complete one",
        )
    missing = [*(["pipelines"] if not cls.pipelines else []), *sorted(cls.__abstractmethods__)]
    if missing:
        raise SettingsError(
            f"model_families: {model.model_family} = {path}: {cls.__name__} does not define {', '.join(missing)}",
            "docs/families.md has a complete family",
        )
    preset = preset_of(model)
    if preset is not None and preset.is_automatic:
        # One class for all of them, each of which opens its own pipelines alone.
        return type(cls.__name__, (cls,), {"pipelines": tuple(preset.pipelines), "denoiser_name": preset.denoiser})
    return cls
