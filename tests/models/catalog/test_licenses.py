"""Licences of published weights: each preset's names are known, and a card says that of its base model."""

from __future__ import annotations

from simpletuner.models.catalog.registry import LICENSES, describe_license, license_of, presets
from simpletuner.settings.declared.sections import Model
from simpletuner.training.publishing.model_card import front_matter


def test_every_licence_of_a_preset_is_known_and_one_repository_has_one():
    flavours = [flavour for preset in presets().values() for flavour in preset.flavours.values()]
    by_hub = {flavour.hub: {each.license for each in flavours if each.hub == flavour.hub} for flavour in flavours}
    assert all(len(names) == 1 for names in by_hub.values())
    assert {name for names in by_hub.values() for name in names} - {""} == {*LICENSES}


def test_a_card_has_the_licence_of_its_base_model():
    def keys(**model: str) -> dict[str, str]:
        data = front_matter(Model(model_type="full", **model), []).to_dict()
        return {name: value for name, value in data.items() if name.startswith("license")}

    assert keys(model_family="flux", model_flavour="schnell") == {"license": "apache-2.0"}
    assert keys(model_family="flux", pretrained_model_name_or_path="black-forest-labs/FLUX.1-dev") == {
        "license": "other",
        "license_name": "flux-1-dev-non-commercial-license",
        "license_link": "https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md",
    }
    assert keys(model_family="flux", model_flavour="tiny") == keys(model_family="sana") == {}
    assert license_of(None) == "" and describe_license("apache-2.0") == "apache-2.0; commercial use: yes"
