"""Imports: of modules named in settings (also from the current folder), and without garbage collection."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def import_named(module: str) -> ModuleType:
    """Import `package.module`. Raises ImportError, or what the module raises."""
    # The current folder is not on sys.path of ranks: a file there could shadow a library. It is searched only
    # for the named module, and only if that is not installed.
    top = module.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        spec = PathFinder.find_spec(top, [str(Path.cwd())])
        if spec is not None and spec.loader is not None:
            sys.modules[top] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[top])
            except BaseException:
                del sys.modules[top]
                raise
    return importlib.import_module(module)


@contextmanager
def no_collection() -> Iterator[None]:
    """Import libraries without garbage collection, and leave their objects out of later collections.

    It finds nothing in modules that are still being imported: torch takes 2.6 CPU seconds without it instead
    of 3.5, the classes of models 2.0 instead of 2.4. Half a million objects of theirs stay.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()


class AfterImport:
    """Finder that does something with a module as soon as it has been imported."""

    def __init__(self, module: str, action: Callable[[ModuleType], None]) -> None:
        self.module, self.action = module, action

    def find_spec(self, name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.action(module)

            spec.loader.exec_module = execute_and_act
        return spec


def when_imported(module: str, action: Callable[[ModuleType], None]) -> None:
    """Do something with a module now, or as soon as it is imported."""
    if module in sys.modules:
        action(sys.modules[module])
    else:
        sys.meta_path.insert(0, AfterImport(module, action))
