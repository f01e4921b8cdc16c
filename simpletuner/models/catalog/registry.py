"""The known model families, by name only: no torch here, so that help and mistakes are answered at once.

Each built-in family is one file, `presets/<family>.toml`: the import path of its class, and its published checkpoints.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.errors import nearest, shorten
from simpletuner.settings.declared.sections import Model, Parallel
from simpletuner.settings.foreign.original.families import alternative
from simpletuner.system.importing import import_named

TINY = "tiny"
ENTRY_POINTS = "simpletuner.families"
"""Entry point group of installed packages that register families: name = "package.module:ClassName"."""

AUTO = "auto"
"""The family of any pipeline that passes its proof."""

PRESETS = Path(__file__).parents[1] / "presets"


@dataclass(frozen=True)
class Architecture:
    """A denoiser as published: diffusers' class and config, its parameters as the published files hold them."""

    class_name: str
    parameters: int | None = None
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
    """As `Preset.flow_shift`, where this checkpoint's scheduler has another one."""
    license: str = ""
    """Name on its card at the hub, a key of `licenses.LICENSES`; empty where that is not known."""


@dataclass(frozen=True)
class Tiny:
    """The flavour `tiny`: a pipeline of few, narrow layers with random weights, for the demo and tests."""

    pipeline: str
    """Its class in diffusers."""
    parameters: int
    """Of the denoiser."""
    components: Mapping[str, Mapping[str, Any]]
    """By name, in the order in which they are built: a class of diffusers (`class_name`) with what differs from its
    defaults, a kind of text `encoder`, which comes with its tokenizer, or the VAE of this package (`pretrained`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's class."""
    adjust: str = ""
    """Import path of a function that is given the pipeline."""

    def component(self, name: str) -> dict[str, Any]:
        """Return a copy of what describes a component."""
        return {**self.components[name]}


@dataclass(frozen=True)
class Preset:
    """Facts of a built-in family, known without importing it; the fields are those of its TOML file."""

    objective: str
    """`epsilon`, `v_prediction`, `flow` or `edm`: what the published checkpoints predict."""
    text_encoders: str
    flavours: Mapping[str, Flavour]
    """The published checkpoints, the default one first."""
    family_class: str = ""
    """Import path of the ModelFamily; empty if the family cannot be trained and only its blocks can be detected."""
    pipelines: Sequence[str] = ()
    """Pipeline classes of diffusers whose folders the family opens, those of its variants included."""
    heads: int = 0
    """Attention heads by the default config of the denoiser's class, where context parallelism can split it."""
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
    """Clips have a multiple of this and one more frame, as the VAE takes them; 0 for a family of images alone."""
    flow_shift: float = 0
    """The shift with which the published schedulers sample an image of 1024 x 1024 px; 0 where there is no flow."""
    tiny: Tiny | None = None
    loads_lora: bool = True
    """True if diffusers' pipeline has load_lora_weights, without which nothing could open a LoRA."""
    order: float = float("inf")
    """Position in lists of families; without a number it is the last."""

    @property
    def is_diffusion(self) -> bool:
        return self.objective in ("epsilon", "v_prediction")


@cache
def load_preset(family: str) -> Preset | None:
    """Read the preset of a built-in family; None for any other name."""
    # A set of names instead of a path made of `family`, which is whatever the user typed.
    if family not in preset_names():
        return None
    # One file takes 0.2 ms, so help and completion read those that they need and keep them.
    content = tomllib.loads((PRESETS / f"{family}.toml").read_text(encoding="utf-8"))
    architectures = {name: Architecture(**values) for name, values in content.pop("architectures").items()}
    flavours = {
        name: Flavour(**values | {"architecture": architectures[values["architecture"]]})
        for name, values in content.pop("flavours").items()
    }
    tiny = content.pop("tiny", None)
    return Preset(**content, flavours=flavours, tiny=tiny and Tiny(**{"pipeline": content["pipelines"][0]} | tiny))


@cache
def preset_names() -> frozenset[str]:
    return frozenset(path.stem for path in PRESETS.glob("*.toml"))


@cache
def presets() -> Mapping[str, Preset]:
    """All built-in families by name, in the order of lists."""
    # 5 ms for 19 files: for lists only.
    found = {name: preset for name in sorted(preset_names()) if (preset := load_preset(name))}
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def check_pipeline(folder: Path, name: object, family: str) -> None:
    """Raise SettingsError for a folder whose pipeline class, `name`, other built-in families open."""
    others = [other for other, preset in presets().items() if name in preset.pipelines]
    if others and family not in others:
        raise SettingsError(
            f"{folder} is a {name}, which is not of model_family={family}", f"set model_family={others[0]}"
        )


def flavours_of(family: str) -> Mapping[str, Flavour]:
    """A family's published flavours, the default first; none for a user's own family."""
    preset = load_preset(family)
    return preset.flavours if preset else {}


def trainable_flavours(family: str) -> list[str]:
    """The published flavours of a family that can be trained, the default first, and the tiny one."""
    return [*(name for name, flavour in flavours_of(family).items() if not flavour.untrainable), TINY]


def flavour_of(model: Model) -> Flavour | None:
    """The chosen published flavour, or the family's default one; None for tiny and for a user's own family."""
    flavours = flavours_of(model.model_family)
    return flavours.get(model.model_flavour) if model.model_flavour else next(iter(flavours.values()), None)


def published_shift(model: Model) -> float:
    """Return the shift of noise levels of the chosen flavour, or of its family; 0 for a user's own family."""
    if model.model_family in (model.model_families or {}):
        return 0
    preset, flavour = load_preset(model.model_family), flavour_of(model)
    return (flavour.flow_shift if flavour else 0) or (preset.flow_shift if preset else 0)


def heads_of(preset: Preset, config: Mapping[str, Any]) -> int:
    """Attention heads of a family's denoiser with this config; 0 where context parallelism cannot split it."""
    return preset.heads and (config.get("num_attention_heads") or config.get("n_heads") or preset.heads)


def alltoall_sizes(heads: int) -> list[int]:
    """Sizes of a group whose ranks can share the heads equally."""
    return [size for size in range(2, heads + 1) if heads % size == 0]


def check_heads(name: str, heads: int, parallel: Parallel) -> None:
    """Raise SettingsError if context parallelism by alltoall cannot share out a denoiser's attention heads."""
    size = parallel.context_parallel_size
    if parallel.context_parallel_comm_strategy == "alltoall" and heads % size:
        sizes = ", ".join(map(str, alltoall_sizes(heads)))
        raise SettingsError(
            f"context_parallel_comm_strategy = alltoall shares out attention heads: the {heads} of {name} cannot be "
            f"divided by context_parallel_size = {size}",
            f"sizes that would do are {sizes}; context_parallel_comm_strategy=allgather takes any",
        )


def tiny_architecture(model: Model) -> Architecture | None:
    """The denoiser of a built-in family's tiny model, where settings mean that."""
    if model.model_flavour != TINY or model.pretrained_model_name_or_path:
        return None
    preset = load_preset(model.model_family)
    if preset is None or preset.tiny is None:
        return None
    config = preset.tiny.component("unet" if "unet" in preset.tiny.components else "transformer")
    class_name = config.pop("class_name")
    return Architecture(class_name, preset.tiny.parameters, f"the tiny {model.model_family}", config)


def check_model(model: Model) -> None:
    """Raise SettingsError for a family or flavour that is not known, with the nearest one."""
    if class_path_of(model) is None:
        hint = "`simpletuner models` lists all families; your own goes into model_families"
        refuse_without_class(model)
        names = [*presets(), AUTO, *(model.model_families or {})]
        name, like = shorten(model.model_family), nearest(model.model_family, names)
        raise SettingsError(f"Unknown model_family {name}{like}", hint)
    known = [*flavours_of(model.model_family), TINY]
    if model.model_flavour and model.model_flavour not in known:
        near = nearest(model.model_flavour, known)
        raise SettingsError(
            f"Unknown model_flavour {shorten(model.model_flavour)} of {model.model_family}{near}",
            f"known flavours: {', '.join(known)}",
        )


def refuse_without_class(model: Model) -> None:
    """Raise SettingsError for a family of the original that has no class here: how else it is trained, or why not."""
    flavour = flavour_of(model)
    hub = model.pretrained_model_name_or_path or (flavour.hub if flavour else "")
    sentence, hint = alternative(model.model_family, model.model_type, hub)
    if sentence:
        raise SettingsError(f"model_family {sentence}", hint)


def check_trainable(model: Model) -> None:
    """Raise SettingsError for a model that is not known, or known by its architecture alone."""
    check_model(model)
    if not class_path_of(model):
        refuse_without_class(model)
    flavour = flavour_of(model)
    # Somebody's own weights may well be trainable where the published ones are not.
    if flavour and flavour.untrainable and not model.pretrained_model_name_or_path:
        name = model.model_flavour or f"{next(iter(flavours_of(model.model_family)))} (its default flavour)"
        raise SettingsError(
            f"{model.model_family} {name} cannot be trained: {flavour.untrainable}",
            "`simpletuner models` lists the flavours that can",
        )
    if not (flavour or model.pretrained_model_name_or_path or model.model_flavour == TINY):
        raise SettingsError(f"{model.model_family} has no published flavours", suggest_base(model))


def suggest_base(model: Model) -> str:
    """Return what can be trained where no published model is at hand."""
    folder = "name a pipeline folder with --pretrained_model_name_or_path"
    return folder if model.model_family == AUTO else f"{folder}, or use --model_flavour=tiny"


def class_path_of(model: Model) -> str | None:
    """The import path of the family's class: from the settings, else built in, else from an installed package.

    Empty for a family that is known by its architecture alone, None for an unknown one.
    """
    name, own = model.model_family, model.model_families or {}
    if name in own:
        return own[name]
    if preset := load_preset(name):
        return preset.family_class
    if name == AUTO:
        return "simpletuner.models.automatic.family:AutomaticFamily"
    return next((point.value for point in entry_points(group=ENTRY_POINTS, name=name)), None)


def installed_families() -> dict[str, str]:
    """Families that installed packages register: the import path of each by name."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS) if point.name not in preset_names()}


def import_object(path: str, subject: str, form: str) -> Any:
    """Import `package.module:name`. Raises SettingsError, which begins with `subject`, if that is not possible."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_named(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{subject}: {error}", f"it must be importable, as {form}") from None
