"""The class of a family, by the name in the settings."""

from __future__ import annotations

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import class_path_of, import_object, load_preset
from simpletuner.models.family.base import ModelFamily
from simpletuner.settings.declared.sections import Model


def family_class(model: Model) -> type[ModelFamily]:
    """Import a family's class. Raises SettingsError if a user's own cannot be imported, or is no ModelFamily."""
    path = class_path_of(model) or ""
    cls = import_object(path, f"model_families: {model.model_family} = {path}", "package.module:ClassName")
    if not (isinstance(cls, type) and issubclass(cls, ModelFamily)):
        is_what = f"the class {cls.__name__}" if isinstance(cls, type) else f"of type {type(cls).__name__}"
        raise SettingsError(
            f"model_families: {model.model_family} = {path}: it is {is_what}, but must be a subclass of ModelFamily",
            "write it as a class, `class MyFamily(ModelFamily)`: docs/families.md has a complete one",
        )
    missing = [*(["pipelines"] if not cls.pipelines else []), *sorted(cls.__abstractmethods__)]
    if missing:
        raise SettingsError(
            f"model_families: {model.model_family} = {path}: {cls.__name__} does not define {', '.join(missing)}",
            "docs/families.md has a complete family",
        )
    preset = None if model.model_family in (model.model_families or {}) else load_preset(model.model_family)
    if preset is not None and preset.is_automatic:
        # One class for all of them, each of which opens its own pipelines alone.
        return type(cls.__name__, (cls,), {"pipelines": tuple(preset.pipelines), "denoiser_name": preset.denoiser})
    return cls
