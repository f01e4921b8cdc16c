"""Access to diffusers: classes of a pipeline's components, models on the meta device, casting of inputs."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.folder.malformed import CHECK_COPY
from simpletuner.models.folder.weights import index_file
from simpletuner.run_log import start_run_log, stop_run_log, take_over
from simpletuner.system.importing import when_imported

TEXT_PARTS = ("tokenizer", "text_encoder", "t5_tokenizer", "text_conditioner", "processor", "connectors")
"""Prefixes of the components that turn captions into tensors."""

# Components of text encoding, and the image encoder for an image beside a caption (Wan 2.1 I2V).
ENCODING_PARTS = (*TEXT_PARTS, "image_encoder", "image_processor")


def choose_accelerator() -> None:
    """Name the device to DeepSpeed, which saving a pipeline imports where it is installed.

    It would print what it detects to stdout otherwise.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def silence_libraries() -> None:
    """Keep progress bars of libraries off the terminal, and their remarks in the log."""
    for name in ("diffusers", "transformers"):
        # transformers may not be imported before the run has to encode something.
        when_imported(f"{name}.utils.logging", partial(silence_library, name))
    # Flux returns a view, which FSDP2 warns about at each forward; nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def silence_library(name: str, library: Any) -> None:
    library.set_verbosity_warning()
    library.disable_progress_bar()
    take_over(name)


@contextmanager
def libraries_silenced() -> Iterator[None]:
    """Keep all that libraries print off the terminal, in a command that has no log of a run."""
    start_run_log("")
    try:
        silence_libraries()
        yield
    finally:
        stop_run_log()


def text_folders(folder: Path) -> list[Path]:
    """The folders that decide what a caption's embedding is."""
    return sorted(path for path in folder.iterdir() if path.name.startswith(ENCODING_PARTS))


def refuse_second_denoiser(folder: Path, index: Mapping[str, object], name: str) -> None:
    """Raise SettingsError for a pipeline of two denoisers, each for its own range of noise (Wan 2.2 A14B)."""
    if any(index.get(f"{name}_2") or ()):
        raise SettingsError(
            f"{folder} has two denoisers, {name} and {name}_2, each for its own noise levels",
            "choose a model with one: `simpletuner models` lists what can be trained",
        )


def diffusers_class(name: str) -> Any:
    """Raises EnvironmentNotReady when the installed version of diffusers does not have the class."""
    import diffusers

    try:
        return getattr(diffusers, name)
    except AttributeError:
        raise EnvironmentNotReady(
            f"diffusers {diffusers.__version__} has no {name}",
            "pip install --upgrade diffusers, or choose another model",
        ) from None


def component_class(index: Mapping[str, object], name: str, folder: Path) -> Any:
    """The class of diffusers or transformers that model_index.json names for a component.

    Raises EnvironmentNotReady for an entry that names none, and for other libraries.
    """
    entry = index.get(name)
    if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)):
        raise EnvironmentNotReady(
            f"{index_file(folder)} names no {name}: it has {entry!r:.60} there, no library and class",
            CHECK_COPY,
        )
    library, cls = entry
    if library == "diffusers":
        return diffusers_class(cls)
    module = component_module(library)
    if module is None:
        raise EnvironmentNotReady(
            f"{index_file(folder)} takes {name} from {library!r:.60}, which is not read",
            "only components of diffusers and transformers are",
        )
    if not hasattr(module, cls):
        package = module.__name__.partition(".")[0]
        raise EnvironmentNotReady(
            f"{package} {version(package)} has no {cls}", f"pip install --upgrade {package}, or choose another model"
        )
    return getattr(module, cls)


def component_module(library: str) -> ModuleType | None:
    """Import transformers, or the package of one of diffusers' pipelines: Kolors' has its text encoder."""
    from diffusers import pipelines

    if library == "transformers":
        return import_module(library)
    # Importing whatever module a downloaded index names would run its code.
    known = {each.name for each in iter_modules(pipelines.__path__)}
    return import_module(f"{pipelines.__name__}.{library}") if library in known else None


def require_packages(components: Iterable[Sequence[str]]) -> None:
    """Raise EnvironmentNotReady if a (library, class) of a pipeline needs a package that is not installed."""
    import transformers

    for library, name in components:
        try:
            if library == "transformers":
                # In place of a class whose package is missing transformers has a dummy, which raises here and
                # names the package. diffusers, which would load the class later, does not name it.
                getattr(transformers, name).from_pretrained  # noqa: B018
        except ImportError as error:
            sentence = str(error).strip().partition(".")[0]
            raise EnvironmentNotReady(
                sentence, "install the build of it that fits your torch, then run again"
            ) from None


def build_on_meta(config: Mapping[str, object], include_buffers: bool = False) -> nn.Module:
    """Build a model from its config.json: parameters on the meta device, buffers with their values, or there
    as well.

    Those of Stable Diffusion 3.5 medium are 864 MiB of positions, which take seconds to compute (16 CPU s,
    measured by hand once).
    """
    from accelerate import init_empty_weights
    from diffusers import ModelMixin
    from diffusers.models.modeling_utils import no_init_weights

    name = config["_class_name"]
    cls = diffusers_class(name)
    if not (isinstance(cls, type) and issubclass(cls, ModelMixin)):
        raise EnvironmentNotReady(f"{name} is no model of diffusers", "name a denoiser's folder")
    with init_empty_weights(include_buffers), no_init_weights():  # filling what has no memory takes 40 % of it
        return cls.from_config({**config, "_class_name": name})


def cast_floating(value: Any, dtype: torch.dtype, except_for: Collection[str], name: str = "") -> Any:
    """Cast floating-point tensors in a nesting of dicts and lists, but for those below some keys."""
    if isinstance(value, dict):
        return {key: cast_floating(each, dtype, except_for, key) for key, each in value.items()}
    if isinstance(value, list):
        return [cast_floating(each, dtype, except_for, name) for each in value]
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating and name not in except_for else value


@contextmanager
def cast_inputs(model: nn.Module, dtype: torch.dtype, except_for: Collection[str]) -> Iterator[None]:
    hook = cast_always(model, dtype, except_for)
    try:
        yield
    finally:
        hook.remove()


def cast_always(model: nn.Module, dtype: torch.dtype, except_for: Collection[str]) -> RemovableHandle:
    """Cast the floating-point inputs of a denoiser's calls, by name in `forward` or in a dict of it."""
    # Pipelines cast prompts to `model.dtype`. Of a sharded model that is float32, the dtype of its master
    # weights, but it computes in `dtype`.
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def before_forward(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Any, Any]:
        cast = [cast_floating(value, dtype, except_for, name) for name, value in zip(names, args, strict=False)]
        return tuple(cast), cast_floating(kwargs, dtype, except_for)

    return model.register_forward_pre_hook(before_forward, with_kwargs=True)
