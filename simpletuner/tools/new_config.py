"""A commented config file to start from, for a family and a number of GPUs."""

from __future__ import annotations

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_trainable, presets
from simpletuner.settings.resolving.loading import resolve
from simpletuner.settings.resolving.sources import from_flags
from simpletuner.settings.showing.schema import scaffold_toml


def new_config(model_family: str, model_flavour: str, num_processes: str) -> str:
    """Return the text of a TOML file. Raises SettingsError for a family that cannot be trained."""
    if not model_family:
        known = [name for name, preset in presets().items() if preset.family_class]
        raise SettingsError("--model_family is missing: say what to train", f"known families: {', '.join(known)}")
    flags = {"model_family": model_family, "model_flavour": model_flavour, "num_processes": num_processes}
    settings = resolve([from_flags(flags)], complete=False).settings
    check_trainable(settings.model)
    return scaffold_toml(settings)
