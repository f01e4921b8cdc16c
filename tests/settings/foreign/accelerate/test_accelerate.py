"""What becomes of accelerate's files: every field is a setting, a reason, or a warning; samples.txt shows all of it.

Regenerate it with `python tests/settings/foreign/accelerate/test_accelerate.py`.
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

from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.foreign.accelerate import LAUNCHED
from simpletuner.settings.foreign.accelerate_fields import RULES, map_file, read_file
from simpletuner.settings.foreign.key_table import Maps
from simpletuner.settings.resolving.loading import settings_as_json

SAMPLES = Path(__file__).with_name("samples")
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
    ranks["GROUP_WORLD_SIZE"] = str(by_file.launch.num_machines)
    by_launch = load({}, complete=False, environment=handed | ranks)
    assert by_launch.settings.model_copy(update={"launch": by_file.launch}) == by_file
    assert by_launch.settings.launch.num_processes == by_file.launch.num_processes
    assert {origin.source for origin in by_launch.origins.values()} <= {"accelerate launch", "launcher"}


def test_rows_and_variables_lead_to_settings_that_there_are():
    assert {rule.setting for rule in RULES.values() if isinstance(rule, Maps)} <= set(setting_fields())
    assert set(LAUNCHED.values()) <= set(RULES)


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Return a function that loads the settings of a file, which is called a.yaml in answers."""
    monkeypatch.chdir(tmp_path)

    def loaded(text: str, **flags: str):
        Path("a.yaml").write_text(text)
        enough = {"model_family": "sdxl", "instance_data_dir": "x"}
        return load({"accelerate_config": "a.yaml", **enough, **flags}, environment={})

    return loaded


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: FDSP", "distributed_type = 'FDSP' (a.yaml:1): use one of NO, MULTI_GPU, MULTI_CPU, FSDP, "
         "DEEPSPEED; did you mean `FSDP`?"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 2", "(a.yaml:1): use one of NO, MULTI_GPU"),
        ("num_machines: 1\ndistributed_type: MULTI_GPU", "num_processes is missing: distributed_type: MULTI_GPU "
         "(a.yaml:2) means several ranks: write it there, or give --num_processes=8"),
        ("distributed_type: FSDP\nnum_processes: -1", "num_processes is missing"),
        ("distributed_type: NO\ndeepspeed_config: ds.json", "deepspeed_config = 'ds.json' (a.yaml:2): use a section of "
         "fields, in which deepspeed_config_file names a file"),
        ("distributed_type: NO\nfsdp_config: 3", "fsdp_config = 3 (a.yaml:2): use a section of fields"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", "stage 0 is plain data parallelism"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FUL_SHARD}", "did you mean `FULL_SHARD`?"),
        ("distributed_type: FSDP\nfsdp_config: {version: 2, fsdp_version: 2}", "fsdp_config.version means the same"),
    ],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(read, text, said):
    with pytest.raises(SettingsError) as caught:
        read(text)
    assert said in caught.value.message
    assert len(caught.value.message.splitlines()) <= 2


def test_ranks_may_come_from_elsewhere_and_an_engine_needs_no_section(read):
    for engine, stage in (("FSDP", None), ("DEEPSPEED", 2), ("MULTI_GPU", None)):
        text = f"distributed_type: {engine}\ndeepspeed_config: none\nfsdp_config:\n"
        parallel = read(text, num_processes="2").settings.parallel
        assert (parallel.fsdp_enable, parallel.zero_stage) == (engine == "FSDP", stage)


@pytest.mark.parametrize("field", ["sharding_strategy", "fsdp_reshard_after_forward"])
@pytest.mark.parametrize(
    ("strategy", "reshards", "copies"),
    [("1", True, 1), ("FULL_SHARD", True, 1), (2, False, 1), ("hybrid_shard", True, 2), (5, False, 2)],
)
def test_a_sharding_strategy_is_known_by_both_names_and_by_number(read, strategy, reshards, copies, field):
    machines = "num_processes: 8\nnum_machines: 2\nmain_process_ip: a"
    loaded = read(f"distributed_type: FSDP\n{machines}\nfsdp_config: {{{field}: {strategy}}}")
    parallel = loaded.settings.parallel
    assert parallel.fsdp_enable and parallel.fsdp_reshard_after_forward is reshards
    assert parallel.dp_replicate_size == copies, "hybrid sharding keeps one copy on each machine"
    overruled = field == "fsdp_reshard_after_forward" and strategy not in ("1", "FULL_SHARD")
    assert ["FULL_SHARD" in said for said in loaded.warnings] == [True] * overruled, "as accelerate itself reads it"


@pytest.mark.parametrize("field", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
@pytest.mark.parametrize("strategy", ["NO_SHARD", 3])
def test_what_is_not_sharded_is_data_parallel(read, strategy, field):
    loaded = read(f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{{field}: {strategy}}}")
    assert not loaded.settings.parallel.fsdp_enable
    assert len(loaded.warnings) == (field == "fsdp_reshard_after_forward")


def test_what_accelerate_would_fill_in_for_deepspeed_is_said_unless_it_is_decided(read):
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2"
    assert ["gradient_clipping = 1.0" in said for said in read(text + "}").warnings] == [True]
    for decided in (read(text + "}", max_grad_norm="2"), read(text + ", gradient_clipping: auto}"),
                    read(text + ", gradient_clipping: 1}")):  # fmt: skip
        assert decided.warnings == ()


def test_copies_and_offloading_are_taken_from_accelerate(read):
    text = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_offload_params: true}\n"
    loaded = read(text + "parallelism_config: {parallelism_config_dp_replicate_size: 2}")
    assert (loaded.settings.parallel.dp_replicate_size, loaded.settings.parallel.fsdp_offload_params) == (2, True)


def test_short_names_of_old_files_are_those_with_the_prefix(read):
    section = "fsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: 2000, offload_params: false}"
    loaded = read(f"distributed_type: FSDP\nnum_processes: 2\n{section}\ndynamo_config: {{backend: INDUCTOR}}\n")
    assert (loaded.settings.parallel.fsdp_min_num_params, loaded.settings.compile.dynamo_backend) == (2000, "inductor")
    assert loaded.warnings == ()


def test_unknown_fields_are_one_line_with_the_nearest_names(read):
    many = "".join(f"k{number}: {number}\n" for number in range(1900))
    [warning] = read(f"distributed_type: NO\nnum_proceses: 8\nfsdp_config.fsdp_version: 1\n{many}").warnings
    assert warning.startswith(
        "a.yaml:2: not used, since simpletuner does not know it: num_proceses = 8 (did you mean `num_processes`?), "
        "fsdp_config.fsdp_version = 1"
    )
    assert warning.endswith("k2 = 2, and 1,897 more")


def test_the_file_is_never_written(tmp_path):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in SAMPLES.iterdir()}
    render_all()
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in SAMPLES.iterdir()} == before


if __name__ == "__main__":
    GOLDEN.write_text(render_all(), encoding="utf-8")
