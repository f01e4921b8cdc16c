"""The settings layer: every setting declared once, strict, frozen, passed explicitly."""

from simpletuner.settings.loading import Loaded, load, provenance, settings_as_json
from simpletuner.settings.raw_values import Origin
from simpletuner.settings.sections import Settings

__all__ = ["Loaded", "Origin", "Settings", "load", "provenance", "settings_as_json"]
