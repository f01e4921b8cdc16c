"""Export settings after the checks that are made before a file is written."""

from __future__ import annotations

from simpletuner.models.catalog.support import check_context_parallel
from simpletuner.settings import Loaded
from simpletuner.settings.resolving.places import naming_places
from simpletuner.settings.showing.export import Exported, export


def export_checked(loaded: Loaded, to: str, everything: bool) -> Exported:
    """Return settings in a format.

    Raises SettingsError for a denoiser that cannot be split, and for a format that cannot say them.
    """
    with naming_places(loaded.origins, "model_family", "model_flavour", "context_parallel_size"):
        check_context_parallel(loaded.settings)
    return export(loaded, to, everything)
