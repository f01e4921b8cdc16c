"""The settings layer: every setting declared once, strict, frozen, passed explicitly."""

from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.files.raw_values import Origin
from simpletuner.settings.resolving.loading import Loaded, load, provenance, settings_as_json

__all__ = ["Loaded", "Origin", "Settings", "load", "provenance", "settings_as_json"]
