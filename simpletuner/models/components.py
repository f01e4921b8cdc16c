"""Read a pipeline folder in diffusers format: what its configs say, and that no weights in it are a pickle."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simpletuner.errors import EnvironmentFault, SettingsError
from simpletuner.models.architecture import plain_class_name

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TEXT_PARTS = ("tokenizer", "text_encoder")
"""How the names of components begin that turn captions into tensors."""

FLOAT32_INPUTS = (
    *("timestep", "t", "guidance"),
    *("time_ids", "resolution", "aspect_ratio"),
    *("txt_ids", "img_ids", "video_coords"),
)
"""What a denoiser is told in numbers that bf16 would round."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a component's JSON file. Raises EnvironmentFault when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"cannot read {path}: {error}",
            "pretrained_model_name_or_path must be a pipeline folder in diffusers format",
        ) from None


def text_folders(folder: Path) -> list[Path]:
    """Return the folders that decide what a caption's embedding is: tokenizers and text encoders."""
    return sorted(path for path in folder.iterdir() if path.name.startswith(TEXT_PARTS))


def weights_files(folder: Path, variant: str | None = None) -> list[Path]:
    """Return the safetensors of one component, of one variant.

    Raises EnvironmentFault when there are none; a pickle is named and refused, since loading it can run code.
    """
    every = sorted(folder.glob("*.safetensors"))
    files = [path for path in every if variant_of(path) == variant]
    if files:
        return files
    pickles = [path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES] if folder.is_dir() else []
    if pickles:
        raise EnvironmentFault(
            f"{folder} holds {pickles[0]}, a pickle: loading it can run any code, so it is refused",
            "convert it once to safetensors with a tool that you trust",
        )
    others = sorted({variant_of(path) or "no variant" for path in every})
    raise EnvironmentFault(
        f"{folder} holds no safetensors" + (f" of variant {variant}" if variant else ""),
        f"found: {', '.join(others)}; set --variant" if others else "check pretrained_model_name_or_path",
    )


def refuse_pickles(folder: Path) -> None:
    """Raise EnvironmentFault if any component of a pipeline has its weights in pickles only."""
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(path.suffix in PICKLE_SUFFIXES for path in component.iterdir()):
            any_weights_files(component)


def refuse_second_denoiser(folder: Path, index: Mapping[str, Any], name: str) -> None:
    """Raise SettingsError for a pipeline in which another denoiser takes over where little noise is left."""
    if any(index.get(f"{name}_2") or ()):
        raise SettingsError(
            f"{folder} has two denoisers, {name} and {name}_2, each for its own noise levels",
            "choose a model with one: `simpletuner models` lists what can be trained",
        )


def any_weights_files(folder: Path) -> list[Path]:
    """Return a component's safetensors of no variant, or else of whichever there is."""
    variants = [variant_of(path) for path in sorted(folder.glob("*.safetensors"))]
    return weights_files(folder, variants[0] if variants and None not in variants else None)


def variant_of(path: Path) -> str | None:
    """Return the variant in a weights file's name (`model.fp16-00001-of-00002.safetensors` -> fp16), or None."""
    _, dot, rest = path.name.removesuffix(".safetensors").partition(".")
    return rest.partition("-")[0] if dot else None


def class_of_diffusers(name: str) -> Any:
    """Return a class of diffusers. Raises EnvironmentFault when the installed version does not have it."""
    import diffusers

    try:
        return getattr(diffusers, name)
    except AttributeError:
        raise EnvironmentFault(
            f"diffusers {diffusers.__version__} has no {name}",
            "pip install --upgrade diffusers, or choose another model",
        ) from None


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
            raise EnvironmentFault(sentence, "install the build of it that fits your torch, then run again") from None


def build_on_meta(config: Mapping[str, Any]) -> nn.Module:
    """Return a model as its config.json has it: parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights

    name = plain_class_name(config["_class_name"])
    cls = class_of_diffusers(name)
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
