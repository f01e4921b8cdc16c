"""Files that are absurd or made to do harm: each is answered in one sentence, soon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.files.formats import MAX_NAMES, read_entries
from simpletuner.settings.foreign.accelerate_fields import read_file

MANY = 60_000
LETTERS = "abcdefghijkl"
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip(LETTERS, LETTERS[1:], strict=False)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip(LETTERS, LETTERS[1:], strict=False)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))
DIGITS = "9" * 5000
LONG = {"json": f'{{"seed": {DIGITS}}}', "toml": f"seed = {DIGITS}", "yaml": f"seed: {DIGITS}"}
TOO_DEEP = "its brackets are nested too deeply"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", TOO_DEEP),
        ("a.json", '{"x": ' + "[" * 200 + "]" * 200 + "}", TOO_DEEP),
        ("a.toml", "x = " + "[" * 5_000 + "]" * 5_000, TOO_DEEP),
        ("a.toml", "[" + ".".join("a" * 300) + "]\nx = 1", TOO_DEEP),
        ("a.yaml", "x: " + "[" * 100_000 + "]" * 100_000, ":1 does not parse: " + TOO_DEEP),
        ("a.yaml", "x:\n" + "- " * 100_000, ":2 does not parse: " + TOO_DEEP),
        ("a.yaml", CHAIN, TOO_DEEP),
        (
            "a.yaml",
            LAUGHS,
            ":6 does not parse: with its aliases written out it has more than 300,000 names and values",
        ),
        ("a.yaml", MERGES, ":7 does not parse: with its aliases written out"),
        ("a.yaml", "x: &x [*x]", ":1 does not parse: found unconstructable recursive node"),
        ("a.yaml", 'seed: 1\nx: "a\x0bb"\n', ":2 does not parse: the control character '\\x0b' is not allowed"),
        ("a.yaml", "[a, b]: 1", ":1 does not parse: a name must be text, not a list or a table"),
        ("a.yaml", "x:\n  y: 1\n  z: 2\n  y: 3\n", ":4 does not parse: duplicate key `y`"),
        ("a.json", '{"x": {"y": {"z": 1,\n"z": 2}}}', ":2 does not parse: duplicate key `z`"),
        ("a.json", '{"x": {"y": 1,\n\n"y": 2}}', ":3 does not parse: duplicate key `y`"),
        *((f"a.{kind}", text, "a whole number has more than 4,300 digits") for kind, text in LONG.items()),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_entries(path)
    assert said in caught.value.message


def test_accelerate_s_file_is_read_as_carefully(tmp_path):
    path = tmp_path / "a.yaml"
    for text, said in ((LAUGHS, "aliases"), ("distributed_type: FSDP\nx: 1\ndistributed_type: NO\n", "lines 1 and 3")):
        path.write_text(text)
        with pytest.raises(SettingsError, match=said):
            read_file(path)


@pytest.mark.parametrize("name", ["a.json", "a.toml", "a.yaml", "a.env", "deepspeed.json"])
def test_so_many_mistakes_are_counted_and_the_first_shown(tmp_path, name):
    count = MANY if name == "deepspeed.json" else MAX_NAMES
    names = [f"key_{number}" for number in range(count)]
    texts = {
        "a.json": json.dumps(dict.fromkeys(names, 1)),
        "a.toml": "".join(f"{name} = 1\n" for name in names),
        "a.yaml": "".join(f"{name}: 1\n" for name in names),
        "a.env": "".join(f"{name}=1\n" for name in names),
        "deepspeed.json": json.dumps({"deepspeed_config": {"zero_optimization": dict.fromkeys(names, 1)}}),
    }
    path = tmp_path / name
    path.write_text(texts[name])
    with pytest.raises(SettingsError) as caught:
        load({}, path, complete=False, environment={})
    assert caught.value.message.splitlines()[-1].strip() == f"and {count - 100:,} more"
    assert len(caught.value.mistakes) == count


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("revision: 0123456\n", {"revision": "0123456"}),
        (
            "x: [010, 1:30, 1_000, 0x1f, 7, -3, 1.5, .5, 1.5e+3, true]",
            {"x": ["010", "1:30", "1_000", 31, 7, -3, 1.5, 0.5, 1500.0, True]},
        ),
        ("<<: {seed: 3, crop: true}\nseed: 4\n", {"crop": True, "seed": 4}),
        ("x: &x {a: 1}\ny:\n  <<: *x\n  b: 2\n", {"x": {"a": 1}, "y": {"a": 1, "b": 2}}),
    ],
)
def test_yaml_numbers_and_merges(tmp_path, text, values):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    entries = read_entries(path)
    assert {entry.key: entry.value for entry in entries} == values
    assert len(entries) == len(values)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("seed", 1 << 63),
        ("validation_seed", 10**23),
        ("repeats", 10**20),
        ("num_processes", 10**20),
        ("max_train_steps", 10**20),
    ],
)
def test_a_number_that_nothing_can_hold_is_refused(setting, value):
    with pytest.raises(SettingsError, match=f"{setting} = .*: use a (whole )?number"):
        load({setting: str(value)}, complete=False, environment={})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("model_families", {"mine": "a\ud800"}), ("main_process_ip", "a\ud800"), ("output_dir", "~\ud800/x")],
)
def test_text_that_no_message_can_hold_is_refused(setting, value):
    with pytest.raises(SettingsError, match="text must be UTF-8 without NUL characters"):
        load({setting: value}, complete=False, environment={})


def test_a_number_that_is_none_is_named_by_its_key(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"deepspeed_config": {"zero_optimization": {"stage": 2, "x": NaN}}}')
    with pytest.raises(SettingsError, match=r"zero_optimization\.x = NaN .*: use a finite number"):
        load({}, path, environment={})


def test_a_file_called_env_is_one(tmp_path):
    Path(tmp_path / ".env").write_text("SEED=3\n")
    assert load({}, tmp_path / ".env", complete=False, environment={}).settings.training.seed == 3
