"""The batch of all ranks together, from which accumulation follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded, load, settings_as_json

RANK = {"RANK": "0", "WORLD_SIZE": "8"}


def loaded(config: Path | None = None, environment: dict[str, str] | None = None, **flags: str) -> Loaded:
    return load(flags, config, complete=False, environment=environment or {})


@pytest.mark.parametrize(
    ("flags", "environment", "steps"),
    [
        ({"num_processes": "2"}, {}, 4),
        ({"num_processes": "1"}, {}, 8),
        ({}, RANK, 1),
        ({"num_processes": "4", "context_parallel_size": "2", "fsdp_enable": "true"}, {}, 4),
        ({"num_processes": "2", "gradient_accumulation_steps": "4"}, {}, 4),
    ],
)
def test_accumulation_follows_from_the_number_of_ranks(flags, environment, steps):
    found = loaded(environment=environment, global_batch_size="32", train_batch_size="4", **flags)
    assert found.settings.training.gradient_accumulation_steps == steps and found.settings.effective_batch_size == 32


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"global_batch_size": "12", "train_batch_size": "4", "num_processes": "2"},
            "global_batch_size = 12 (flag) is no multiple of train_batch_size 4 x 2 ranks: set train_batch_size to "
            "3, 2, 1, or global_batch_size to 8 or 16",
        ),
        (
            {"global_batch_size": "10", "train_batch_size": "4", "num_processes": "3"},
            "global_batch_size = 10 (flag) is no multiple of train_batch_size 4 x 3 ranks: set global_batch_size to "
            "12, or start a number of ranks that divides 10",
        ),
        (
            {"global_batch_size": "32", "train_batch_size": "4", "gradient_accumulation_steps": "2"},
            "gradient_accumulation_steps = '2' (flag): global_batch_size = 32 (flag) says 8; keep one of them",
        ),
        (
            {"global_batch_size": "999999999", "train_batch_size": "1000000"},
            "global_batch_size = 999999999 (flag) is no multiple of train_batch_size 1000000 x 1 rank: set "
            "train_batch_size to 2997, 999, 333, 111, 81, 37, or global_batch_size to 999000000 or 1000000000",
        ),
        (  # a slip of the hand: sizes were tried one by one, for hours
            {"global_batch_size": f"{10**15}"},
            f"global_batch_size = '{10**15}' (flag): use a whole number of at least 1 and at most 1000000000, or none",
        ),
        (
            {"global_batch_size": "0"},
            "global_batch_size = '0' (flag): use a whole number of at least 1 and at most 1000000000, or none",
        ),
    ],
)
def test_what_cannot_be_is_one_mistake(flags, said):
    with pytest.raises(SettingsError) as caught:
        loaded(**flags)
    assert caught.value.message == said


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16))
def test_every_suggested_batch_of_a_rank_divides(wanted, batch, ranks):
    flags = {"global_batch_size": str(wanted), "num_processes": str(ranks)}
    try:
        assert loaded(**flags, train_batch_size=str(batch)).settings.effective_batch_size == wanted
    except SettingsError as error:
        _, _, sizes = error.message.partition("set train_batch_size to ")
        for size in filter(None, sizes.partition(", or")[0].split(", ")):
            assert loaded(**flags, train_batch_size=size).settings.effective_batch_size == wanted


def test_the_settings_of_a_run_replay_on_another_number_of_ranks(tmp_path):
    first = loaded(global_batch_size="32", train_batch_size="4", num_processes="2")
    (tmp_path / "settings.json").write_text(json.dumps(settings_as_json(first)))
    again = loaded(tmp_path / "settings.json", num_processes="4")
    assert again.settings.training.gradient_accumulation_steps == 2 and again.settings.effective_batch_size == 32
