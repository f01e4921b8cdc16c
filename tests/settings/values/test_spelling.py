from __future__ import annotations

import json
from typing import Literal

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.commands.options import normalize_argv
from simpletuner.settings import load, settings_as_json
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.values.spelling import SYNONYMS, WORDS_FOR_FALSE, WORDS_FOR_TRUE, choices_of, normalize_value

ENOUGH = {"model_family": "sdxl", "instance_data_dir": "pictures", "model_type": "full", "instance_prompt": "x"}
SPLIT = {"fsdp_enable": True, "context_parallel_size": 2, "num_processes": 2}
"""Without it the strategy of context parallelism is reset."""
OFFLOAD = {"zero_stage": 3, "offload_param_path": "/nvme"}
BESIDE = {"context": SPLIT, "offload": OFFLOAD, "base": {"model_type": "lora", "base_model_precision": "int8"}}
"""What choices need beside them, by the first word of their setting."""
CHOICES = {
    name: choices_of(field.annotation) for name, field in setting_fields().items() if choices_of(field.annotation)
}
ACCEPTED = [(name, choice) for name, choices in CHOICES.items() for choice in choices]

RUNS_AS = {("fsdp_version", "1"): 2}
"""Choices that are understood, and recorded as what runs instead."""


@st.composite
def spellings(draw, choice):
    """Any case of each letter, dash or underscore for each of them, blanks around."""
    turned = [
        draw(st.sampled_from("-_")) if letter in "-_" else draw(st.sampled_from([letter.lower(), letter.upper()]))
        for letter in str(choice)
    ]
    return draw(st.sampled_from(["", " "])) + "".join(turned) + draw(st.sampled_from(["", "  "]))


def test_choices_are_found_through_optional():
    assert choices_of(Literal["a", "b"] | None) == ("a", "b")
    assert choices_of(Literal[1, 2]) == (1, 2)
    assert choices_of(int | None) == ()


def test_there_are_settings_with_choices():
    assert len(CHOICES) >= 14


@given(st.data(), st.sampled_from(ACCEPTED))
@hypothesis_settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_spelling_of_a_choice_is_understood_from_flags_and_files_alike(tmp_path, data, name_and_choice):
    name, choice = name_and_choice
    spelled = data.draw(spellings(choice))
    path = tmp_path / "c.json"
    values = {**ENOUGH, **BESIDE.get(name.partition("_")[0], {}), name: spelled}
    path.write_text(json.dumps(values))
    from_flag = settings_as_json(load(values, None))
    from_file = settings_as_json(load({}, path))
    assert from_flag[name] == from_file[name] == RUNS_AS.get((name, str(choice)), choice)
    assert type(from_flag[name]) is type(choice)


@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [(name, word, meant) for name, table in SYNONYMS.items() for word, meant in table.items()],
)
def test_every_synonym_means_a_value_that_the_setting_accepts(name, word, meant):
    flags = {**ENOUGH, **BESIDE.get(name.partition("_")[0], {}), name: word.upper().replace("_", "-")}
    value = settings_as_json(load(flags))[name]
    assert str(value).lower() == str(RUNS_AS.get((name, meant), meant)).lower()
    assert value in (CHOICES.get(name) or (meant, meant == "true"))


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("fsdp_version", 2, 2),
        ("fsdp_version", 2.0, 2),
        ("fsdp_version", "FSDP2", 2),
        ("fsdp_state_dict_type", "Sharded", "SHARDED_STATE_DICT"),
        ("fsdp_auto_wrap_policy", "Size-Based-Wrap", "SIZE_BASED_WRAP"),
        ("fsdp_auto_wrap_policy", "my.module.Policy", "my.module.Policy"),
        ("mixed_precision", False, "no"),
        ("mixed_precision", "FP32", "no"),
        ("prediction_type", "V", "v_prediction"),
        ("lr_scheduler", "Constant-With-Warmup", "constant_with_warmup"),
        ("crop", "YES", True),
        ("crop", 0, False),
        ("crop", "maybe", "maybe"),
        ("instance_prompt", " Full-Moon ", " Full-Moon "),
        ("lr_scheduler", "sine", "sine"),
        ("prediction_type", None, None),
    ],
)
def test_a_value_is_brought_to_its_canonical_spelling_or_left_as_it_came(name, value, meant):
    got = normalize_value(name, setting_fields()[name], value)
    assert got == meant
    assert type(got) is type(meant)


@pytest.mark.parametrize("word", [*WORDS_FOR_TRUE, *WORDS_FOR_FALSE])
def test_words_for_true_and_false_are_understood_in_any_case(word):
    for spelled in (word, word.upper(), f" {word.title()} "):
        settings = load({**ENOUGH, "fsdp_enable": spelled}).settings
        assert settings.parallel.fsdp_enable is (word in WORDS_FOR_TRUE)


def test_no_two_choices_of_a_setting_are_spelled_alike():
    for name, choices in CHOICES.items():
        folded = {str(choice).lower().replace("-", "_") for choice in choices}
        assert len(folded) == len(choices), name


def test_a_synonym_never_hides_a_choice():
    for name, table in SYNONYMS.items():
        for choice in CHOICES.get(name, ()):
            assert table.get(str(choice).lower(), str(choice)) == str(choice), (name, choice)


def test_switches_that_a_run_may_decide_take_auto_and_need_no_value():
    switches = [name for name, field in setting_fields().items() if field.annotation == bool | None]
    assert "gradient_checkpointing" in switches
    for name in switches:
        meant = {"auto": None, "AUTO": None, "none": None, "on": True, "No": False}
        assert {word: normalize_value(name, setting_fields()[name], word) for word in meant} == meant
        assert normalize_argv([f"--{name}"]) == [f"--{name}=true"]
        assert normalize_argv([f"--{name}", "auto"]) == [f"--{name}", "auto"]
