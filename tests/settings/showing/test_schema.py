"""The JSON Schema that editors use agrees with what the loader accepts and refuses."""

from __future__ import annotations

import json

import pytest
from generated_settings import NOWHERE, loaded_settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from jsonschema import Draft202012Validator

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.settings import load, settings_as_json
from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, setting_fields
from simpletuner.settings.showing.scaffold import json_schema, options_page
from simpletuner.settings.values.spelling import choices_of

SCHEMA = Draft202012Validator(json_schema(presets()))


def mistakes(values: dict) -> list[str]:
    return [error.message for error in SCHEMA.iter_errors(values)]


def test_the_schema_is_one_and_knows_every_setting():
    Draft202012Validator.check_schema(SCHEMA.schema)
    known = set(SCHEMA.schema["properties"])
    assert {*setting_fields(), "$schema", "accelerate_config"} <= known
    assert all(
        SCHEMA.schema["properties"][name]["deprecated"]
        for name in known - {*setting_fields(), "$schema", "accelerate_config"}
    )
    assert all("description" in entry for name, entry in SCHEMA.schema["properties"].items() if name != "$schema")


def test_the_schema_keeps_section_unit_bounds_and_choices_as_data():
    properties = SCHEMA.schema["properties"]
    for name, field in setting_fields().items():
        entry = properties[name]
        assert entry["x-section"] == SECTIONS[SECTION_OF[name]].__doc__
        assert entry.get("x-unit", "") == field.json_schema_extra["unit"]
        option = next((part for part in entry.get("anyOf", ()) if part["type"] != "null"), entry)
        choices = list(choices_of(field.annotation))
        assert option.get("enum", []) == choices, name
    assert properties["node_timeout"]["x-unit"] == "s"
    assert properties["main_process_port"]["minimum"] == 1 and properties["main_process_port"]["maximum"] == 65535


def test_every_default_is_valid():
    assert mistakes(settings_as_json(load({}, complete=False, environment=NOWHERE))) == []


@given(loaded_settings())
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_valid_setting_is_valid_by_the_schema(loaded):
    assert mistakes(settings_as_json(loaded)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lerning_rate", 1),
        ("SEED", 1),
        ("seed", -1),
        ("seed", "x"),
        ("seed", 1.5),
        ("ema_decay", 1),
        ("learning_rate", 0),
        ("mixed_precision", "fp16"),
        ("fsdp_version", 3),
        ("crop", "perhaps"),
        ("validation_prompt", 3),
        ("validation_prompt", [1]),
        ("deepspeed_config", [1]),
        ("aspect_bucket_alignment", 257),
        ("main_process_port", 70000),
        ("checkpoint_step_interval", None),
    ],
)
def test_what_the_schema_refuses_the_loader_refuses_too_unless_it_is_spelling(tmp_path, name, value):
    assert len(mistakes({name: value})) == 1
    path = tmp_path / "c.json"
    path.write_text(json.dumps({name: value}))
    if name == "SEED":  # any case is accepted; the schema shows the usual one
        assert load({}, path, complete=False, environment=NOWHERE).settings.training.seed == 1
    else:
        with pytest.raises(SettingsError, match=name):
            load({}, path, complete=False, environment=NOWHERE)


def test_what_a_file_may_hold_beside_settings_is_accepted_by_both(tmp_path):
    values = {"$schema": "simpletuner.schema.json", "accelerate_config": "none", "--seed": 3, "seed_": 1}
    assert mistakes(values) == ["'seed_' does not match any of the regexes: '^--'"]
    values.pop("seed_")
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    assert load({}, path, complete=False, environment={}).settings.training.seed == 3


def test_older_names_are_accepted_by_both():
    aliases = {alias: name for name, field in setting_fields().items() for alias in field.json_schema_extra["aliases"]}
    assert aliases
    for alias, name in aliases.items():
        value = settings_as_json(load({}, complete=False, environment=NOWHERE))[name]
        assert mistakes({alias: value}) == []
        assert load({alias: value}, complete=False, environment=NOWHERE).origins.keys() == {name}


def test_lists_and_json_may_be_text_in_both(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": 1}')
    values = {"validation_prompt": "a cat", "deepspeed_config": str(tmp_path / "ds.json")}
    assert mistakes(values) == []
    settings = load(values, complete=False, environment=NOWHERE).settings
    assert settings.validation.validation_prompt == ["a cat"]
    assert settings.parallel.deepspeed_config == {"steps_per_print": 1}


def test_the_page_of_settings_names_each_of_them_once():
    page = options_page()
    assert [page.count(f"\n| `{name}` |") for name in setting_fields()] == [1] * len(setting_fields())
