"""Facts of a model family as its TOML file has them: its class, and its published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AUTOMATIC = "simpletuner.models.automatic.family:AutomaticFamily"
"""The class of families that train by their pipeline's own call."""

# Why a family of that class cannot be split: nothing is known of its denoiser but its call.
NEEDS_CLASS = "context parallelism needs a class"


@dataclass(frozen=True)
class Architecture:
    """Denoiser as published: diffusers' class and config, its parameters as the published files hold them."""

    class_name: str
    parameters: int | None = None
    """Number of parameters; None, with an empty `config`, if no published config was readable."""
    source: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    cell_px: int = 0
    """Width of one latent cell in px, where it is not that of the family's other models."""


@dataclass(frozen=True)
class Flavour:
    """A published checkpoint: hub id, architecture, and, if it cannot be trained, why."""

    hub: str
    architecture: Architecture
    untrainable: str = ""
    flow_shift: float = 0
    """`Preset.flow_shift` of this checkpoint's scheduler, if it differs."""
    fps: float = 0
    """`Preset.fps` of this checkpoint, if it differs."""
    revision: str = ""
    """Branch at the hub of the pipeline that diffusers opens, where that is not the main one."""
    denoiser: str = ""
    """Component of the denoiser in a pipeline with two, one for high and one for low noise levels."""
    index: Mapping[str, Any] = field(default_factory=dict)
    """Entries of its model_index.json on which the denoiser's inputs, or the memory of sampling, depend."""
    license: str = ""
    """Name on its card at the hub, a key of `licenses.LICENSES`; empty where that is not known."""


@dataclass(frozen=True)
class Tiny:
    """The flavour `tiny`: a pipeline of few, narrow layers with random weights, for the demo and tests."""

    pipeline: str
    """Pipeline class in diffusers."""
    parameters: int
    """Number of the denoiser's parameters."""
    components: Mapping[str, Mapping[str, Any]]
    """Components by name, in the order of their construction: a class of diffusers (`class_name`) with
    changes to its defaults, a kind of text `encoder` with its tokenizer, a `tokenizer` alone, or a VAE of
    this package (`pretrained`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's class."""
    adjust: str = ""
    """Import path of a function that is given the pipeline."""

    def component(self, name: str) -> dict[str, Any]:
        return {**self.components[name]}


@dataclass(frozen=True)
class Preset:
    """Facts of a built-in family, known without importing it; fields are as in its TOML file."""

    objective: str
    """`epsilon`, `v_prediction`, `flow` or `edm`: what the published checkpoints predict."""
    text_encoders: str
    flavours: Mapping[str, Flavour]
    """The published checkpoints, the default one first."""
    family_class: str = ""
    """Import path of the ModelFamily; empty if only the blocks of the family can be detected."""
    pipelines: Sequence[str] = ()
    """Pipeline classes with folders that the family opens, including its variants."""
    heads: int = 0
    """Attention heads by the default config of the denoiser's class, if context parallelism can split it."""
    unsplittable: str = ""
    """Why context parallelism cannot split the denoiser, where it cannot."""
    fixed_prompt_length: bool = False
    """True if the text encoders read a fixed number of tokens, so that tokenizer_max_length has no effect."""
    embeds_guidance: bool = False
    """True if some checkpoint embeds the guidance scale, so that flux_guidance_value has an effect."""
    image_multiple: int = 16
    """Both sides of a validation image are multiples of this, in px: the VAE's scale times the patch size."""
    cell_px: int = 8
    """Width of one latent cell in px."""
    frame_step: int = 0
    """Frame step of clips: a multiple of it, plus one, as the VAE takes them; 0 for image families."""
    fps: float = 0
    """Frames per second of the clips that the model was trained on; 0 where nothing published says it."""
    generates_sound: bool = False
    """True if sound_loss_weight trains the sound of clips, too."""
    json_captions: bool = False
    """True if the published checkpoints were trained on captions in JSON alone."""
    flow_shift: float = 0
    """Sampling shift of the published scheduler at 1024 x 1024 px; 0 without a flow."""
    clip_shift: Mapping[str, float] = field(default_factory=dict)
    """The shift of clips by their tokens, as in a scheduler_config.json; empty if clips have flow_shift."""
    tiny: Tiny | None = None
    loads_lora: bool = True
    """True if diffusers' pipeline has load_lora_weights, without which nothing could open a LoRA."""
    lora_formats: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a LoRA's tensor names, by program (lora_config.py)."""
    lora_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Layers of the original model, and the layers of diffusers stacked in each; empty if names are equal."""
    order: float = float("inf")
    """Position in lists of families; without a number it is the last."""

    @property
    def is_diffusion(self) -> bool:
        return self.objective in ("epsilon", "v_prediction")

    @property
    def is_automatic(self) -> bool:
        """True if the family trains by its pipeline's own call, which each start proves again."""
        return self.family_class == AUTOMATIC

    @property
    def has_class(self) -> bool:
        return bool(self.family_class) and not self.is_automatic

    @property
    def denoiser(self) -> str:
        is_unet = any(each.architecture.class_name.startswith("UNet") for each in self.flavours.values())
        return "unet" if is_unet else "transformer"
