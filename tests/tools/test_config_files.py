"""New config files: each has an output_dir of its own, and a LoRA a LoRA's learning rate."""

from __future__ import annotations

import contextlib
import tempfile
import tomllib
from pathlib import Path

import pytest
from generated_settings import NOWHERE, VALUES
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.app import main
from simpletuner.errors import DataError, EnvironmentNotReady, SettingsError
from simpletuner.settings import load, settings_as_json
from simpletuner.settings.values.spelling import as_text
from simpletuner.tools.config_files import new_config, own_output_dir


@pytest.mark.parametrize(
    ("target", "output"),
    [
        ("cat.toml", "output/cat"),
        ("config/config.toml", "output/config"),
        ("config/dogs/config.json", "output/dogs"),
        ("config.toml", "output/config"),
        ("my cat.v2.toml", "output/my cat.v2"),
        ("config/.env", "output/env"),
        ("{env:HOME}:x.toml", "output/-env-HOME-x"),
    ],
)
def test_each_config_file_has_an_output_dir_of_its_own(target, output, tmp_path):
    assert own_output_dir(target, root=tmp_path) == output
    assert own_output_dir(target, {output}, tmp_path) == f"{output}-2", "another file says it"
    (tmp_path / output).mkdir(parents=True)
    (tmp_path / f"{output}-2").mkdir()
    assert own_output_dir(target, root=tmp_path) == f"{output}-3", "somebody's run is there"
    (tmp_path / "output" / "checkpoints").mkdir()
    assert own_output_dir(target, root=tmp_path) == output.replace("output/", "outputs/"), "output itself is a run"


def test_config_init_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, kind in (("dog", "full"), ("cat", "lora")):
        with pytest.raises(SystemExit, match="0"):
            main(["config", "init", "--model_family=sdxl", f"--model_type={kind}", f"--output={name}.toml"])
        written = tomllib.loads(Path(f"{name}.toml").read_text())
        assert (written["output_dir"], written["model_type"]) == (f"output/{name}", kind)
        assert list(written)[:1] == ["model_type"] and ("lora_rank" in written) == (kind == "lora")
    assert written["learning_rate"] == 1e-4
    with pytest.raises(SettingsError, match="recipe sdxl-style is for model_type = lora, not full"):
        new_config({"model_type": "full"}, "sdxl-style")
    assert 'output_dir = "output/style"' in new_config({}, "sdxl-style", "style.toml").text


def test_a_lora_at_the_rate_of_a_full_run_is_said(tmp_path):
    flags = {"model_family": "sdxl", "instance_data_dir": str(tmp_path), "model_type": "lora"}

    def warnings(**more: str) -> str:
        return "\n".join(map(str, load({**flags, **more}, None).warnings))

    assert "a LoRA is usually trained at 0.0001" in warnings()
    assert "a LoRA is usually trained at 0.0001" in warnings(learning_rate="1e-5"), "as `config init` writes it"
    for more in ({"learning_rate": "1e-4"}, {"learning_rate": "2e-5"}, {"model_type": "full"}):
        assert "usually trained" not in warnings(**more)
    assert "usually trained" not in warnings(optimizer="prodigy", learning_rate="1")


def test_settings_that_are_typed_are_written_into_the_file_and_checked_as_train_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my photos").mkdir()
    Path("my photos", "a.png").touch()

    def written(recipe: str = "", **given: object) -> dict[str, object]:
        return tomllib.loads(new_config(given, recipe, "a.toml").text)

    sdxl = {"model_family": "sdxl", "instance_data_dir": "my photos"}
    values = written(**sdxl, learning_rate="3e-4", validation_prompt=["a", 'ü "b"'], use_cpu="yes", eval_split="0.5")
    typed = {"instance_data_dir": "my photos", "learning_rate": 3e-4, "validation_prompt": ["a", 'ü "b"']}
    assert typed.items() <= values.items() and values["use_cpu"] is True and values["eval_split"] == 0.5
    assert "max_train_steps" not in written(**sdxl, num_train_epochs="3"), "1,000 steps would outrank the epochs"
    assert written(**sdxl, num_processes="2", zero_stage="2")["fsdp_enable"] is False
    json_text = '{"zero_optimization": {"stage": 2}}'
    values = written(**sdxl, num_processes="2", deepspeed_config=json_text)
    assert (values["zero_stage"], values["fsdp_enable"]) == (2, False)
    assert (written(**sdxl, global_batch_size="8", gradient_accumulation_steps="2"))["global_batch_size"] == 8
    values = written("sdxl-style", instance_data_dir="my photos", resolution="64", num_processes="3")
    assert (values["resolution"], values["gradient_accumulation_steps"]) == (64, 4)
    text = new_config({"resolution": "64", "gradient_accumulation_steps": "6", "num_processes": "2"}, "sdxl-style").text
    assert "\n# in the recipe 1024: " in text and "\ngradient_accumulation_steps = 6\n" in text
    values = written("sdxl-style", global_batch_size="8")
    assert values["global_batch_size"] == 8 and "gradient_accumulation_steps" not in values
    assert "max_train_steps" not in written("sdxl-style", num_train_epochs="2")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"instance_data_dir": "nope"}, DataError, "there is no folder .nope."),
        ({"instance_data_dir": "empty"}, DataError, "empty. is empty"),
        ({"instance_data_dir": "s3://b/x"}, SettingsError, "a dataset file takes type aws"),
        ({"logging_dir": "s3://b/x"}, SettingsError, "is an address"),
        ({"data_backend_config": "nope.json"}, SettingsError, "cannot read nope.json"),
        ({"--lerning_rate": "1"}, SettingsError, "did you mean `learning_rate`"),
        ({"zero_stage": "2", "fsdp_enable": "true"}, SettingsError, "FSDP and DeepSpeed cannot"),
        ({"lr_warmup_steps": "2000"}, SettingsError, "more than max_train_steps = 1000"),
        ({"notify_url": "https://example.org"}, SettingsError, "notify_url is a secret"),
        (
            {"export_format": "foo", "aspect_bucket_alignment": "12"},
            SettingsError,
            "(?s)aspect_bucket_alignment = 12.*export_format",
        ),
    ],
)
def test_what_train_would_refuse_is_no_file(given, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(error, match=message):
        new_config({"model_family": "sdxl", **given})


@given(data=st.data(), recipe=st.sampled_from(["", "sdxl-style"]))
@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_setting_that_is_written_is_read_as_it_was_typed(data, recipe):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        for name in data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=8, max_size=8)):
            value = data.draw(VALUES[name])
            items = [str(each) for each in value] or "[]" if isinstance(value, list) else as_text(value)
            assert_round_trip({"model_family": "sdxl", name: items}, recipe)


def assert_round_trip(flags: dict[str, object], recipe: str) -> None:
    with contextlib.suppress(SettingsError, EnvironmentNotReady, DataError):  # what train would refuse
        text = new_config(flags, recipe, "a.toml").text
        Path("a.toml").write_bytes(text.encode())
        written = settings_as_json(load({}, Path("a.toml"), complete=False, environment=NOWHERE))
        beside = {name: value for name, value in tomllib.loads(text).items() if name not in flags}
        typed = settings_as_json(load({**beside, **flags}, complete=False, environment=NOWHERE))
        assert written == typed


def test_values_that_are_empty_or_have_no_effect_are_written_too():
    for flags in ({"gpu_ids": ""}, {"resume_from_checkpoint": ""}, {"lora_rank": "3"}):
        (name,) = flags
        text = new_config({"model_family": "sdxl", **flags}).text
        assert str(tomllib.loads(text)[name]) == flags[name]
    for recipe in ("", "sdxl-style"):
        values = tomllib.loads(new_config({"model_family": "sdxl", "global_batch_size": "8"}, recipe).text)
        assert "gradient_accumulation_steps" not in values


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        (
            "a.json",
            "a.json: a new config file is TOML",
            "give it a name that ends in .toml",
        ),  # train would read it as JSON
        ("a.yaml", "a.yaml: a new config file is TOML", "give it a name that ends in .toml"),
        ("config.env", "config.env: a new config file is TOML", "give it a name that ends in .toml"),
        ("b", "b: a new config file is TOML", "give it a name that ends in .toml"),
        (".", ".: a new config file is TOML", "give it a name that ends in .toml"),
        ("folder.toml", "folder.toml is a folder", "give another name"),
        ("file/a.toml", "cannot write file/a.toml: file is no folder", "give another name"),
        (f"{'a' * 300}.toml", "File name too long", "give another name"),
    ],
)
def test_a_name_that_cannot_be_the_file_is_said(output, message, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    Path("file").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main(["config", "init", "--model_family=sdxl", "--force", f"--output={output}"])
    said = capsys.readouterr().err
    assert message in said and f"hint: {hint}" in said
    assert sorted(map(str, Path().iterdir())) == ["file", "folder.toml"] and Path("file").read_text() == "mine"


def test_two_files_are_both_written_or_neither(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.datasets.json").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["config", "init", "--recipe=kontext-edit", "--output=a.toml"])
    assert "a.datasets.json is a folder" in capsys.readouterr().err and not Path("a.toml").exists()
    with pytest.raises(SystemExit, match="0"):
        main(["config", "init", "--recipe=kontext-edit", "--output=my cat.toml"])
    assert "`simpletuner train --config 'my cat.toml'`" in capsys.readouterr().err, "can be pasted"


def test_a_recipe_that_lists_datasets_takes_a_list_and_no_folder():
    with pytest.raises(SettingsError, match="lists datasets"):
        new_config({"instance_data_dir": "photos"}, "kontext-edit")
