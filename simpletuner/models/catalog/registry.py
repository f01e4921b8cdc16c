"""Known model families by name. No torch, so that help and mistakes are answered at once.

A built-in family is one file, `presets/<family>.toml`: the import path of its class, and its published
checkpoints. A preset's `license` is the name on the checkpoint's card, https://huggingface.co/<hub>, from
that card, its publisher's repository or a catalogue of licences; it is missing if none was at hand.
Commercial use is decided by the licence texts, not by the words here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.preset import AUTOMATIC, NEEDS_CLASS, Architecture, Flavour, Preset, Tiny
from simpletuner.system.importing import import_named

if TYPE_CHECKING:  # `simpletuner models` lists presets without any settings, which take 0.05 CPU s to import
    from importlib.metadata import EntryPoints

    from simpletuner.settings.declared.sections import Model, Parallel

TINY = "tiny"
# Entry point group of installed packages that register families: name = "package.module:ClassName".
ENTRY_POINTS = "simpletuner.families"

AUTO = "auto"
"""The family of any pipeline that passes its proof."""

PRESETS = Path(__file__).parents[1] / "presets"


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
    if content.get("family_class") == AUTOMATIC:
        content["unsplittable"] = NEEDS_CLASS
    return Preset(**content, flavours=flavours, tiny=tiny and Tiny(**{"pipeline": content["pipelines"][0]} | tiny))


def preset_of(model: Model) -> Preset | None:
    """Preset of a model's family; None for a user's own, also for one with the name of a built-in family."""
    return None if is_own(model) else load_preset(model.model_family)


def is_own(model: Model) -> bool:
    """True if the settings name the class of the family (model_families), instead of a preset."""
    return model.model_family in (model.model_families or {})


@cache
def preset_names() -> frozenset[str]:
    return frozenset(path.stem for path in PRESETS.glob("*.toml"))


@cache
def presets() -> Mapping[str, Preset]:
    """Built-in families by name, in display order."""
    # 5 ms for 19 files: for lists only.
    found = {name: preset for name in sorted(preset_names()) if (preset := load_preset(name))}
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def check_pipeline(folder: Path, name: object, family: str) -> None:
    """Raise SettingsError for a folder whose pipeline class, `name`, other built-in families open.

    A family without a class of its own opens no other pipeline than its own.
    """
    others = [other for other, preset in presets().items() if name in preset.pipelines]
    own = load_preset(family)
    if (others and family not in others) or (own and own.is_automatic and name not in own.pipelines):
        raise SettingsError(
            f"{folder} is a {name}, which is not of model_family={family}",
            f"set model_family={others[0] if others else AUTO}",
        )


def flavours_of(family: str) -> Mapping[str, Flavour]:
    """A family's published flavours, the default first; none for a user's own family."""
    preset = load_preset(family)
    return preset.flavours if preset else {}


def trainable_flavours(family: str) -> list[str]:
    """The published flavours of a family that can be trained, the default first, and the tiny one."""
    published = [name for name, flavour in flavours_of(family).items() if not flavour.untrainable]
    return [*published, *[TINY] * has_tiny(family)]


def has_tiny(family: str) -> bool:
    """True if a family has the flavour `tiny`, or is a user's own, whose class decides later."""
    preset = load_preset(family)
    return preset is None or preset.tiny is not None


def flavour_of(model: Model) -> Flavour | None:
    """Chosen published flavour, or the family's default one; None for tiny and for a user's own family."""
    flavours = flavours_of(model.model_family)
    return flavours.get(model.model_flavour) if model.model_flavour else next(iter(flavours.values()), None)


def repository_named(model: Model) -> str:
    """Return the name of a base model, or the repository of its flavour; empty for a family without one."""
    flavour = flavour_of(model)
    return model.pretrained_model_name_or_path or (flavour.hub if flavour else "")


def revision_of(model: Model) -> str | None:
    """Hub revision of a model: from the settings, else of the published flavour."""
    flavour = None if model.pretrained_model_name_or_path else flavour_of(model)
    return model.revision or (flavour.revision if flavour else "") or None


def published_shift(model: Model) -> float:
    """Return the shift of noise levels of the chosen flavour, or of its family; 0 for a user's own family."""
    preset, flavour = preset_of(model), flavour_of(model)
    return ((flavour.flow_shift if flavour else 0) or preset.flow_shift) if preset else 0


def heads_of(preset: Preset, config: Mapping[str, object]) -> int:
    """Attention heads of a family's denoiser with this config; 0 if context parallelism cannot split it."""
    return preset.heads and (config.get("num_attention_heads") or config.get("n_heads") or preset.heads)


def alltoall_sizes(heads: int) -> list[int]:
    """Sizes of a group whose ranks can share the heads equally."""
    return [size for size in range(2, heads + 1) if heads % size == 0]


def check_heads(name: str, heads: int, parallel: Parallel) -> None:
    """Raise SettingsError if alltoall cannot divide a denoiser's attention heads."""
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
    preset = preset_of(model)
    if preset is None or preset.tiny is None:
        return None
    config = preset.tiny.component("unet" if "unet" in preset.tiny.components else "transformer")
    class_name = config.pop("class_name")
    return Architecture(class_name, preset.tiny.parameters, f"the tiny {model.model_family}", config)


def check_model(model: Model) -> None:
    """Raise SettingsError for a family or flavour that is not known, with the nearest one."""
    from simpletuner.settings.declared.errors import nearest, shorten

    if class_path_of(model) is None:
        hint = "`simpletuner models` lists all families; your own goes into model_families"
        refuse_without_class(model)
        names = [*presets(), AUTO, *(model.model_families or {})]
        name, like = shorten(model.model_family), nearest(model.model_family, names)
        raise SettingsError(f"Unknown model_family {name}{like}", hint)
    known = [*flavours_of(model.model_family), *[TINY] * (is_own(model) or has_tiny(model.model_family))]
    if model.model_flavour and model.model_flavour not in known:
        near = nearest(model.model_flavour, known)
        is_tiny = model.model_flavour == TINY
        raise SettingsError(
            f"{model.model_family} has no flavour `{TINY}`"
            if is_tiny
            else f"Unknown model_flavour {shorten(model.model_flavour)} of {model.model_family}{near}",
            f"known flavours: {', '.join(known)}",
        )


def refuse_without_class(model: Model) -> None:
    """Raise SettingsError for a family of the original that is not trained here, with the reason."""
    from simpletuner.settings.foreign.original_names import why_untrained

    if sentence := why_untrained(model.model_family):
        raise SettingsError(f"model_family {sentence}", "`simpletuner models` lists those that can")


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
    """Hint for a machine without any published model at hand."""
    folder = "name a pipeline folder with --pretrained_model_name_or_path"
    has_no_tiny = model.model_family == AUTO or not has_tiny(model.model_family)
    return folder if has_no_tiny else f"{folder}, or use --model_flavour=tiny"


def class_path_of(model: Model) -> str | None:
    """The import path of the family's class: from the settings, else built in, else from an installed
    package.

    Empty for a family that is known by its architecture alone, None for an unknown one.
    """
    name, own = model.model_family, model.model_families or {}
    if name in own:
        return own[name]
    if preset := load_preset(name):
        return preset.family_class
    if name == AUTO:
        return AUTOMATIC
    return next((point.value for point in registered(name=name)), None)


def installed_families() -> dict[str, str]:
    return {point.name: point.value for point in registered() if point.name not in preset_names()}


def registered(**named: str) -> EntryPoints:
    from importlib.metadata import entry_points  # 10 ms of a key of completion, which takes 190

    return entry_points(group=ENTRY_POINTS, **named)


def import_object(path: str, subject: str, form: str) -> Any:
    """Import `package.module:name`. Raises SettingsError, beginning with `subject`, on failure."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_named(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{subject}: {error}", f"it must be importable, as {form}") from None


@dataclass(frozen=True)
class License:
    """A licence by the name on the cards."""

    commercial_use: str
    """`yes`, `no`, or the condition, of the weights and of what is trained from them."""
    text: str
    """Address of the text."""
    is_hub_name: bool = False
    """True for a name that a card's `license` may have; of any other it is `other`, with name and link."""


HUB = "https://huggingface.co"
WITHIN_RESTRICTIONS = "yes, within its restrictions of use"
LICENSES = {
    "apache-2.0": License("yes", "https://www.apache.org/licenses/LICENSE-2.0", is_hub_name=True),
    "circlestone-labs-non-commercial-license": License("no", f"{HUB}/circlestone-labs/Anima/blob/main/LICENSE.md"),
    "creativeml-openrail-m": License(
        WITHIN_RESTRICTIONS, f"{HUB}/spaces/CompVis/stable-diffusion-license", is_hub_name=True
    ),
    "mit": License("yes", "https://opensource.org/license/mit", is_hub_name=True),
    "openrail++": License(
        WITHIN_RESTRICTIONS, f"{HUB}/stabilityai/stable-diffusion-xl-base-1.0/blob/main/LICENSE.md", is_hub_name=True
    ),
    "flux-1-dev-non-commercial-license": License("no", f"{HUB}/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md"),
    "flux-non-commercial-license": License("no", f"{HUB}/black-forest-labs/FLUX.2-dev/blob/main/LICENSE.md"),
    "krea-2-community-license": License(
        "with a yearly revenue below 1,000,000 USD", f"{HUB}/krea/Krea-2-Raw/blob/main/LICENSE.pdf"
    ),
    "tencent-hunyuan-community": License(
        "outside the EU, the UK and South Korea, with up to 100 million users a month",
        f"{HUB}/tencent/HunyuanImage-2.1/blob/main/LICENSE",
    ),
    "stabilityai-ai-community": License(
        "with a yearly revenue of up to 1,000,000 USD, registered",
        f"{HUB}/stabilityai/stable-diffusion-3.5-large/blob/main/LICENSE.md",
    ),
}


def license_of(hub: str | None) -> str:
    """Return the licence of a published checkpoint by its hub id; empty where it is not known."""
    found = (each.license for preset in presets().values() for each in preset.flavours.values() if each.hub == hub)
    return next(found, "")


def describe_license(name: str) -> str:
    """Return a licence with its commercial use in words; empty for one that is not known."""
    return f"{name}; commercial use: {LICENSES[name].commercial_use}" if name else ""
