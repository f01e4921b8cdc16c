"""What the table of keys says of DeepSpeed, and what we give it, held against the installed DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from generated_settings import NOWHERE, loaded_settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.foreign.deepspeed.config import AIO, BUFFER_ELEMENTS, deepspeed_config
from simpletuner.settings.foreign.deepspeed.keys import OTHER_NAMES, RULES, TABLE
from simpletuner.settings.foreign.deepspeed.optimizers import OPTIMIZERS, REFUSED
from simpletuner.settings.foreign.deepspeed.schedules import PARAMS
from simpletuner.settings.foreign.deepspeed.schedules import REFUSED as REFUSED_SCHEDULES
from simpletuner.settings.foreign.key_table import Refuses

FACTS = Path(__file__).parents[3] / "support" / "deepspeed_facts.py"
SAMPLES = Path(__file__).with_name("samples")
OWN = {"optimizer", "scheduler"}
"""What other modules read."""


def asked(what: str, question: Any = None) -> Any:
    """Ask the installed DeepSpeed."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    command = [sys.executable, "-W", "ignore", str(FACTS), what]
    done = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return asked("facts")


def ours(section: str) -> set[str]:
    """Return the names that our table has in a section."""
    known = {name for name in (*RULES, *OTHER_NAMES) if name.startswith(section and f"{section}.")}
    return {name.removeprefix(section).lstrip(".").partition(".")[0] for name in known} | (set() if section else OWN)


def test_the_table_has_every_key_of_each_section(facts):
    sections = facts["keys"]
    assert len(sections) == 11
    for section, names in sections.items():
        assert set(names) - ours(section) == set(), section


def test_the_table_has_no_key_that_deepspeed_does_not_know(facts):
    removed, removed_of_zero = facts["removed"]
    for section, names in facts["keys"].items():
        known = {*names, *removed} if not section else {*names, *removed_of_zero}
        strangers = {f"{section}.{name}".lstrip(".") for name in ours(section) - known}
        assert strangers - OLDER == set(), section


OLDER = {"aio.thread_count", "sequence_parallel_size"}
"""What DeepSpeed knew, or asks for only where ranks split sequences."""


def test_what_deepspeed_has_removed_is_refused(facts):
    removed, removed_of_zero = facts["removed"]
    for name in [*removed, *(f"zero_optimization.{name}" for name in removed_of_zero)]:
        assert isinstance(RULES[name], Refuses), name


def test_what_we_fill_in_is_what_deepspeed_would(facts):
    assert facts["aio"] == AIO
    assert facts["buffer_size"] == BUFFER_ELEMENTS


def test_every_optimizer_and_schedule_of_deepspeed_is_usable_or_refused(facts):
    assert set(facts["optimizers"]) <= {*OPTIMIZERS, *REFUSED}
    assert set(facts["schedules"]) == {*PARAMS, *REFUSED_SCHEDULES}


def test_sections_hold_nothing_themselves():
    assert set() == TABLE.sections & set(RULES)


def drawn_configs(count: int) -> list[tuple[dict[str, Any], int]]:
    """Return what we would give DeepSpeed for settings of all kinds."""
    found: list[tuple[dict[str, Any], int]] = []

    @given(loaded=loaded_settings().filter(lambda loaded: loaded.settings.parallel.zero_stage is not None))
    @hypothesis_settings(max_examples=count, suppress_health_check=list(HealthCheck), database=None)
    def collect(loaded: Any) -> None:
        ranks = loaded.settings.launch.num_processes
        found.append((deepspeed_config(loaded.settings, ranks), ranks))

    collect()
    return found


def sample_configs() -> list[tuple[dict[str, Any], int]]:
    """Return what we would give DeepSpeed for each sample that we accept."""
    found = []
    for path in sorted(SAMPLES.glob("*.json")):
        try:
            loaded = load({"deepspeed_config": str(path), "num_processes": 2}, complete=False, environment=NOWHERE)
        except SettingsError:
            continue
        found.append((deepspeed_config(loaded.settings, 2), 2))
    return found


def test_deepspeed_accepts_every_configuration_that_we_give_it():
    configs = [*drawn_configs(60), *sample_configs()]
    assert len(configs) > 60
    assert "auto" not in json.dumps([config for config, _ in configs])
    answers = asked("accept", configs)
    assert {answer: config for answer, (config, _) in zip(answers, configs, strict=True) if answer} == {}


def test_a_configuration_that_deepspeed_refuses_is_told_by_that_test():
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": {"stag": 2}}
    [answer] = asked("accept", [[config, 1]])
    assert "stag" in answer
