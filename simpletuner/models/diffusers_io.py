"""Components of a pipeline folder in diffusers format: their classes, and models on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.architecture import plain_class_name
from simpletuner.models.malformed import CHECK_COPY

TEXT_PARTS = ("tokenizer", "text_encoder")
"""How the names of components begin that turn captions into tensors."""

FLOAT32_INPUTS = (
    *("timestep", "t", "guidance"),
    *("time_ids", "resolution", "aspect_ratio"),
    *("txt_ids", "img_ids", "video_coords"),
)
"""What a denoiser is told in numbers that bf16 would round."""


def text_folders(folder: Path) -> list[Path]:
    """Return the folders that decide what a caption's embedding is: tokenizers and text encoders."""
    return sorted(path for path in folder.iterdir() if path.name.startswith(TEXT_PARTS))


def refuse_second_denoiser(folder: Path, index: Mapping[str, Any], name: str) -> None:
    """Raise SettingsError for a pipeline in which another denoiser takes over where little noise is left."""
    if any(index.get(f"{name}_2") or ()):
        raise SettingsError(
            f"{folder} has two denoisers, {name} and {name}_2, each for its own noise levels",
            "choose a model with one: `simpletuner models` lists what can be trained",
        )


def class_of_diffusers(name: str) -> Any:
    """Return a class of diffusers. Raises EnvironmentFault when the installed version does not have it."""
    import diffusers

    try:
        return getattr(diffusers, name)
    except AttributeError:
        raise EnvironmentNotReady(
            f"diffusers {diffusers.__version__} has no {name}",
            "pip install --upgrade diffusers, or choose another model",
        ) from None


def class_named(index: Mapping[str, Any], name: str, folder: Path) -> Any:
    """Return the class that a pipeline's index names for a component: one of diffusers or of transformers.

    Raises EnvironmentFault for an entry that names none. Other libraries are not imported: a model's folder must not
    choose what runs here.
    """
    entry = index.get(name)
    if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)):
        raise EnvironmentNotReady(
            f"{folder / 'model_index.json'} names no {name}: it has {entry!r:.60} there, no library and class",
            CHECK_COPY,
        )
    library, cls = entry
    if library == "diffusers":
        return class_of_diffusers(cls)
    if library != "transformers":
        raise EnvironmentNotReady(
            f"{folder / 'model_index.json'} takes {name} from {library!r:.60}, which is not read",
            "only components of diffusers and transformers are",
        )
    import transformers

    if not hasattr(transformers, cls):
        raise EnvironmentNotReady(
            f"transformers {transformers.__version__} has no {cls}",
            "pip install --upgrade transformers, or choose another model",
        )
    return getattr(transformers, cls)


def require_packages(components: Iterable[Sequence[str]]) -> None:
    """Raise EnvironmentFault if a (library, class) of a pipeline needs a package that is not installed.

    transformers names the package; diffusers, which would load the class, does not.
    """
    import transformers

    for library, name in components:
        try:
            if library == "transformers":
                getattr(transformers, name).from_pretrained  # noqa: B018 - what stands in for the class raises here
        except ImportError as error:
            sentence = str(error).strip().partition(".")[0]
            raise EnvironmentNotReady(
                sentence, "install the build of it that fits your torch, then run again"
            ) from None


def build_on_meta(config: Mapping[str, Any]) -> nn.Module:
    """Return a model as its config.json has it: parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights
    from diffusers import ModelMixin

    name = plain_class_name(config["_class_name"])
    cls = class_of_diffusers(name)
    if not (isinstance(cls, type) and issubclass(cls, ModelMixin)):
        raise EnvironmentNotReady(f"{name} is no model of diffusers", "name a denoiser's folder")
    with init_empty_weights(include_buffers=False):
        return cls.from_config({**config, "_class_name": name})


@contextmanager
def inputs_cast(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast a denoiser's floating inputs while a pipeline calls it, all but FLOAT32_INPUTS.

    Pipelines cast prompts to `model.dtype`. Of a sharded model that is the float32 of its masters, but it computes in
    `dtype`.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def cast(value: Any, name: str = "") -> Any:
        """Cast a tensor, or the tensors in a list or dict."""
        if isinstance(value, dict):
            return {key: cast(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [cast(each, name) for each in value]
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating and name not in FLOAT32_INPUTS else value

    def before_forward(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Cast positional and named inputs."""
        return tuple(cast(value, name) for name, value in zip(names, arguments, strict=False)), cast(named)

    hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
