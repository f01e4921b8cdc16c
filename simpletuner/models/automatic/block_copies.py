"""Copies of a modular pipeline's blocks, through which gradients flow and which are given their noise.

Nothing here changes a module of diffusers: blocks get subclasses, with copies of functions that have globals of their
own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

PACKAGE = "diffusers.modular_pipelines."
FRAMEWORK = PACKAGE + "modular_pipeline"


class Copies:
    """Copies of blocks whose functions draw noise by one of ours, and leave out torch.no_grad."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.globals: dict[str, dict[str, Any]] = {}

    def block(self, block: Any) -> Any:
        """Return a copy of a block, with copies of those in it."""
        cls, own = type(block), copy.copy(block)
        functions = {name: self.member(each) for name, each in members(cls)}
        own.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **functions})
        own.sub_blocks = type(block.sub_blocks)((name, self.block(each)) for name, each in block.sub_blocks.items())
        return own

    def member(self, value: Any) -> Any:
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self.function(value.__func__))
        return self.function(value)

    def function(self, function: Any) -> Any:
        # torch.no_grad leaves the function that it decorates.
        plain = inspect.unwrap(function)
        code, own = plain.__code__, self.globals_of(plain.__globals__)
        made = FunctionType(code, own, plain.__name__, plain.__defaults__, plain.__closure__)
        made.__kwdefaults__ = plain.__kwdefaults__
        return made

    def globals_of(self, module: dict[str, Any]) -> dict[str, Any]:
        """Return a module's names with copies of all functions of modular pipelines among them."""
        name = module["__name__"]
        if name not in self.globals:
            own = self.globals[name] = {**module}
            functions = {key: each for key, each in module.items() if inspect.isfunction(each)}
            own |= {key: self.function(each) for key, each in functions.items() if each.__module__.startswith(PACKAGE)}
            if "randn_tensor" in own:
                own["randn_tensor"] = self.draw
        return self.globals[name]


def members(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a block's class, but for those of diffusers' base classes."""
    found: set[str] = set()
    for each in cls.__mro__:
        if each.__module__.startswith(PACKAGE) and each.__module__ != FRAMEWORK:
            for name, value in vars(each).items():
                is_function = inspect.isfunction(value) or isinstance(value, staticmethod | classmethod)
                if is_function and name not in found and name != "__init__":
                    found.add(name)
                    yield name, value
