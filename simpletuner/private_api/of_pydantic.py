"""Private API of pydantic."""

from __future__ import annotations

import os
import sys
from types import ModuleType


def leave_out_plugins() -> None:
    """Import no plugins of pydantic, unless PYDANTIC_DISABLE_PLUGINS says which.

    With that variable pydantic reads none, and imports importlib.metadata all the same: 0.02 CPU s of a
    command that takes 0.3.
    """
    if "PYDANTIC_DISABLE_PLUGINS" not in os.environ:
        loader = ModuleType("pydantic.plugin._loader")
        vars(loader)["get_plugins"] = lambda: ()
        sys.modules.setdefault(loader.__name__, loader)
