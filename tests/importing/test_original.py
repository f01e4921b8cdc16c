"""The original's files: every name of theirs has one answer, and none is a wrong guess.

The corpus holds every key that the original's examples and pages have, with its commonest values (facts, no copied
files), and what becomes of each: the settings it makes, `nothing`, or `refused`. Run this file to write it anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from simpletuner.app import main
from simpletuner.errors import Mistake, SettingsError
from simpletuner.importing.documentation import original_page
from simpletuner.importing.original import DEFAULTS, MEANINGS, SAME_RESULT, Original, remark_on, with_arguments
from simpletuner.importing.sorting import CannotMap, take_value
from simpletuner.launch.ranks import inherited_environment
from simpletuner.settings import Loaded, load, settings_as_json
from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, setting_fields
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG
from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.foreign.original_names import OPTIMIZERS, REFUSED, TABLE, map_name, names_of
from simpletuner.settings.foreign.original_tables import ASKS_FOR_NOTHING, RENAMED
from simpletuner.settings.resolving.loading import without_point
from simpletuner.settings.resolving.sources import to_setting_type
from simpletuner.settings.values.spelling import normalize_value

CORPUS = Path(__file__).with_name("original_corpus.txt")
CASES = [tuple(line.split("\t")) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
DEFAULTS_THERE = Path(__file__).with_name("original_defaults.txt")
PAGE = Path(__file__).parents[2] / "docs" / "from-the-original.md"


def load_file(folder: Path, values: dict, name: str = "c.json") -> Loaded:
    path = folder / name
    path.write_text(json.dumps(values, indent=0), encoding="utf-8")
    return load({}, path, complete=False, environment={"HOME": str(folder)})


def answer(key: str, value: object) -> str:
    """Return what `config import` makes of one value: a setting, nothing, or a refusal that explains itself."""
    original = Original(Path("c.json"), [])
    try:
        taken = take_value(RawValue(key, value, "c.json:2"), original, Path())
    except CannotMap as refused:
        assert "not a name that is known here" not in str(refused), key
        return "refused"
    if taken is None:
        return "nothing"
    made = taken.value.value if taken.value.name == ACCELERATE_CONFIG else to_json(taken.value)
    return f"{taken.value.name} = {json.dumps(made, ensure_ascii=False)}"


def to_json(given: RawValue) -> object:
    """Return a value as settings.json has it."""
    section = SECTIONS[SECTION_OF[given.name]]
    value = normalize_value(given.name, setting_fields()[given.name], given.value)
    return without_point(section(**{given.name: value}).model_dump(mode="json")[given.name])


def test_every_key_of_the_original_is_answered_as_the_table_says():
    wrong = [(key, value, got) for key, value, said in CASES if (got := answer(key, json.loads(value))) != said]
    assert wrong == []


def test_each_name_has_one_answer_and_is_not_one_of_our_own():
    names = [name for texts in (RENAMED, ASKS_FOR_NOTHING, REFUSED) for _, name, _ in names_of(texts)]
    assert len(names) == len(set(names)) == 479
    assert [name for name in names if canonical_name(name)] == []
    assert set(RENAMED) <= {*SECTION_OF, "accelerate_config"}
    assert all(len(reason) > 10 for reason in (*ASKS_FOR_NOTHING, *REFUSED))


def test_the_settings_that_the_tables_name_exist():
    assert {*DEFAULTS, *(meaning.setting for meaning in MEANINGS)} <= set(setting_fields())
    known = get_args(setting_fields()["optimizer"].annotation)
    assert all(ours in known for ours, _ in OPTIMIZERS.values())


def test_every_default_of_the_original_that_differs_is_answered():
    """The fixture has all names of its field registry with their defaults; it changes with the original alone."""
    differs = set()
    rows = [line.split("\t") for line in DEFAULTS_THERE.read_text(encoding="utf-8").splitlines()]
    for name, text in rows:
        value = json.loads(text)
        found = map_name(name, canonical_name(name) or name, None if value == "" else value)
        if found.outcome == "set":
            theirs = to_setting_type(found.setting, found.value)
            differs |= {found.setting} if theirs != setting_fields()[found.setting].default else set()
        elif found.outcome not in ("neutral", "unused") and name != "accelerate_config":  # names a file
            differs.add(name)
    # The names that the registry does not have: what these programs do by themselves.
    ours = {"aspect_bucket_sizes", "crop_style", "seed"}
    assert len(rows) > 550 and "learning_rate" in differs
    assert differs | ours == {*DEFAULTS, *SAME_RESULT}


def test_the_page_is_up_to_date_and_has_every_name():
    page = original_page()
    expected = "run `simpletuner config docs --original > docs/from-the-original.md`"
    assert PAGE.read_text(encoding="utf-8") == page, expected
    assert [name for name in TABLE.rules if f"`{name}`" not in page] == []


def test_zero_and_null_mean_not_set():
    for name in ("max_train_steps", "minimum_image_size", "snr_gamma", "tokenizer_max_length"):
        assert answer(name, 0) == f"{name} = null"
    assert answer("flow_schedule_shift", 0) == "flow_schedule_shift = 1"
    assert answer("lr_scheduler", None) == answer("hub_model_name", None) == "nothing"


def test_null_in_a_file_of_ours_is_no_number(tmp_path):
    with pytest.raises(SettingsError, match=r"lr_scheduler = null .*: use one of constant, .*polynomial$"):
        load_file(tmp_path, {"lr_scheduler": None})


def test_a_setting_stands_once_in_a_file(tmp_path):
    with pytest.raises(SettingsError, match="it is set twice"):
        load_file(tmp_path, {"validation_steps": 50, "validation_step_interval": "50"})
    path = tmp_path / "twice.json"
    path.write_text('{"seed": 1, "seed": 1}')
    with pytest.raises(SettingsError, match="it is set twice"):
        load({}, path, complete=False, environment={})


@pytest.mark.parametrize("given", ["bnb-adamw8bit", "ao-adamw4bit", "optimi-sgd", "dadaptsgd", "torch-sgd"])
def test_an_optimizer_without_a_counterpart_is_refused_with_the_nearest(given):
    with pytest.raises(CannotMap, match="adamw takes its place") as caught:
        take_value(RawValue("optimizer", given, "c.json:2"), Original(Path("c.json"), []), Path())
    assert "did you mean" not in str(caught.value)


def test_what_means_something_else_is_said_of_each_value():
    values = {"lr_scheduler": "constant", "lr_warmup_steps": 10}
    assert "in the original it does not" in remark_on("lr_warmup_steps", values)
    assert remark_on("lr_scheduler", values) == ""
    assert "half a cosine" in remark_on("lr_scheduler", {"lr_scheduler": "cosine"})


def test_a_run_refuses_a_file_of_the_original_in_one_sentence(tmp_path):
    names = {
        "seed": 5,
        "lr_schedule": "cosine",
        "peft_lora_mode": "standard",
        "push_checkpoints_to_hub": False,
        "hub_model_name": "",
    }
    with pytest.raises(SettingsError) as caught:
        load_file(tmp_path, names)
    file = f"{tmp_path}/c.json"
    assert caught.value.message == (
        f"{file} is a file of the original SimpleTuner: it has lr_schedule (here lr_scheduler), peft_lora_mode, "
        "push_checkpoints_to_hub and 1 more"
    )
    assert f"`simpletuner config import {file} --output=run.toml`" in caught.value.hint


def test_settings_of_lora_have_no_effect_on_a_full_run(tmp_path):
    [warning] = load_file(tmp_path, {"lora_rank": 8}).warnings
    place = f"[lora_rank: {tmp_path}/c.json:2]"
    assert warning == f"lora_rank = 8 has no effect with model_type = full: it is for model_type = lora {place}"


def test_values_of_the_originals_alone_lead_to_the_import_and_typos_do_not(tmp_path):
    folder = tmp_path / "my config"
    folder.mkdir()
    assert (
        load_file(folder, {"max_train_steps": 0}).settings.training.max_train_steps is None
    )  # as other trainers write
    for values in ({"optimizer": "optimi-lion"}, {"optimizer": "dadaptsgd"}):
        with pytest.raises(SettingsError) as caught:
            load_file(folder, values)
        assert f"`simpletuner config import '{folder}/c.json' --output=run.toml`" in caught.value.hint
    for values in ({"optimizer": "adamm"}, {"learning_rate": -1}):
        with pytest.raises(SettingsError) as caught:
            load_file(folder, values)
        assert "config import" not in caught.value.hint


def test_a_flag_of_the_original_is_answered_with_ours_or_with_the_reason(monkeypatch, capsys):
    for flag, said in {
        "--lr_schedule": "it is called `lr_scheduler` here",
        "--push_checkpoints_to_hub": "not uploaded",
    }.items():
        with pytest.raises(SettingsError, match=said):
            load({flag: "true"}, complete=False, environment={})
        with pytest.raises(SystemExit) as ended:
            main(["train", "--dry_run", "--model_family=sdxl", "--instance_data_dir=.", flag])
        assert ended.value.code == 2 and said in capsys.readouterr().err


ENV = """\
export HF_TOKEN='secret'
NCCL_DEBUG=INFO
CUDA_VISIBLE_DEVICES=0,1
RESUME_FROM_CHECKPOINT=none
MAX_TRAIN_STEPS=10
LR_SCHEDULER=cosine
ACCELERATE_CONFIG=none
"""


def test_config_env_holds_settings_and_variables_of_other_programs(tmp_path):
    path = tmp_path / "config.env"
    path.write_text(ENV)
    loaded = load({}, path, complete=False, environment={"HOME": str(tmp_path)})
    made = settings_as_json(loaded)
    names = ("resume_from_checkpoint", "max_train_steps", "lr_scheduler")
    assert [made[name] for name in names] == ["none", 10, "cosine"]
    assert loaded.variables == {"HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1"}
    passed_on = f"{path}: passed on to the ranks, as variables: HF_TOKEN, NCCL_DEBUG, CUDA_VISIBLE_DEVICES"
    assert passed_on in loaded.warnings
    assert not any("secret" in warning for warning in loaded.warnings)
    environment = {"NCCL_DEBUG": "WARN"}
    loaded.pass_on_variables(environment)
    assert environment == {"NCCL_DEBUG": "WARN", "HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_the_process_that_becomes_or_starts_ranks_has_the_variables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": str(tmp_path)})
    Path("config").mkdir()
    Path("config/config.env").write_text("HF_TOKEN=secret\nINSTANCE_DIR=.\nMODEL_FAMILY=sdxl\n")
    with pytest.raises(SystemExit):
        main(["train", "--gpu_ids=0,0"])  # refused after the settings, before anything is started
    assert "names a GPU twice" in capsys.readouterr().err
    assert inherited_environment()["HF_TOKEN"] == "secret"


def test_a_name_in_config_env_that_is_no_variable_of_a_program_is_a_slip(tmp_path):
    path = tmp_path / "config.env"
    path.write_text("SEDE=1\nMY_KEY=x\n")
    with pytest.raises(SettingsError, match="sede .*did you mean `seed`") as caught:
        load({}, path, complete=False, environment={})
    assert "my_key" in caught.value.message and "set it in the shell" in caught.value.message


def test_arguments_in_config_env_are_split_with_the_place_of_their_variable():
    mistakes: list[Mistake] = []
    given = RawValue("TRAINER_EXTRA_ARGS", "--use_ema --lr-end=1e-7 --ema_decay 0.5", "config.env:2")
    split = with_arguments(given, mistakes)
    assert [(each.name, each.value) for each in split] == [
        ("use_ema", "true"),
        ("lr-end", "1e-7"),
        ("ema_decay", "0.5"),
    ]
    assert {each.place for each in split} == {"config.env:2 TRAINER_EXTRA_ARGS"} and not mistakes
    assert with_arguments(replace(given, value="--instance_prompt='a"), mistakes) == []
    assert mistakes[0].message == "a quote in it is not closed"


def test_beside_a_named_file_config_env_stops_a_run_only_where_its_value_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    refused = "PUSH_CHECKPOINTS_TO_HUB=true\nSEDE=1\nDEEPSPEED_CONFIG=gone.json\nSEED=x\nHF_TOKEN=y\n"
    Path("config/config.env").write_text(refused)
    Path("run.toml").write_text("optimizer = 'lion'\ndeepspeed_config = 'none'\n")
    loaded = load({"seed": "5"}, Path("run.toml"), complete=False, environment={})
    assert (loaded.settings.optimizer.optimizer, loaded.settings.training.seed) == ("lion", 5)
    assert loaded.variables == {"HF_TOKEN": "y"}
    unused = [line for line in loaded.warnings if line.endswith("; it is not used, since a config file is named")]
    assert [line.partition(" (")[2][: len("config/config.env:1")] for line in unused] == [
        f"config/config.env:{line}" for line in (1, 2, 3)
    ]
    by_variable = load({"seed": "5"}, complete=False, environment={"SIMPLETUNER_CONFIG": "run.toml"})
    assert by_variable.warnings == loaded.warnings
    Path("run.toml").write_text("")
    with pytest.raises(SettingsError) as caught:  # what nothing else sets still counts
        load({}, Path("run.toml"), complete=False, environment={})
    assert [mistake.setting for mistake in caught.value.mistakes] == ["deepspeed_config", "seed"]
    with pytest.raises(SettingsError, match="config/config.env is a file of the original SimpleTuner"):
        load({"seed": "5", "optimizer": "lion"}, complete=False, environment={})


if __name__ == "__main__":
    rows = [(key, value, answer(key, json.loads(value))) for key, value, *_ in CASES]
    CORPUS.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
