"""Import what a setting names, `package.module`, from the current folder as well, and nothing else from there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


def import_named(module: str) -> ModuleType:
    """Return a module that a setting names. Raises ImportError, or what the module raises.

    The current folder is not on the path of ranks, where any file in it could take the place of a library. A named
    module, or the package that holds it, is found there if it is installed nowhere.
    """
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
