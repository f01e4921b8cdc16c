from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.commands.options import as_arguments, metavar, normalize_argv, with_settings
from simpletuner.errors import SettingsError
from simpletuner.settings.sections import setting_fields

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

    wrapped = with_settings(command)
    assert list(inspect.signature(wrapped).parameters) == [
        "context",
        "config",
        "accelerate_config",
        "own",
        "help_all",
        *setting_fields(),
    ]
    assert wrapped.__doc__ == "Do something."
    given_values = dict.fromkeys(setting_fields())
    context = SimpleNamespace(args=["--sed=1", "--lr", "2", "stray"])
    wrapped(context=context, config=Path("c.json"), own=True, **{**given_values, "seed": "3", "validation_prompt": []})
    assert seen == {
        "flags": {"seed": "3", "--sed": "1", "--lr": "2", "stray": ""},
        "config": Path("c.json"),
        "own": True,
    }


def test_help_shows_choices_or_the_kind_of_value():
    shown = {name: metavar(field.annotation) for name, field in setting_fields().items()}
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
        (["--learning_rate=1e-4", "--learning-rate", "2e-4"], "--learning_rate is given twice: 1e-4 and 2e-4"),
        (
            ["--validation_steps=1", "--validation_step_interval=2"],
            "--validation_step_interval is given twice: 1 and 2",
        ),
        (["--use_ema", "--seed=1", "--use_ema=false"], "--use_ema is given twice: true and false"),
        (["--config", "a.toml", "--config=b.toml"], "--config is given twice: a.toml and b.toml"),
        (["--accelerate_config=a", "--accelerate_config=none"], "--accelerate_config is given twice: a and none"),
    ],
)
def test_a_flag_with_two_values_is_refused(arguments, said):
    with pytest.raises(SettingsError) as caught:
        normalize_argv(["train", *arguments])
    assert caught.value.message == said


def test_the_same_value_twice_and_several_items_of_a_list_are_fine():
    for arguments in (["--seed=3", "--seed=3"], ["--validation_prompt=a", "--validation_prompt="], ["--use_ema"] * 2):
        assert len(normalize_argv(arguments)) == len(arguments)
