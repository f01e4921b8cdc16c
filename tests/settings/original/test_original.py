"""The original's files: every name of theirs has one answer, and none is a wrong guess.

The corpus holds every key that the original's examples and pages have, with its commonest values (facts, no copied
files), and what becomes of each: the settings it makes, `nothing`, or `refused`. Run this file to write it anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import pytest

from simpletuner.app import main
from simpletuner.errors import SettingsError
from simpletuner.launch.ranks import inherited_environment
from simpletuner.settings import Loaded, load, settings_as_json
from simpletuner.settings.declared.sections import SECTION_OF, setting_fields
from simpletuner.settings.original.names import OPTIMIZERS, TABLE, map_name, names_of
from simpletuner.settings.original.page import original_page
from simpletuner.settings.original.refusals import REFUSED
from simpletuner.settings.original.tables import ASKS_FOR_NOTHING, RENAMED
from simpletuner.settings.original.warnings import DEFAULTS, MEANINGS, SAME_RESULT
from simpletuner.settings.resolving.loading import canonical_name
from simpletuner.settings.resolving.sources import to_setting_type

CORPUS = Path(__file__).with_name("original_corpus.txt")
CASES = [tuple(line.split("\t")) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
DEFAULTS_THERE = Path(__file__).with_name("original_defaults.txt")
PAGE = Path(__file__).parents[3] / "docs" / "from-the-original.md"


def load_file(folder: Path, values: dict, name: str = "c.json") -> Loaded:
    path = folder / name
    path.write_text(json.dumps(values, indent=0), encoding="utf-8")
    return load({}, path, complete=False, environment={"HOME": str(folder)})


def answer(folder: Path, key: str, value: object) -> str:
    """Return what becomes of one value: settings, nothing, or a refusal that explains itself."""
    try:
        loaded = load_file(folder, {key: value})
    except SettingsError as error:
        mistake = error.mistakes[0]
        assert "unknown setting" not in str(mistake)
        assert key in mistake.setting and f"{folder}/c.json:2" in mistake.place
        return "refused"
    made = {name: settings_as_json(loaded)[name] for name in loaded.origins}
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in made.items()) or "nothing"


@pytest.mark.parametrize(("key", "value", "expected"), CASES)
def test_every_key_of_the_original_is_answered_as_the_table_says(tmp_path, key, value, expected):
    assert answer(tmp_path, key, json.loads(value)) == expected


def test_each_name_has_one_answer_and_is_not_one_of_our_own():
    names = [name for texts in (RENAMED, ASKS_FOR_NOTHING, REFUSED) for _, name, _ in names_of(texts)]
    assert len(names) == len(set(names)) == 484
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
        found = map_name(name, canonical_name(name) or name, None if value == "" else value, True)
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


ASKS_FOR_NOTHING_HERE = {
    "push_checkpoints_to_hub": False,
    "hub_model_name": "x",
    "lora_format": "diffusers",
    "loss_type": "l2",
}


def test_one_line_counts_what_asks_for_nothing(tmp_path):
    warnings = load_file(tmp_path, {**ASKS_FOR_NOTHING_HERE, "num_train_epochs": 0}).warnings
    [counted] = [warning for warning in warnings if "no effect here" in warning]
    assert counted == f"{tmp_path}/c.json: 4 settings have no effect here; docs/from-the-original.md has the reasons"


def test_zero_and_null_mean_not_set(tmp_path):
    zeros = dict.fromkeys(("num_train_epochs", "max_train_steps", "minimum_image_size", "snr_gamma"), 0)
    zeros |= {"tokenizer_max_length": 0.0, "validation_step_interval": 0, "flow_schedule_shift": 0, "seed": None}
    made = settings_as_json(load_file(tmp_path, {**zeros, "lr_scheduler": None, "hub_model_name": None}))
    assert (made["num_train_epochs"], made["seed"], made["lr_scheduler"]) == (0, 42, "constant")
    assert made["max_train_steps"] is made["minimum_image_size"] is made["snr_gamma"] is None
    assert made["tokenizer_max_length"] is None
    assert (made["flow_schedule_shift"], made["validation_step_interval"]) == (1.0, 0)


def test_null_in_a_file_of_ours_is_no_number(tmp_path):
    with pytest.raises(SettingsError, match=r"lr_scheduler = null .*: use one of constant, .*polynomial$"):
        load_file(tmp_path, {"lr_scheduler": None})


def test_two_names_of_a_setting_may_say_the_same(tmp_path):
    both = {"validation_steps": 50, "validation_step_interval": "50"}
    assert load_file(tmp_path, both).settings.validation.validation_step_interval == 50
    with pytest.raises(SettingsError, match="it is set twice"):
        load_file(tmp_path, {**both, "validation_steps": 51})
    path = tmp_path / "twice.json"
    path.write_text('{"seed": 1, "seed": 1}')
    with pytest.raises(SettingsError, match="it is set twice"):
        load({}, path, complete=False, environment={})


@pytest.mark.parametrize("given", [name.replace("_", "-") for name in OPTIMIZERS])
def test_an_optimizer_that_takes_anothers_place_says_what_it_costs(tmp_path, given):
    loaded = load_file(tmp_path, {"optimizer": given})
    ours, cost = OPTIMIZERS[given.replace("-", "_")]
    assert loaded.settings.optimizer.optimizer == ours
    assert loaded.origins["optimizer"].given == given
    said = f"optimizer = {given} ({tmp_path}/c.json:2): {ours} takes its place: {cost}"
    assert loaded.warnings == ((said,) if cost else ())


@pytest.mark.parametrize("given", ["bnb-adamw8bit", "ao-adamw4bit", "optimi-sgd", "prodigy", "torch-sgd"])
def test_an_optimizer_without_a_counterpart_is_refused_with_the_nearest(tmp_path, given):
    with pytest.raises(SettingsError, match="adamw takes its place") as caught:
        load_file(tmp_path, {"optimizer": given})
    assert "did you mean" not in caught.value.message


def test_what_means_something_else_is_told_for_files_of_the_original_alone(tmp_path):
    values = {"max_grad_norm": 0.1, "lr_scheduler": "constant", "lr_warmup_steps": 10}
    assert load_file(tmp_path, values).warnings == ()
    told = load_file(tmp_path, {**values, "push_checkpoints_to_hub": False, "seed": 1}).warnings
    assert [line for line in told if line.startswith("lr_warmup_steps = 10") and "c.json:4)" in line]
    [defaults] = [line for line in told if "another default" in line]
    assert "vae_dtype is fp32 (there bf16)" in defaults and "seed" not in defaults and "lr_end" not in defaults
    assert "grad_clip_method is norm (there value)" in defaults
    by_norm = load_file(tmp_path, {**values, "configs_dir": "x", "grad_clip_method": "norm"}).warnings
    assert not [line for line in by_norm if "grad_clip_method" in line]


def test_a_lora_of_the_original_becomes_one_of_ours(tmp_path):
    names = {"lora_type": "standard", "lora_rank": 64, "lora_alpha": 128, "init_lora": "a.safetensors"}
    names |= {"peft_lora_target_modules": '["to_q", "to_k"]', "base_model_precision": "int8-torchao"}
    loaded = load_file(tmp_path, {"model_type": "lora", **names, "flux_lora_target": "all"})
    lora = loaded.settings.lora
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout, lora.lora_init) == (64, 128, 0, Path("a.safetensors"))
    assert (lora.lora_target_modules, lora.base_model_precision) == ("to_q,to_k", "int8")
    assert "lora_dropout is 0.0 (there 0.1)" in loaded.warnings[-1]
    for more in ({"lora_type": "lycoris"}, {"use_dora": True}, {"flux_lora_target": "mmdit"}):
        with pytest.raises(SettingsError, match=next(iter(more))):
            load_file(tmp_path, {"model_type": "lora", **more})


def test_settings_of_lora_have_no_effect_on_a_full_run(tmp_path):
    [warning] = load_file(tmp_path, {"lora_rank": 8}).warnings
    place = f"[lora_rank: {tmp_path}/c.json:2]"
    assert warning == f"lora_rank = 8 has no effect with model_type=full: it is for LoRA {place}"


def test_a_flag_of_the_original_is_answered_too():
    assert (
        load({"--push_checkpoints_to_hub": "false"}, complete=False, environment={})
        .warnings[0]
        .startswith("flag: 1 setting")
    )
    with pytest.raises(SettingsError, match="push_checkpoints_to_hub = 'true' .flag.: checkpoints are not uploaded"):
        load({"--push_checkpoints_to_hub": "true"}, complete=False, environment={})


def test_flags_of_the_original_reach_the_ranks_as_they_were_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--model_family=sdxl",
        "--instance_data_dir=.",
        "--num_processes=2",
        "--configs_dir=x",
        "--loss_type",
        "l2",
    ]
    with pytest.raises(SystemExit) as caught:
        main(["train", "--dry_run", *flags])
    plan = capsys.readouterr().out
    assert caught.value.code == 0 and " --loss_type=l2" in plan and " --configs_dir=x" in plan
    with pytest.raises(SystemExit):
        main(["train", *flags, "--push_checkpoints_to_hub"])
    assert "push_checkpoints_to_hub = 'true' (flag): checkpoints are not uploaded" in capsys.readouterr().err


ENV = """\
export HF_TOKEN='secret'
NCCL_DEBUG=INFO
CUDA_VISIBLE_DEVICES=0,1
CONFIG_TYPE=json
RESUME_CHECKPOINT=none
MAX_NUM_STEPS=10
NUM_EPOCHS=0
CHECKPOINTING_LIMIT=2
USE_GRADIENT_CHECKPOINTING=false
LR_SCHEDULE=cosine
TRAINER_DYNAMO_BACKEND=eager
DATALOADER_CONFIG=d.json
ACCELERATE_CONFIG_PATH=none
TORCH_NUM_THREADS=8
"""


def test_config_env_of_the_original_is_read(tmp_path):
    path = tmp_path / "config.env"
    path.write_text(ENV)
    loaded = load({}, path, complete=False, environment={"HOME": str(tmp_path)})
    made = settings_as_json(loaded)
    names = ("resume_from_checkpoint", "max_train_steps", "num_train_epochs", "checkpoints_total_limit")
    assert [made[name] for name in names] == ["none", 10, 0, 2]
    names = ("gradient_checkpointing", "lr_scheduler", "dynamo_backend", "data_backend_config")
    assert [made[name] for name in names] == [False, "cosine", "eager", "d.json"]
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


def test_arguments_in_config_env_are_settings_with_the_place_of_their_variable(tmp_path):
    path = tmp_path / "config.env"
    lines = ["LR_WARMUP_STEPS=7", "TRAINER_EXTRA_ARGS='--use_ema --lr-end=1e-7'", "DEBUG_EXTRA_ARGS='--snr_gamma 5'"]
    path.write_text("\n".join([*lines, 'TRAINER_EXTRA_ARGS+=" --push_checkpoints_to_hub=$WHETHER --ema_decay $DECAY"']))
    environment = {"WHETHER": "no", "DECAY": "0.5", "SIMPLETUNER_TRAINER_EXTRA_ARGS": "--seed 5"}
    loaded = load({}, path, complete=False, environment=environment)
    made = settings_as_json(loaded)
    assert [made[name] for name in ("use_ema", "lr_end", "snr_gamma", "ema_decay")] == [True, 1e-7, 5.0, 0.5]
    assert (loaded.origins["lr_end"].place, loaded.origins["ema_decay"].given) == (
        f"{path}:4 TRAINER_EXTRA_ARGS",
        "$DECAY",
    )
    assert loaded.origins["seed"].place == "environment SIMPLETUNER_TRAINER_EXTRA_ARGS"
    assert not any("EXTRA_ARGS" in warning for warning in loaded.warnings)
    with pytest.raises(SettingsError) as caught:
        load({}, path, complete=False, environment={"WHETHER": "secret", "DECAY": "secret"})
    assert (
        f"push_checkpoints_to_hub = '$WHETHER' ({path}:4 TRAINER_EXTRA_ARGS): checkpoints are not uploaded"
        in caught.value.message
    )
    assert f"ema_decay = '$DECAY' ({path}:4 TRAINER_EXTRA_ARGS): use a number" in caught.value.message
    assert "secret" not in caught.value.message
    path.write_text('TRAINER_EXTRA_ARGS="--instance_prompt=\'a"\nLR_END=1\nTRAINER_EXTRA_ARGS=--lr_end=2\n')
    with pytest.raises(SettingsError, match="a quote in it is not closed") as caught:
        load({}, path, complete=False, environment={})
    assert f"lr_end ({path}:2 and {path}:3 TRAINER_EXTRA_ARGS): it is set twice" in caught.value.message


def test_beside_a_named_file_config_env_stops_a_run_only_where_its_value_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    refused = "PUSH_CHECKPOINTS_TO_HUB=true\nSEDE=1\nOPTIMIZER=bnb-adamw8bit\n"
    refused += "DEEPSPEED_CONFIG=gone.json\nSEED=x\nHF_TOKEN=y\n"
    Path("config/config.env").write_text(refused)
    Path("run.toml").write_text("optimizer = 'lion'\ndeepspeed_config = 'none'\n")
    loaded = load({"seed": "5"}, Path("run.toml"), complete=False, environment={})
    assert (loaded.settings.optimizer.optimizer, loaded.settings.training.seed) == ("lion", 5)
    assert loaded.variables == {"HF_TOKEN": "y"}
    unused = [line for line in loaded.warnings if line.endswith("; it is not used, since a config file is named")]
    assert [line.partition(" (")[2][: len("config/config.env:1")] for line in unused] == [
        f"config/config.env:{line}" for line in (1, 2, 3, 4)
    ]
    by_variable = load({"seed": "5"}, complete=False, environment={"SIMPLETUNER_CONFIG": "run.toml"})
    assert by_variable.warnings == loaded.warnings
    Path("run.toml").write_text("")
    with pytest.raises(SettingsError) as caught:  # what nothing else sets still counts
        load({}, Path("run.toml"), complete=False, environment={})
    assert [mistake.setting for mistake in caught.value.mistakes] == ["optimizer", "deepspeed_config", "seed"]
    with pytest.raises(
        SettingsError, match="push_checkpoints_to_hub = 'true' .config/config.env:1.: checkpoints are not uploaded"
    ):
        load({"seed": "5", "optimizer": "lion"}, complete=False, environment={})


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        rows = [(key, value, answer(Path(place), key, json.loads(value))) for key, value, *_ in CASES]
    CORPUS.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
