from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import yaml

from simpletuner.errors import ExitCode, SettingsError
from simpletuner.settings import load, provenance, settings_as_json
from simpletuner.settings.declared.errors import nearest
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.files.config_files import CONFIG_CANDIDATES

ENOUGH = {"model_family": "sdxl", "instance_data_dir": "pictures"}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(flags: dict, config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(flags, config)
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value.message


JSON_PLAIN = '{"seed": 7, "train_batch_size": 2, "crop": true, "learning_rate": 3e-5, "lr_scheduler": "cosine"}'
JSON_DASHES = (
    '{"--seed": 7, "--train-batch-size": "2", "--crop": "true", "--learning_rate": "3e-5", "--lr_scheduler": "Cosine"}'
)
TOML = 'seed = 7\ntrain_batch_size = 2\ncrop = true\nlearning_rate = 3e-5\nlr_scheduler = "cosine"\n'
YAML = "seed: 7\ntrain-batch-size: 2\ncrop: yes\nlearning_rate: 3e-5\nlr_scheduler: cosine\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", JSON_PLAIN), ("a.json", JSON_DASHES), ("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)],
)
def test_every_file_format_gives_the_same_settings(tmp_path, name, text):
    path = write(tmp_path, name, text)
    loaded = load(ENOUGH, path)
    settings = loaded.settings
    assert settings.training.seed == 7
    assert settings.training.train_batch_size == 2
    assert settings.data.crop is True
    assert settings.optimizer.learning_rate == 3e-5
    assert settings.optimizer.lr_scheduler == "cosine"
    assert {loaded.origins[setting].source for setting in ("seed", "crop", "lr_scheduler")} == {str(path)}
    assert str(loaded.origins["model_family"]) == "flag"
    assert "ema_decay" not in loaded.origins


def test_flags_win_over_the_file_setting_by_setting(tmp_path):
    path = write(tmp_path, "c.json", '{"seed": 7, "train_batch_size": 2}')
    loaded = load({**ENOUGH, "seed": "9"}, path)
    assert (loaded.settings.training.seed, loaded.settings.training.train_batch_size) == (9, 2)
    assert (str(loaded.origins["seed"]), str(loaded.origins["train_batch_size"])) == ("flag", f"{path}:1")


def test_an_older_name_in_a_flag_wins_over_the_setting_s_own_name_in_the_file(tmp_path):
    path = write(tmp_path, "c.json", '{"checkpoint_step_interval": 10}')
    assert load({**ENOUGH, "checkpointing_steps": "20"}, path).settings.checkpoints.checkpoint_step_interval == 20


def test_without_config_the_first_candidate_that_exists_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(ENOUGH).settings.training.seed == 42
    texts = ['{"seed": 1}', "seed = 2", "seed: 3"]
    for name, text in reversed(list(zip(CONFIG_CANDIDATES, texts, strict=True))):
        write(tmp_path, name, text)
        loaded = load(ENOUGH)
        assert loaded.settings.training.seed == 1 + texts.index(text)
        assert str(loaded.origins["seed"]) == f"{name}:1"


@pytest.mark.parametrize(
    ("older", "setting"),
    [("checkpointing_steps", "checkpoint_step_interval"), ("validation_steps", "validation_step_interval")],
)
def test_older_names_are_understood_in_flags_and_files(tmp_path, older, setting):
    path = write(tmp_path, "c.json", json.dumps({f"--{older}": 33}))
    for loaded in (load(ENOUGH, path), load({**ENOUGH, older: "33"}), load({**ENOUGH, older.replace("_", "-"): "33"})):
        assert settings_as_json(loaded)[setting] == 33
        assert setting in loaded.origins


def test_each_name_belongs_to_one_setting():
    names = [
        name for setting, field in setting_fields().items() for name in [setting, *field.json_schema_extra["aliases"]]
    ]
    assert len(names) == len(set(names))
    assert all(canonical_name(name) in setting_fields() for name in names)


def test_an_unknown_key_is_named_with_its_source_and_the_nearest_setting(tmp_path):
    path = write(tmp_path, "c.json", '{"--lerning-rate": 1}')
    assert refusal(ENOUGH, path) == f"--lerning-rate ({path}:1): unknown setting; did you mean `learning_rate`?"


def test_an_unknown_key_unlike_any_setting_gets_no_suggestion():
    assert refusal({**ENOUGH, "qqqq": "1"}) == "qqqq (flag): unknown setting"
    assert nearest("qqqq", setting_fields()) == ""


def test_all_mistakes_of_all_sources_are_reported_at_once(tmp_path):
    path = write(tmp_path, "c.json", '{"sed": 1, "seed": -3, "crop": "maybe", "adam_beta1": 1}')
    message = refusal({**ENOUGH, "lr_scheduler": "cosin", "train_batch_size": "many"}, path)
    assert f"sed ({path}:1): unknown setting; did you mean `seed`?" in message
    assert f"seed = -3 ({path}:1): use a whole number of at least 0" in message
    assert f"crop = 'maybe' ({path}:1): use true or false" in message
    assert f"adam_beta1 = 1 ({path}:1): use a number of at least 0 and below 1" in message
    assert "lr_scheduler = 'cosin' (flag): use one of constant, constant_with_warmup, linear, cosine" in message
    assert "did you mean `cosine`?" in message
    assert "train_batch_size = 'many' (flag): use a whole number of at least 1" in message
    assert len(message.splitlines()) == 6


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("train_batch_size", 0, "use a whole number of at least 1 and at most 1000000"),
        ("train_batch_size", 2.5, "use a whole number of at least 1 and at most 1000000"),
        ("learning_rate", 0, "use a number above 0"),
        ("learning_rate", float("nan"), "use a number above 0"),
        ("caption_dropout_probability", 1.01, "use a number of at least 0 and at most 1"),
        ("aspect_bucket_alignment", 7, "use a whole number of at least 8 and at most 256"),
        ("aspect_bucket_alignment", 257, "use a whole number of at least 8 and at most 256"),
        ("seed", None, "use a whole number of at least 0"),
        ("validation_prompt", ["fine", 3], "use text or a list of texts"),
    ],
)
def test_a_wrong_type_or_bound_is_said_with_value_and_source(tmp_path, setting, value, said):
    path = write(tmp_path, "c.json", json.dumps({setting: value}))
    message = refusal(ENOUGH, path)
    assert message == f"{setting} = {json.dumps(value)} ({path}:1): {said}"


def test_bounds_themselves_are_allowed():
    edges = {"caption_dropout_probability": "1", "aspect_bucket_alignment": "8", "seed": "0", "adam_beta1": "0"}
    values = settings_as_json(load({**ENOUGH, **edges}))
    assert [values[name] for name in edges] == [1.0, 8, 0, 0.0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"seed": 1,}', ":1 does not parse: "),
        ("a.json", '{"seed": 1', ":1 does not parse: expecting ',' delimiter, column 11"),
        ("a.toml", "seed = \n", ":1 does not parse: invalid value, column 8"),
        ("a.yaml", "seed: [1\ncrop: 2", ":2 does not parse: did not find expected ',' or ']'"),
        ("a.json", "[1, 2]", "holds a list, not names and values"),
        ("a.yaml", "just words", "holds one value, not names and values"),
    ],
)
def test_a_file_that_does_not_hold_settings_is_named_with_the_place(tmp_path, name, text, said):
    path = write(tmp_path, name, text)
    message = refusal(ENOUGH, path)
    assert message.startswith(str(path))
    assert said in message


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    assert f"cannot read {tmp_path}/no.json" in refusal(ENOUGH, tmp_path / "no.json")
    assert f"cannot read {tmp_path}" in refusal(ENOUGH, tmp_path)
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"{binary}:1 does not parse: it is not UTF-8" in refusal(ENOUGH, binary)


def test_settings_json_read_again_gives_the_same_settings(tmp_path):
    flags = {
        **ENOUGH,
        "seed": "3",
        "learning_rate": "2.5e-6",
        "max_train_steps": "12",
        "snr_gamma": "5",
        "validation_prompt": ["one", "two, three"],
        "fsdp_enable": "true",
        "fsdp_version": "v1",
        "cache_dir_vae": "elsewhere/latents",
        "instance_prompt": "ein Bär „groß“",
    }
    first = load(flags)
    path = write(tmp_path, "settings.json", json.dumps(settings_as_json(first)))
    again = load({}, path)
    assert again.settings == first.settings
    assert set(again.origins) == set(setting_fields())
    assert settings_as_json(again) == settings_as_json(first)
    assert list(settings_as_json(first)) == list(setting_fields())


def test_settings_json_round_trips_through_yaml_too(tmp_path):
    first = load({**ENOUGH, "mixed_precision": "no", "report_to": "none", "resume_from_checkpoint": "none"})
    path = write(tmp_path, "settings.yaml", yaml.safe_dump(settings_as_json(first)))
    assert load({}, path).settings == first.settings


def test_settings_are_frozen():
    settings = load(ENOUGH).settings
    with pytest.raises(ValueError, match="frozen"):
        settings.training.seed = 1  # type: ignore[misc]


def test_effective_batch_size_is_batch_times_ranks_times_accumulation():
    flags = {**ENOUGH, "train_batch_size": "3", "num_processes": "4", "gradient_accumulation_steps": "5"}
    assert load(flags).settings.effective_batch_size == 60


def test_one_validation_prompt_in_a_file_may_be_plain_text(tmp_path):
    path = write(tmp_path, "c.json", '{"--validation_prompt": "a cat"}')
    assert load(ENOUGH, path).settings.validation.validation_prompt == ["a cat"]


def test_a_yaml_key_that_is_no_text_is_an_unknown_setting(tmp_path):
    assert "unknown setting" in refusal(ENOUGH, write(tmp_path, "c.yaml", "1: 2\n"))


def test_true_is_no_number(tmp_path):
    assert "train_batch_size = true" in refusal(ENOUGH, write(tmp_path, "c.json", '{"train_batch_size": true}'))


@pytest.mark.parametrize("setting", ["learning_rate", "resolution"])
def test_infinity_is_refused(setting):
    assert f"{setting} = 'inf'" in refusal({**ENOUGH, setting: "inf"})


@pytest.mark.parametrize("text", ["a\0b", "\udcff", "\ud800"])
@pytest.mark.parametrize("setting", ["instance_prompt", "output_dir", "validation_prompt", "deepspeed_config"])
def test_text_that_no_file_could_hold_is_refused(setting, text):
    value = {"validation_prompt": ["fine", text], "deepspeed_config": {"a": [{text: 1}]}}.get(setting, text)
    assert refusal({**ENOUGH, setting: value}).endswith("(flag): text must be UTF-8 without NUL characters")


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({1: 2}, "use a JSON object, or none"),
        (date(2020, 1, 1), "use a JSON object, or none"),
        (float("nan"), "use a finite number"),
    ],
)
def test_what_is_not_json_is_refused_inside_of_json(inner, said):
    assert refusal({**ENOUGH, "deepspeed_config": {"a": inner}}).endswith(f"(flag): {said}")


def test_a_contradiction_says_where_each_setting_stands_unless_it_was_just_typed(tmp_path):
    path = write(tmp_path, "c.json", '{"num_processes": 8}')
    flags = {**ENOUGH, "num_machines": 3, "main_process_ip": "x"}
    assert refusal(flags, path).endswith(f"[num_processes: {path}:1, num_machines: flag]")
    assert refusal({**flags, "num_processes": 8}).endswith("the same number of ranks")


def test_ranks_that_a_launcher_started_are_known_and_yield_to_every_wish():
    ranks = {"RANK": "0", "WORLD_SIZE": "4", "SIMPLETUNER_ACCELERATE_CONFIG": "none"}
    split = {**ENOUGH, "fsdp_enable": "true", "context_parallel_size": "2"}
    assert load(split, environment=ranks).settings.launch.num_processes == 4
    assert load({**split, "num_processes": "2"}, environment=ranks).settings.launch.num_processes == 2


def test_the_start_up_table_tells_what_found_files_decided(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SIMPLETUNER_ACCELERATE_CONFIG")
    write(tmp_path, "config/config.env", "SEED=3\n")
    found = write(
        tmp_path,
        "home/accelerate/default_config.yaml",
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\n",
    )
    named = write(tmp_path, "run.toml", "crop = true\nrepeats = 1\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    summary = provenance(load(ENOUGH, named))
    decided = "num_processes, mixed_precision, fsdp_enable"
    assert summary == f"config/config.env: seed; {found}: {decided}; {named}: 2; flag: 2"
    by_name = provenance(load(ENOUGH, named, environment={"SIMPLETUNER_ACCELERATE_CONFIG": str(found)}))
    assert by_name.split("; ")[1] == f"{found}: 3"
    assert provenance(load({}, complete=False, environment={"SIMPLETUNER_ACCELERATE_CONFIG": "none"})) == (
        "config/config.env: seed"
    )


def test_an_empty_prompt_is_a_prompt_but_an_empty_variable_is_none(tmp_path):
    def prompts(flags: dict, path: Path | None = None, **environment: str) -> list[str]:
        return load({**ENOUGH, **flags}, path, environment=environment).settings.validation.validation_prompt

    assert prompts({"validation_prompt": [""]}) == [""]
    assert prompts({"validation_prompt": ["a", "", "b"]}) == ["a", "", "b"]
    path = write(tmp_path, "c.json", '{"validation_prompt": ["", "a"]}')
    assert prompts({}, path) == ["", "a"]
    assert prompts({"validation_prompt": ["[]"]}, path) == []
    assert prompts({}, path, SIMPLETUNER_VALIDATION_PROMPT="") == []
    assert prompts({}, write(tmp_path, "d.env", "VALIDATION_PROMPT=''\n")) == []


@pytest.mark.parametrize("variable", ["SIMPLETUNER_ENVIRONMENT", "SIMPLETUNER_ENV", "ENV"])
def test_a_variable_chooses_a_folder_below_config(tmp_path, monkeypatch, variable):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "config/config.json", '{"seed": 1}')
    write(tmp_path, "config/foo/config.toml", "seed = 2")
    alone = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}

    def seed(**environment: str) -> int:
        return load(ENOUGH, environment=alone | environment).settings.training.seed

    assert seed(**{variable: "foo"}) == 2
    assert seed(**{variable: "default"}) == seed(**{variable: ""}) == 1
    assert seed(**{variable: "foo"}, SIMPLETUNER_CONFIG="config/config.json") == 1
    assert load(ENOUGH, environment=alone | {variable: "foo"}).warnings == ()


def test_a_folder_that_is_not_there_is_refused_or_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "config/config.json", '{"seed": 1}')
    alone = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
    with pytest.raises(SettingsError, match="SIMPLETUNER_ENV = nowhere, but there is no config/nowhere/config.json"):
        load(ENOUGH, environment=alone | {"SIMPLETUNER_ENV": "nowhere"})
    [warning] = load(ENOUGH, environment=alone | {"ENV": "nowhere"}).warnings
    assert warning == "ENV = nowhere, but there is no config/nowhere/config.json, .toml, .yaml or .env: it is not used"
    assert load(ENOUGH, environment=alone | {"ENV": "/root/.shinit"}).warnings == ()  # a shell's
    named = tmp_path / "config/config.json"
    [warning] = load(ENOUGH, named, environment=alone | {"SIMPLETUNER_ENV": "nowhere"}).warnings
    assert warning == f"SIMPLETUNER_ENV = nowhere is not used: the config file is named, {named}"
    (tmp_path / "config/empty").mkdir()
    with pytest.raises(SettingsError, match=r"ENV = empty, but there is no config/empty/config.json, .* or .env"):
        load(ENOUGH, environment=alone | {"ENV": "empty"})
    [warning] = load(ENOUGH, named, environment=alone | {"ENV": "empty"}).warnings
    assert warning == f"ENV = empty is not used: the config file is named, {named}"


def test_config_env_chooses_a_folder_too_and_that_folder_has_a_config_env(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "config/config.json", '{"seed": 1}')
    write(tmp_path, "config/foo/config.json", '{"seed": 2}')
    write(tmp_path, "config/bar/config.env", "SEED=3\nHF_TOKEN=x\nNCCL_DEBUG=INFO\n")
    alone = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
    write(tmp_path, "config/config.env", "ENV=foo\nLR_WARMUP_STEPS=7\nNCCL_DEBUG=WARN\n")
    loaded = load(ENOUGH, environment=alone)
    assert (loaded.settings.training.seed, loaded.settings.optimizer.lr_warmup_steps) == (2, 7)
    assert not any("ENV" in warning for warning in loaded.warnings)
    loaded = load(ENOUGH, environment=alone | {"ENV": "bar"})
    assert (loaded.settings.training.seed, loaded.settings.optimizer.lr_warmup_steps) == (3, 7)
    assert loaded.variables == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x"}
    assert "ENV (config/config.env:1) is not used: it chooses a folder of config/" in loaded.warnings[0]


@pytest.mark.parametrize(
    "host", ["", "10.0.0.1", "::1", "fe80::1%eth0", "node-1", "node_1.cluster.local.", "bär.example"]
)
def test_addresses_and_host_names_are_accepted(host):
    assert load({"main_process_ip": host}, complete=False, environment={}).settings.launch.main_process_ip == host


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("10.0.0..100", "use an IP address or a host name"),
        ("10.0.0.300", "this is no IP address"),
        ("10.0.0.1:29500", "write 10.0.0.1, and the port as main_process_port=29500"),
        ("[::1]:29500", "write ::1, and the port as main_process_port=29500"),
        ("http://x", "use an address without `://`"),
        ("host name", "use an IP address or a host name"),
        ("host\n", "use an IP address or a host name"),
        ("-x", "use an IP address or a host name"),
        ("x" * 64, "use an IP address or a host name"),
        ("bär" * 60, "use an IP address or a host name"),
    ],
)
def test_what_cannot_be_looked_up_is_refused(host, said):
    assert said in refusal({**ENOUGH, "main_process_ip": host})
