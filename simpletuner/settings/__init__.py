"""The one settings layer: every knob once, strict, frozen, passed explicitly."""

from simpletuner.settings.loading import Loaded, load, settings_as_json
from simpletuner.settings.sections import Settings

__all__ = ["Loaded", "Settings", "load", "settings_as_json"]
