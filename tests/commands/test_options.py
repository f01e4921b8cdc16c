from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from typer.main import get_command

from simpletuner.app import main
from simpletuner.commands.help import SettingsCommand
from simpletuner.commands.options import (
    UNKNOWN_FLAGS,
    as_arguments,
    normalize_argv,
    outranked_flags,
    with_settings,
)
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.declared.table import setting_table

CANONICAL = ["--fsdp_enable=true"]


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        (["--fsdp_enable"], CANONICAL),
        (["--fsdp_enable=true"], CANONICAL),
        (["--fsdp-enable"], CANONICAL),
        (["--fsdp-enable=TRUE"], ["--fsdp_enable=TRUE"]),
        (["--fsdp_enable", "false"], ["--fsdp_enable", "false"]),
        (["--fsdp-enable", "Yes"], ["--fsdp_enable", "Yes"]),
        (["--fsdp_enable", "0"], ["--fsdp_enable", "0"]),
        (["--fsdp_enable", "--seed", "3"], [*CANONICAL, "--seed", "3"]),
        (["--seed", "3", "--crop"], ["--seed", "3", "--crop=true"]),
        (["--train-batch-size", "4"], ["--train_batch_size", "4"]),
        (["--checkpointing_steps=5"], ["--checkpoint_step_interval=5"]),
        (["--checkpointing-steps", "5"], ["--checkpoint_step_interval", "5"]),
        (["--instance_prompt=a=b -- c"], ["--instance_prompt=a=b -- c"]),
        (["train", "--help"], ["train", "--help"]),
        (["--no-such-flag", "x"], ["--no-such-flag", "x"]),
        (["-v"], ["-v"]),
        ([], []),
    ],
)
def test_flags_are_understood_in_every_usual_spelling(typed, understood):
    assert normalize_argv(typed) == understood


@given(st.sampled_from(sorted(setting_fields())), st.data())
@hypothesis_settings(deadline=None)
def test_dashes_and_underscores_mean_the_same_in_every_flag(name, data):
    typed = "".join(data.draw(st.sampled_from("-_")) if letter == "_" else letter for letter in name)
    assert normalize_argv([f"--{typed}=x"]) == [f"--{name}=x"]


def test_a_command_gets_one_flag_per_setting_and_only_what_was_typed():
    seen = {}

    def command(flags: dict, config: Path | None, *, own: bool = False) -> None:
        """Do something."""
        seen.update(flags=flags, config=config, own=own)

    app = typer.Typer(add_completion=False)
    app.command("do", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(command))
    built = get_command(app)
    own = ["config", "accelerate_config", "own", "help_all"]
    assert [each.name for each in built.own] == own, "settings are made when they are asked for"
    assert [each.name for each in built.params] == [*own, *setting_fields()]
    assert built.help == "Do something."
    typed = ["--config=c.json", "--own", "--seed=3", "--validation_prompt=a", "--sed=1", "--lr", "2", "stray"]
    built(typed, standalone_mode=False)
    assert seen == {
        "flags": {"seed": "3", "validation_prompt": ["a"], "--sed": "1", "--lr": "2", "stray": ""},
        "config": Path("c.json"),
        "own": True,
    }


def test_help_shows_choices_or_the_kind_of_value():
    shown = {name: row.metavar for name, row in setting_table().items()}
    assert shown["mixed_precision"] == "no|bf16"
    assert shown["fsdp_version"] == "1|2"
    assert shown["prediction_type"] == "epsilon|v_prediction"
    assert shown["fsdp_enable"] == "true|false"
    assert shown["seed"] == shown["max_train_steps"] == "INTEGER"
    assert shown["learning_rate"] == shown["snr_gamma"] == "NUMBER"
    assert shown["cache_dir_vae"] == "PATH"
    assert shown["validation_prompt"] == shown["model_family"] == "TEXT"


def test_flags_can_be_given_again_to_another_process():
    flags = {"seed": "3", "instance_prompt": "--a b=c", "validation_prompt": ["one", "two three"]}
    arguments = as_arguments(flags, Path("c d.toml"))
    assert arguments == [
        "--config=c d.toml",
        "--seed=3",
        "--instance_prompt=--a b=c",
        "--validation_prompt=one",
        "--validation_prompt=two three",
    ]
    assert normalize_argv(arguments) == arguments
    assert as_arguments({}, None) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--learning_rate=1", "--learning-rate", "2"],
            "--learning_rate is given twice: '2' counts, not '1'",
        ),
        (
            ["--validation_steps=1", "--validation_step_interval=2"],
            "--validation_step_interval is given twice: '2' counts, not '1'",
        ),
        (["--use_ema", "--seed=1", "--use_ema=false"], "--use_ema is given twice: 'false' counts, not 'true'"),
        (["--config", "a.toml", "--config=b.toml"], "--config is given twice: 'b.toml' counts, not 'a.toml'"),
        (
            ["--accelerate_config=a", "--accelerate_config=none"],
            "--accelerate_config is given twice: 'none' counts, not 'a'",
        ),
        (["--notify_url=http://a", "--notify_url=http://b"], "--notify_url is given twice: ... counts, not ..."),
    ],
)
def test_of_two_values_the_last_one_counts_and_is_named(arguments, said):
    assert list(outranked_flags(["train", *arguments])) == [said]


def test_the_command_line_says_which_of_two_values_it_takes(capsys, monkeypatch):
    twice = ["config", "show", "--json", "--seed=1", "--learning_rate=0.9", "--seed=2"]
    for variables, said in (({}, "warning: --seed is given twice: '2' counts, not '1'\n"), ({"RANK": "1"}, "")):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main(twice)
        out, err = capsys.readouterr()
        assert (json.loads(out)["seed"]["value"], err) == (2, said)


def test_the_same_value_twice_and_several_items_of_a_list_are_fine():
    for arguments in (["--seed=3", "--seed=3"], ["--validation_prompt=a", "--validation_prompt="], ["--use_ema"] * 2):
        assert len(normalize_argv(arguments)) == len(arguments) and not list(outranked_flags(arguments))
