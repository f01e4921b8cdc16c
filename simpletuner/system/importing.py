"""Import a module named in a setting, also from the current folder, from which nothing else is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


def import_named(module: str) -> ModuleType:
    """Import `package.module`. Raises ImportError, or what the module raises."""
    # The current folder is not on sys.path of ranks: a file there could shadow a library. It is searched only for the
    # named module, and only if that is not installed.
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
