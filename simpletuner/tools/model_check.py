"""`simpletuner models --check`: the proof of model_family=auto, and of a class against its pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from simpletuner.counting.clip_lengths import frame_step_of
from simpletuner.errors import SettingsError
from simpletuner.models.automatic.comparison import compare_class
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.automatic.findings import Check
from simpletuner.models.automatic.pipeline_run import REFUSED
from simpletuner.models.catalog.registry import AUTO, presets
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.opening.loading import load_family
from simpletuner.parallel.world import joined_world
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.system.processes.signals import StopRequest

CHECKED = "checked"
"""Name of a class that is only checked, among the user's families."""


@dataclass(frozen=True)
class CheckedModel:
    """The checks of one pipeline up to the first that it does not pass."""

    model: str
    pipeline: str
    checks: tuple[Check, ...]
    facts: Mapping[str, str]
    """Facts as a run records them; empty if the proof failed."""
    refusal: SettingsError | None

    def as_json(self) -> dict[str, object]:
        return {
            "pretrained_model": self.model,
            "pipeline": self.pipeline,
            "passed": self.refusal is None,
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            "proven": dict(self.facts),
            "refusal": self.refusal.message if self.refusal else None,
        }


def check_model_folder(name: str, class_path: str) -> CheckedModel:
    """Prove a pipeline, a folder or hub id, on its own components, then compare a class with it.

    The class is that of the import path, or else of the built-in family of such pipelines, if there is one.
    Raises SimpleTunerError for a pipeline that cannot be opened.
    """
    model = Model(model_family=AUTO, pretrained_model_name_or_path=name)
    refusal, facts = None, dict[str, str]()
    with libraries_silenced(), joined_world({}) as world:
        auto = load_family(Settings(model=model), world, StopRequest().check)
        assert isinstance(auto, AutomaticFamily)
        by_class, shape = class_for(auto, class_path), SMALLEST
        refusal, checks = prove_captions_and_images(auto, world.device)
        is_given = auto.smallest_sample().is_given or (refusal is None and auto.found.images is not None)
        if refusal is None:
            if not is_given:
                shape, checks = prove_clips(auto, checks, world.device)
            facts |= auto.facts()
            if by_class is not None and not auto.smallest_sample().is_given:  # on captions alone
                checks += compare_class(by_class, auto, shape, world.device)
                refusal = difference(by_class, checks)
    return CheckedModel(name, str(auto.index.get("_class_name")), tuple(checks), facts, refusal)


def prove_clips(auto: AutomaticFamily, checks: list[Check], device: torch.device) -> tuple[Shape, list[Check]]:
    """Shape at which a class is compared, and all checks: on clips too, where a pipeline makes them."""
    if auto.found.layout.frames is None:
        return SMALLEST, checks
    clip = SMALLEST._replace(frames=1 + frame_step_of(auto.vae_config))
    try:
        auto.prove([SMALLEST, clip], device)
    except SettingsError as error:  # images can be trained
        return SMALLEST, [*checks, Check("clips", f"not trained: {error.message.partition(f'{REFUSED}: ')[2]}")]
    return clip, [*auto.checks]


def prove_captions_and_images(auto: AutomaticFamily, device: torch.device) -> tuple[SettingsError | None, list[Check]]:
    """Prove a pipeline on captions alone, and where its call may be given an image, on that as well.

    Returns why neither is trained, and the checks.
    """
    smallest = auto.smallest_sample()
    refusal = refusal_of(auto, [smallest], device)
    checks = [*auto.checks]
    if smallest.is_given or auto.image_parameter is None:
        return refusal, checks
    without = [] if refusal else [smallest]
    why = refusal_of(auto, [auto.sample_with_image(), *without], device)
    if why is None:
        return None, [*auto.checks]
    said = "image", f"not trained: {why.message.partition(f'{REFUSED}: ')[2]}"
    return refusal, [*checks, Check(*said)]


def refusal_of(auto: AutomaticFamily, samples: list[SampleShape], device: torch.device) -> SettingsError | None:
    try:
        auto.prove(samples, device)
    except SettingsError as error:
        return error
    return None


def difference(by_class: ModelFamily, checks: Sequence[Check]) -> SettingsError | None:
    """Return the error for a class that does something else than the pipeline, if it does."""
    failed = next((check for check in checks if not check.passed), None)
    return failed and SettingsError(
        f"the class differs from the pipeline's own run: {failed.name} of {type(by_class).__name__} is off by "
        f"{failed.off:.2g}",
        "correct the class, or train with --model_family=auto",
    )


def class_for(auto: AutomaticFamily, path: str) -> ModelFamily | None:
    """Open a proven folder by the class of an import path, or of the built-in family, if any."""
    named = auto.index.get("_class_name")
    if path:
        model = Model(model_family=CHECKED, model_families={CHECKED: path})
    else:
        family = next((key for key, each in presets().items() if each.has_class and named in each.pipelines), None)
        if family is None:
            return None
        model = Model(model_family=family)
    return family_class(model).open(auto.folder, Settings(model=model))
