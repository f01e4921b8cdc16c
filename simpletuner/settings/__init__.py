"""The settings layer: every setting declared once, strict, frozen, passed explicitly.

What is named here is imported when asked for: the list of settings (`declared/table.py`) needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpletuner.settings.declared.sections import Settings
    from simpletuner.settings.files.raw_values import Origin
    from simpletuner.settings.resolving.loading import Loaded, load, provenance, settings_as_json

__all__ = ["Loaded", "Origin", "Settings", "load", "provenance", "settings_as_json"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(name)
    place = {"Settings": "declared.sections", "Origin": "files.raw_values"}.get(name, "resolving.loading")
    return getattr(import_module(f"{__name__}.{place}"), name)
