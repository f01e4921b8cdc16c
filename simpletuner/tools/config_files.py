"""Config files that are written: one to start from, and settings in the formats of other programs."""

from __future__ import annotations

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_trainable, presets
from simpletuner.models.catalog.support import check_context_parallel
from simpletuner.settings import Loaded
from simpletuner.settings.resolving.loading import resolve
from simpletuner.settings.resolving.places import naming_places
from simpletuner.settings.resolving.sources import from_flags
from simpletuner.settings.showing.export import Exported, export
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


def export_checked(loaded: Loaded, to: str, everything: bool) -> Exported:
    """Return settings in a format, after the checks that are made before a file is written.

    Raises SettingsError for a denoiser that cannot be split, and for a format that cannot say them.
    """
    with naming_places(loaded.origins, "model_family", "model_flavour", "context_parallel_size"):
        check_context_parallel(loaded.settings)
    return export(loaded, to, everything)
