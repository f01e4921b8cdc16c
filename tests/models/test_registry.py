from __future__ import annotations

import inspect

import pytest

from simpletuner.errors import ExitCode, SettingsError
from simpletuner.models.family import Family
from simpletuner.models.registry import FAMILIES, TINY, check_model, family_class, published_name
from simpletuner.settings.sections import Model


@pytest.mark.parametrize("key", sorted(FAMILIES))
def test_every_row_leads_to_a_class_that_answers_all_questions(key):
    family = family_class(key)
    assert family.key == key
    questions = [name for name, value in vars(Family).items() if inspect.isfunction(value) and name[0] != "_"]
    questions += ["build_tiny", "denoiser_name", "blocks"]
    assert len(questions) >= 11
    assert [name for name in questions if not hasattr(family, name)] == []
    for name in questions:
        asked, answered = getattr(Family, name, None), getattr(family, name)
        if inspect.isfunction(asked):
            assert list(inspect.signature(answered).parameters) == list(inspect.signature(asked).parameters), name


@pytest.mark.parametrize("key", sorted(FAMILIES))
def test_every_flavour_and_the_tiny_one_are_known(key):
    for flavour in ("", TINY, *FAMILIES[key].flavours):
        check_model(Model(model_family=key, model_flavour=flavour))


def test_no_flavour_is_called_as_the_tiny_one():
    assert not any(TINY in entry.flavours for entry in FAMILIES.values())


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ({"model_family": "sdlx"}, "Unknown model_family 'sdlx'; did you mean `sdxl`?", "sdxl, flux"),
        ({"model_family": "fluks"}, "Unknown model_family 'fluks'; did you mean `flux`?", "sdxl, flux"),
        ({"model_family": "zzzzzz"}, "Unknown model_family 'zzzzzz'", "sdxl, flux"),
        (
            {"model_family": "flux", "model_flavour": "crea"},
            "Unknown model_flavour 'crea' of flux; did you mean `krea`?",
            "dev, krea, schnell, tiny",
        ),
        (
            {"model_family": "sdxl", "model_flavour": "tinny"},
            "Unknown model_flavour 'tinny' of sdxl; did you mean `tiny`?",
            "tiny",
        ),
    ],
)
def test_an_unknown_family_or_flavour_names_the_nearest_and_all(model, message, hint):
    with pytest.raises(SettingsError) as caught:
        check_model(Model(**model))
    assert caught.value.message == message
    assert hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


def test_the_published_weights_are_those_of_the_flavour_or_of_the_first():
    assert published_name(Model(model_family="flux", model_flavour="schnell")) == "black-forest-labs/FLUX.1-schnell"
    assert published_name(Model(model_family="sdxl")) == "stabilityai/stable-diffusion-xl-base-1.0"


def test_a_family_is_understood_in_any_case():
    check_model(Model(model_family="SDXL"))
