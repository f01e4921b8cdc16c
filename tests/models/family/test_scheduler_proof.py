"""A scheduler that samples otherwise than the class of a flow family trains is refused before anything is encoded."""

from __future__ import annotations

import pytest

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.catalog.registry import presets
from simpletuner.models.family.base import family_class
from simpletuner.settings.declared.sections import Model, Settings

FLOWS = [key for key, each in presets().items() if each.has_class and each.objective == "flow"]


@pytest.mark.parametrize("key", FLOWS)
def test_a_scheduler_that_samples_otherwise_than_a_class_trains_is_refused(key, pipelines):
    """T103: SD3, FLUX and Qwen-Image trained with them, and `models --check` refused them."""
    model = Model(model_family=key, pretrained_model_name_or_path=str(pipelines(key)))
    family = family_class(model).open(pipelines(key), Settings(model=model))
    own = dict(family.scheduler_config)
    family.objective()
    is_euler = "FlowMatchEuler" in type(family.scheduler()).__name__
    bad = [{"num_train_timesteps": 2000}, {"num_train_timesteps": 100}]
    bad += [{"invert_sigmas": True}] if is_euler else [{"prediction_type": "sample"}]
    for changed in bad:
        family.scheduler_config = own | changed
        with pytest.raises(
            EnvironmentNotReady, match=f"model_family={key} would train what it does not sample"
        ) as caught:
            family.objective()
        assert "scheduler_config.json" in caught.value.hint and "model_family=auto" in caught.value.hint
    good = [{"shift": 12.0}, {"use_karras_sigmas": True}, {"shift_terminal": 0.1}, {"stochastic_sampling": True}]
    for changed in good if is_euler else [{"flow_shift": 12.0}]:
        family.scheduler_config = own | changed
        family.objective()
