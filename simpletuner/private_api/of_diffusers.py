"""Private API of diffusers, each with its reason. Seen in diffusers 0.42.1."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def context_parallel_splits(model: Any) -> Any:
    """Map modules of a denoiser to the inputs and outputs that are split over the sequence.

    The values have `split_dim` and `expected_dims`.
    """
    return model._cp_plan


def leave_out(packages: Iterable[str]) -> None:
    """Keep diffusers, transformers and accelerate from importing packages because they are installed.

    They look for them with importlib.util.find_spec, which finds none where sys.modules has None under the name; an
    import of one raises ModuleNotFoundError from here on. diffusers has looked for all when it was imported.
    """
    from diffusers import utils

    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
        setattr(utils.import_utils, f"_{package}_available", False)
        if package == "peft":
            modules: Any = (utils, utils.constants, utils.peft_utils)
            for module in modules:
                module.USE_PEFT_BACKEND = False


class LazyClass:
    """A class or module of a package that is imported when it is used; whether a class is one of it needs no import
    before the package has one."""

    def __init__(self, package: str, name: str) -> None:
        self.package, self.name = package, name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(import_module(self.package), self.name), name)

    def __subclasscheck__(self, other: type) -> bool:
        return self.package in sys.modules and issubclass(other, getattr(import_module(self.package), self.name))


@contextmanager
def imported_later(package: str, *names: str) -> Iterator[None]:
    """Have imports of these names from a package import it when they are used."""
    if package in sys.modules or (spec := find_spec(package)) is None:
        yield
        return
    sys.modules[package] = there = ModuleType(package)
    there.__spec__ = spec
    vars(there).update({name: LazyClass(package, name) for name in names})
    try:
        yield
    finally:
        del sys.modules[package]


def import_without_transformers() -> None:
    """Import what all denoisers of diffusers import, but for transformers, which a run with encoded data needs only for
    its pipeline. With the modules of transformers come DTensor, sympy and torch.distributed.checkpoint: 0.9 CPU s."""
    if "transformers" in sys.modules:
        return
    from diffusers import utils  # looks for transformers, which is there

    if utils.is_peft_available():  # which needs classes of transformers for its own
        return
    sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        import_module("diffusers.quantizers.pipe_quant_config")  # for type hints, which it does without
    finally:
        del sys.modules["transformers"]
    with imported_later("transformers", "PreTrainedModel", "AutoImageProcessor"):
        for module in ("lora_base", "single_file_utils"):
            import_module(f"diffusers.loaders.{module}")
    with imported_later("torchvision", "transforms"):  # 0.7 CPU s, which Cosmos alone needs
        import_module("diffusers.models.transformers")


def blocks_by_name(model: object) -> list[set[str]]:
    """Return the block classes of a model that are never split, and the ones compiled one by one."""
    return [set(getattr(model, name, None) or ()) for name in ("_no_split_modules", "_repeated_blocks")]


def modules_in_float32(model: object) -> tuple[str, ...]:
    """Parts of the names of modules that diffusers keeps in float32 whatever dtype is loaded."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
