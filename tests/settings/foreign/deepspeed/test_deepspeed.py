"""What the table of keys says of DeepSpeed, and what we give it, held against the installed DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from generated_settings import NOWHERE, loaded_settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.foreign.deepspeed_config import AIO, BUFFER_ELEMENTS, deepspeed_config
from simpletuner.settings.foreign.deepspeed_keys import OTHER_NAMES, RULES, TABLE
from simpletuner.settings.foreign.deepspeed_optimizers import OPTIMIZERS, REFUSED
from simpletuner.settings.foreign.deepspeed_schedules import PARAMS
from simpletuner.settings.foreign.deepspeed_schedules import REFUSED as REFUSED_SCHEDULES
from simpletuner.settings.foreign.key_table import Refuses
from simpletuner.training.optimizers import LearningRate, Schedule

FACTS = Path(__file__).parents[3] / "support" / "deepspeed_facts.py"
SAMPLES = Path(__file__).with_name("samples")
OWN = {"optimizer", "scheduler"}
"""What other modules read."""


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def asked() -> Iterator[Ask]:
    """What asks the installed DeepSpeed."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    command = [sys.executable, "-W", "ignore", str(FACTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        questions, said = process.stdin, process.stdout

        def ask(*question: Any) -> Any:
            print(json.dumps(question), file=questions, flush=True)
            return json.loads(next(line for line in said if line.startswith("answer ")).removeprefix("answer "))

        yield ask
        questions.close()


@pytest.fixture(scope="module")
def facts(asked: Ask) -> dict[str, Any]:
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


def test_what_deepspeed_takes_for_parameters_that_are_not_given_is_known(facts):
    assert json.loads(json.dumps({name: spec.defaults for name, spec in OPTIMIZERS.items()})) == facts["defaults"]
    assert {name for name, spec in OPTIMIZERS.items() if set(spec.defaults) != set(spec.shared)} == set()


def of_file(optimizer: str, params: dict[str, Any], scheduler: Any = None, **rest: Any) -> dict[str, Any]:
    blocks = {"optimizer": {"type": optimizer, "params": params}, "zero_optimization": {"stage": 1}}
    schedule = {"scheduler": {"type": scheduler[0], "params": scheduler[1]}} if scheduler else {}
    return {"train_micro_batch_size_per_gpu": 2} | blocks | schedule | rest


# torch_adam: DeepSpeed's own Adam would be compiled first, for a minute.
ADAMW = {"torch_adam": True, "lr": 3e-4}
LINEAR = {"warmup_num_steps": 5, "warmup_type": "linear"}
FILES = {
    "nothing": (of_file("AdamW", ADAMW), {"max_grad_norm"}),
    "rate": (of_file("Adagrad", {}, gradient_clipping=0.5), {"learning_rate", "adam_epsilon"}),
    "all": (
        of_file("AdamW", ADAMW | {"weight_decay": 0.1}, ("WarmupLR", LINEAR), gradient_clipping=0.5),
        set[str](),
    ),
    "warm-up": (of_file("AdamW", ADAMW, ("WarmupLR", {}), gradient_clipping=2.0), {"lr_warmup_steps"}),
    "decay": (
        of_file("AdamW", ADAMW, ("WarmupDecayLR", LINEAR | {"total_num_steps": 100}), gradient_clipping=2.0),
        {"warmup_max_lr"},
    ),
    "cosine": (
        of_file("AdamW", ADAMW, ("WarmupCosineLR", LINEAR | {"total_num_steps": 100}), gradient_clipping=2.0),
        {"lr_end"},
    ),
}
"""Files, and what has to be said of each: settings, or a key that is not there."""


def test_rates_clipping_and_decay_are_those_of_deepspeed_from_the_same_file_or_the_difference_is_said(asked, tmp_path):
    """DeepSpeed runs each file by itself, and as our engine starts it; rates are ours at every step."""
    configs = []
    loaded = {}
    for name, (config, _) in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        flags = {"deepspeed_config": str(tmp_path / f"{name}.json"), "use_cpu": True, "mixed_precision": "no"}
        loaded[name] = load(flags, complete=False, environment=NOWHERE)
        own = deepspeed_config(loaded[name].settings, 1)
        own["optimizer"]["params"] |= {"torch_adam": True} if own["optimizer"]["type"] == "AdamW" else {}
        configs += [config, own]
    runs = asked("run", configs)
    for number, (name, (_, said)) in enumerate(FILES.items()):
        theirs, started = runs[2 * number : 2 * number + 2]
        settings = loaded[name].settings
        rate = LearningRate(Schedule(settings.training.max_train_steps or 100), settings.optimizer)
        warnings = " ".join(loaded[name].warnings)
        assert {word for word in ALL_SAID if word in warnings} == said, (name, warnings)
        for step in (1, 2, 3, 10):
            their_rate, decay, clipping = theirs[step - 1]
            assert started[step - 1][1:] == [settings.optimizer.adam_weight_decay, settings.optimizer.max_grad_norm]
            assert decay == started[step - 1][1], name
            assert (clipping == started[step - 1][2]) is ("max_grad_norm" not in said), name
            # DeepSpeed's first two steps are at 0, ours begin with a share of the warm-up.
            lag = 2 / 5 * 3e-4 if "warmup_num_steps" in json.dumps(FILES[name][0]) and step < 7 else 0.0
            is_same = rate.at(step - 1) - lag - 1e-9 <= their_rate <= rate.at(step - 1) * 1.02
            assert is_same or said & {"learning_rate", "lr_warmup_steps", "warmup_max_lr"}, (name, step)
        if said & {"learning_rate", "lr_warmup_steps", "warmup_max_lr"}:
            assert theirs[9][0] != pytest.approx(rate.at(9), rel=0.02), name


def test_clipping_among_the_parameters_of_an_optimizer_is_refused_as_deepspeed_refuses_it(asked):
    files = [of_file(name, params | {"max_grad_norm": 0.5}) for name, params in (("AdamW", ADAMW), ("Adagrad", {}))]
    for config, answer in zip(files, asked("run", files), strict=True):
        assert "'max_grad_norm' is not supported as an optimizer parameter" in answer
        with pytest.raises(SettingsError) as caught:
            load({"deepspeed_config": config}, complete=False, environment=NOWHERE)
        assert "optimizer.params.max_grad_norm" in caught.value.message
        assert "write gradient_clipping at the top" in caught.value.message


ALL_SAID = ("max_grad_norm", "learning_rate", "adam_epsilon", "adam_weight_decay", "lr_warmup_steps", "lr_end",
            "warmup_max_lr", "adam_beta2")  # fmt: skip


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


def test_deepspeed_accepts_every_configuration_that_we_give_it(asked):
    configs = [*drawn_configs(60), *sample_configs()]
    assert len(configs) > 60
    assert "auto" not in json.dumps([config for config, _ in configs])
    answers = asked("accept", configs)
    assert {answer: config for answer, (config, _) in zip(answers, configs, strict=True) if answer} == {}


def test_a_configuration_that_deepspeed_refuses_is_told_by_that_test(asked):
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": {"stag": 2}}
    [answer] = asked("accept", [[config, 1]])
    assert "stag" in answer
