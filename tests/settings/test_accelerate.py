"""What becomes of accelerate's files: every field is a setting, a reason, or a warning; samples.txt shows all of it.

Regenerate it with `python tests/settings/test_accelerate.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from simpletuner.settings import load
from simpletuner.settings.accelerate import LAUNCHED, RULES, map_file, read_file
from simpletuner.settings.key_table import Maps
from simpletuner.settings.loading import settings_as_json
from simpletuner.settings.sections import setting_fields

SAMPLES = Path(__file__).with_name("accelerate")
GOLDEN = SAMPLES / "samples.txt"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.name not in ("samples.txt", "ds_config.json"))
SECTIONS = (
    "deepspeed_config",
    "dynamo_config",
    "fsdp_config",
    "parallelism_config",
    "fp8_config",
    "megatron_lm_config",
    "mpirun_config",
)


def render(name: str) -> str:
    """Return what one sample becomes: settings with their places, what is not used, and why the rest needs nothing."""
    loaded = load({"accelerate_config": name}, complete=False, environment={})
    values = settings_as_json(loaded)
    settings = [f"  {key} = {json.dumps(values[key])}  ({origin})" for key, origin in loaded.origins.items()]
    quiet = [item for item in map_file(read_file(Path(name))) if item.outcome == "neutral"]
    reasons = [f"  {item.path} = {json.dumps(item.value)}: {item.note}" for item in quiet]
    return "\n".join([f"# {name}", *settings, *(f"  warning: {text}" for text in loaded.warnings), *reasons, ""])


def render_all() -> str:
    with contextlib.chdir(SAMPLES):
        return "\n".join(map(render, NAMES))


def test_each_sample_becomes_the_reviewed_settings():
    assert render_all() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_each_sample_is_one_that_accelerate_accepts(name):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(SAMPLES / name)).num_processes >= 1


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_a_sample_is_left_out(name):
    entries = read_file(SAMPLES / name)
    leaves = {
        (f"{entry.key}.{field}" if isinstance(entry.value, dict) else entry.key)
        for entry in entries
        for field in (entry.value if isinstance(entry.value, dict) else [""])
    }
    accounted = {item.path for item in map_file(entries)}
    together = {"fp8_config", "mpirun_config"} & accounted
    assert {field for field in leaves if field.partition(".")[0] not in together} <= accounted


def test_every_field_of_accelerates_configuration_has_a_row():
    from accelerate.commands.config.config_args import ClusterConfig

    known = {name.partition(".")[0] for name in RULES}
    assert {field.name for field in fields(ClusterConfig)} - known == set()


def test_every_field_that_accelerate_config_asks_for_has_a_row():
    from accelerate.commands.config import cluster

    source = inspect.getsource(cluster)
    asked = {f"{section}.{name}" for section, name in re.findall(r'(\w+_config)\["(\w+)"\]', source)}
    asked |= {
        f"{section}.{prefix}{name}"
        for section in SECTIONS
        for prefix in re.findall(r'prefix = "(\w+)"', source)
        if section.startswith(prefix.split("_")[0])
        for name in re.findall(rf'{section}\[prefix \+ "(\w+)"\]', source)
    }
    assert len(asked) > 40
    missing = {name for name in asked if name not in RULES and name.partition(".")[0] not in RULES}
    assert missing == set()


def test_every_flag_of_accelerate_launch_about_fsdp_deepspeed_dynamo_and_parallelism_has_a_row():
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions}
    sections = {"fsdp_": "fsdp_config", "dynamo_": "dynamo_config", "parallelism_": "parallelism_config"}
    wanted = {f"{sections[start]}.{flag}" for flag in flags for start in sections if flag.startswith(start)}
    assert len(wanted) > 25
    assert wanted - set(RULES) == set()


def launched_environment(name: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` would give to the ranks of a sample."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    arguments, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", name, "-m", "simpletuner"])
    )
    arguments.module, arguments.deepspeed_fields_from_accelerate_config = True, ""
    if arguments.use_deepspeed:
        return prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.use_fsdp or arguments.multi_gpu:
        return prepare_multi_gpu_env(arguments)
    return prepare_simple_launcher_cmd_env(arguments)[1]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("older", "deepspeed.y"))])
def test_what_accelerate_launch_hands_to_its_ranks_means_the_same_as_its_file(name, monkeypatch):
    """Aside: mpirun is not here; accelerate hands on no nvme_path."""
    monkeypatch.chdir(SAMPLES)
    before = dict(os.environ)
    by_file = load({"accelerate_config": name}, complete=False, environment={}).settings
    try:
        handed = {key: value for key, value in launched_environment(name).items() if before.get(key) != value}
    finally:
        os.environ.clear()
        os.environ.update(before)
    ranks = {"RANK": "0", "WORLD_SIZE": str(by_file.launch.num_processes)}
    by_launch = load({}, complete=False, environment=handed | ranks)
    assert by_launch.settings.model_copy(update={"launch": by_file.launch}) == by_file
    assert by_launch.settings.launch.num_processes == by_file.launch.num_processes
    assert {origin.source for origin in by_launch.origins.values()} <= {"accelerate launch", "launcher"}


def test_rows_and_variables_lead_to_settings_that_there_are():
    assert {rule.setting for rule in RULES.values() if isinstance(rule, Maps)} <= set(setting_fields())
    assert set(LAUNCHED.values()) <= set(RULES)


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "NO"])
def test_a_section_without_fields_turns_nothing_on(tmp_path, engine):
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: {engine}\ndeepspeed_config: none\nfsdp_config: 3\n")
    loaded = load({"accelerate_config": str(path)}, complete=False, environment={})
    assert loaded.settings.parallel.zero_stage is None
    assert loaded.warnings == (f"{path}: fsdp_config = 3 is not used: not a field that simpletuner knows",)


def test_the_file_is_never_written(tmp_path):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in SAMPLES.iterdir()}
    render_all()
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in SAMPLES.iterdir()} == before


if __name__ == "__main__":
    GOLDEN.write_text(render_all(), encoding="utf-8")
