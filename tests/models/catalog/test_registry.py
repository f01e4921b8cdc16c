from __future__ import annotations

import pytest

from simpletuner.errors import ExitCode, SettingsError
from simpletuner.models.catalog.registry import TINY, check_model, check_trainable, flavour_of, flavours_of, presets
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.settings.declared.sections import Model


@pytest.mark.parametrize("key", presets())
def test_a_preset_leads_to_a_class_and_to_published_flavours(key):
    if presets()[key].family_class:
        cls = family_class(Model(model_family=key))
        assert issubclass(cls, ModelFamily)
        assert list(presets()[key].pipelines) == [name for each in (cls, *cls.variants()) for name in each.pipelines]
    assert flavours_of(key) or key == "flux3", "of FLUX.3 nothing is published yet"


@pytest.mark.parametrize("key", presets())
def test_every_flavour_is_known_and_the_tiny_one_where_there_is_one(key):
    for flavour in ("", *flavours_of(key)):
        check_model(Model(model_family=key, model_flavour=flavour))
    tiny = Model(model_family=key, model_flavour=TINY)
    if presets()[key].tiny is not None:
        check_model(tiny)
        return
    with pytest.raises(SettingsError) as caught:
        check_model(tiny)
    assert caught.value.message == f"{key} has no flavour `tiny`"
    assert caught.value.hint == f"known flavours: {', '.join(flavours_of(key))}"


def test_no_flavour_is_called_as_the_tiny_one():
    assert not any(TINY in flavours_of(key) for key in presets())


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ({"model_family": "sdlx"}, "Unknown model_family 'sdlx'; did you mean `sdxl`?", "simpletuner models"),
        ({"model_family": "fluks"}, "Unknown model_family 'fluks'; did you mean `flux`?", "simpletuner models"),
        ({"model_family": "zzzzzz"}, "Unknown model_family 'zzzzzz'", "simpletuner models"),
        (
            {"model_family": "flux", "model_flavour": "crea"},
            "Unknown model_flavour 'crea' of flux; did you mean `krea`?",
            "krea, dev, schnell, fluxbooru, kontext, libreflux, tiny",
        ),
        (
            {"model_family": "sdxl", "model_flavour": "tinny"},
            "Unknown model_flavour 'tinny' of sdxl; did you mean `tiny`?",
            "tiny",
        ),
    ],
)
def test_an_unknown_family_or_flavour_names_the_nearest(model, message, hint):
    with pytest.raises(SettingsError) as caught:
        check_model(Model(**model))
    assert caught.value.message == message
    assert hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


UNTRAINABLE = [(key, name) for key in presets() for name, each in flavours_of(key).items() if each.untrainable]


@pytest.mark.parametrize(("key", "name"), UNTRAINABLE)
def test_a_flavour_that_cannot_be_trained_is_refused_with_its_reason_but_a_folder_is_the_user_s_word(key, name):
    asked, reason = [name, ""] if name == next(iter(flavours_of(key))) else [name], flavours_of(key)[name].untrainable
    for flavour in asked:
        with pytest.raises(SettingsError) as caught:
            check_trainable(Model(model_family=key, model_flavour=flavour))
        assert f"{key} {name}" in caught.value.message and reason in caught.value.message
        if flavour and presets()[key].family_class:
            assert caught.value.message == f"{key} {name} cannot be trained: {reason}"
    for own in ("somebody/weights", "folder"):
        check_trainable(Model(model_family=key, model_flavour=name, pretrained_model_name_or_path=own))


def test_the_published_weights_are_those_of_the_flavour_or_of_the_first():
    schnell = flavour_of(Model(model_family="flux", model_flavour="schnell"))
    assert schnell is not None and schnell.hub == "black-forest-labs/FLUX.1-schnell"
    first = flavour_of(Model(model_family="sdxl"))
    assert first is not None and first.hub == "stabilityai/stable-diffusion-xl-base-1.0"
    assert flavour_of(Model(model_family="sdxl", model_flavour=TINY)) is None


def test_a_family_is_understood_in_any_case():
    check_trainable(Model(model_family="SDXL"))


@pytest.mark.parametrize("key", [key for key, preset in presets().items() if not preset.family_class])
def test_a_family_known_by_its_architecture_alone_cannot_be_trained(key):
    with pytest.raises(SettingsError, match=rf"\b{key} cannot be trained: "):
        check_trainable(Model(model_family=key))
