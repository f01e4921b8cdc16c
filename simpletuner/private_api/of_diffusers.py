"""Private API of diffusers, each with its reason. Seen in diffusers 0.42.1."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any, cast


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
    with distributions_read_later():
        from diffusers import utils

    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
        setattr(utils.import_utils, f"_{package}_available", False)
        if package == "peft":
            modules: Any = (utils, utils.constants, utils.peft_utils)
            for module in modules:
                module.USE_PEFT_BACKEND = False


class Distributions(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions` that reads all distributions only when asked."""

    @cached_property
    def found(self) -> Mapping[str, list[str]]:
        return packages_distributions()

    def __getitem__(self, name: str) -> list[str]:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


@contextmanager
def distributions_read_later() -> Iterator[None]:
    """Have diffusers.utils.import_utils, imported within, look for the distributions of packages when it has to: of
    those that there are at import, three backends of quantization. That takes 0.07 CPU s with 140 distributions."""
    metadata.packages_distributions = Distributions
    try:
        yield
    finally:
        metadata.packages_distributions = packages_distributions


class LazyClass:
    """A class or module of a package that is imported when it is used; whether something is one of it needs
    no import before the package has one. A class that is derived from it is derived from nothing."""

    def __init__(self, package: str, name: str) -> None:
        self.package, self.name = package, name

    def __getattr__(self, name: str) -> object:
        if isinstance(named := getattr(import_module(self.package), self.name), LazyClass):  # it is still left out
            raise AttributeError(f"{self.name} is imported later", name=name, obj=self)
        return getattr(named, name)

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def __or__(self, _: object) -> LazyClass:
        return self  # in a type hint

    __ror__ = __or__

    def __subclasscheck__(self, other: type) -> bool:
        named = getattr(sys.modules.get(self.package), self.name, None)
        return isinstance(named, type) and issubclass(other, named)

    def __instancecheck__(self, other: object) -> bool:
        return self.__subclasscheck__(type(other))


class LazyModule(ModuleType):
    """Stand-in for a module of a package, of which all that its source names is a LazyClass."""

    def __getattr__(self, name: str) -> object:
        source = self.__spec__.origin if self.__spec__ is not None and not name.startswith("__") else None
        # The package itself makes its names from lists of its modules.
        if source is None or ("." in self.__name__ and name not in Path(source).read_text("utf-8")):
            raise AttributeError(f"module {self.__name__} has no {name}", name=name, obj=self)
        return LazyClass(self.__name__, name)


class LazyFinder:
    """Finder of a package whose modules get stand-ins: of existing ones, as peft asks for its version."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None = None, _: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        spec.loader = cast(Any, self)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == self.package:
            module.__version__ = version(self.package)  # type: ignore[attr-defined]


@contextmanager
def imported_later(package: str) -> Iterator[None]:
    """Have what is imported from a package and its modules import it when it is used."""
    if package in sys.modules:
        yield
        return
    sys.meta_path.insert(0, finder := LazyFinder(package))
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, LazyModule)]:
            del sys.modules[name]


SEEN_PEFT = "0.21."


def import_without_transformers() -> None:
    """Import what all denoisers of diffusers import, but for transformers, which a run with encoded data needs only for
    its pipeline. With the modules of transformers come DTensor, sympy and torch.distributed.checkpoint: 0.9 CPU s, and
    1.4 with those that peft asks for."""
    if "transformers" in sys.modules:
        return
    from diffusers import utils  # looks for transformers, which is there

    if has_peft := utils.is_peft_available():
        if not version("peft").startswith(SEEN_PEFT):  # which may need more of them in its import
            return
        with imported_later("transformers"):
            import_module("peft")
        if "torch.distributed.tensor" not in sys.modules:
            import torch  # here, since the page, which names blocks, starts without it

            # peft asks if a weight is a DTensor. A module, since the package imports its own meanwhile.
            name: str = "torch.distributed.tensor"
            stub: Any = ModuleType(name)
            stub.DTensor = LazyClass(name, "DTensor")
            torch.distributed.__dict__["tensor"] = stub
    sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        import_module("diffusers.quantizers.pipe_quant_config")  # for type hints, which it does without
    finally:
        del sys.modules["transformers"]
    with imported_later("transformers"):
        for module in ("lora_base", "single_file_utils", *(["peft"] if has_peft else [])):
            import_module(f"diffusers.loaders.{module}")
    with imported_later("torchvision"):  # 0.7 CPU s, which Cosmos alone needs
        import_module("diffusers.models.transformers")


def keep_signatures(model: Any) -> None:
    """Keep the signatures of a model's attention processors where Python looks first.

    diffusers' attention works them out at each call, to know what a processor takes, in 0.028 ms of a CPU, then in
    0.008 (findings/diffusers-attention-inspects-each-call.sh).
    """
    for module in model.modules():
        processor = type(getattr(module, "processor", None))
        if "__call__" in vars(processor):
            vars(processor)["__call__"].__signature__ = inspect.signature(processor.__call__)


def blocks_by_name(model: object) -> list[set[str]]:
    """Return the block classes of a model that are never split, and the ones compiled one by one."""
    return [set(getattr(model, name, None) or ()) for name in ("_no_split_modules", "_repeated_blocks")]


def modules_in_float32(model: object) -> tuple[str, ...]:
    """Parts of the names of modules that diffusers keeps in float32 whatever dtype is loaded."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
