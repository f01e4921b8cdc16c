"""Exports replayed by what replays them for a user: bash, config files, and accelerate's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from simpletuner.settings import Loaded, load, settings_as_json
from simpletuner.settings.showing.export import export

NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
ODD: dict[str, Any] = {
    "model_family": "sdxl",
    "instance_data_dir": "pictures of `me`; $(HOME)/*",
    "instance_prompt": 'it\'s "a"\n\t\\n # \x07 \x85 Bär 火 ',
    "validation_prompt": ["--seed=3", "[a, b]", " true ", "none", "two\nlines\n"],
    "validation_negative_prompt": "",
    "max_train_steps": None,
    "learning_rate": 3e-5,
    "crop": True,
    "deepspeed_config": {
        "zero_optimization": {"stage": 3, "leaf_module": {"names": ["it's $x", "a b"]}, "overlap_comm": True},
        "flops_profiler": {"recompute_fwd_factor": 1e-5},
    },
}
NODES: dict[str, Any] = {
    "model_family": "sdxl",
    "instance_data_dir": "pictures",
    "instance_prompt": "$SLURM_NODEID `x`",
    "num_processes": 6,
    "num_machines": 3,
    "machine_rank": 2,
}
AS_SHOW = f"""#!/bin/bash
[ "$1" = train ] || exit 9
shift
exec {sys.executable} -m simpletuner config show --all --json "$@"
"""


@pytest.fixture
def bash(tmp_path, monkeypatch):
    """Run a script by the real bash, with a `simpletuner` on the path whose `train` shows settings."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    executable(programs / "simpletuner", AS_SHOW)

    def run(script: str, **variables: str) -> str:
        paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment = NOWHERE | paths | {"HOME": str(tmp_path)} | variables
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def loaded(values: dict[str, Any]) -> Loaded:
    return load(values, complete=False, environment=NOWHERE)


def shown(text: str) -> dict[str, Any]:
    return {name: row["value"] for name, row in json.loads(text).items()}


@pytest.mark.parametrize("everything", [False, True])
def test_bash_runs_the_exported_command_line(bash, everything):
    settings = loaded(ODD)
    assert shown(bash(export(settings, "cli", everything).text)) == settings_as_json(settings)


@pytest.mark.parametrize(
    ("saved_as", "script"),
    [
        ("x.env", "set -a; . ./x.env; simpletuner train"),
        ("config/config.env", "simpletuner train"),
        ("x.env", "simpletuner train --config x.env"),
    ],
)
def test_exported_variables_replay_through_a_shell_and_as_files(bash, saved_as, script):
    settings = loaded(ODD)
    Path(saved_as).parent.mkdir(exist_ok=True)
    Path(saved_as).write_text(export(settings, "env").text)
    assert shown(bash(script)) == settings_as_json(settings)


@pytest.mark.parametrize("to", ["json", "toml", "yaml", "env", "deepspeed"])
def test_the_command_shown_after_an_export_replays_the_file_wherever_it_was_saved(bash, to):
    settings = loaded(ODD | {"instance_prompt": f"deepspeed.json settings.{to} config.env"})
    exported = export(settings, to)
    path = Path(f"my folder/it's mine.{'json' if to == 'deepspeed' else to}")
    path.parent.mkdir()
    path.write_text(exported.text)
    assert shown(bash(exported.replay(str(path)))) == settings_as_json(settings)


SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
nodes=$(sed -n 's/^#SBATCH --nodes=//p' job.sbatch)
for ((node = 0; node < nodes; node++)); do SLURM_PROCID=$node SLURM_NODEID=$node "$@" > node$node.json || code=$?; done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show node gpu1" ] && echo "NodeName=gpu1 Arch=x86_64
   NodeAddr=10.0.0.1 NodeHostName=gpu1" && exit
[ "$*" = "show hostnames gpu[1-3]" ] || exit 9
for ((i = 1; i <= 20000; i++)); do echo "gpu$i"; done  # a reader that leaves early would end the job (SIGPIPE)
"""


@pytest.mark.parametrize("address", ["", "10.0.0.9"])
def test_the_slurm_script_starts_every_node_with_its_own_rank_at_the_jobs_first_one(bash, tmp_path, address):
    """An address of the settings, such as that of an accelerate file, is none of the job."""
    settings = loaded(NODES | ({"main_process_ip": address} if address else {}))
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", SCONTROL)
    script = export(settings, "slurm").text
    Path("job.sbatch").write_text(script)
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --gpus-per-node=2\n" in script
    bash("bash ./job.sbatch", SLURM_JOB_NODELIST="gpu[1-3]")
    for node in range(3):
        own = {"machine_rank": node, "main_process_ip": "10.0.0.1"}  # no host has the name gpu1
        assert shown(Path(f"node{node}.json").read_text()) == settings_as_json(settings) | own
    assert not Path("node3.json").exists()


STOPPED = """#!/bin/bash
[ "$SLURM_NODEID" != "$FAILS" ] || exit 3
exit $ASKED
"""


@pytest.mark.parametrize(("asked", "fails", "code"), [(143, "none", 143), (0, "none", 0), (143, "1", 3), (143, "0", 3)])
def test_the_slurm_script_ends_as_the_machine_that_failed_and_with_143_where_all_were_asked(
    bash, tmp_path, monkeypatch, asked, fails, code
):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("simpletuner", STOPPED)):
        executable(tmp_path / "bin" / name, text)
    Path("job.sbatch").write_text(export(loaded(NODES), "slurm").text)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "SLURM_JOB_NODELIST": "gpu[1-3]", "ASKED": str(asked), "FAILS": fails}
    assert subprocess.run(["bash", "job.sbatch"], env=given).returncode == code


def test_the_slurm_script_asks_for_its_nodes_and_gpus(bash):
    script = export(loaded(NODES), "slurm").text
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert [line.split("=")[0] for line in directives] == [
        "#SBATCH --job-name",
        "#SBATCH --nodes",
        "#SBATCH --ntasks-per-node",
        "#SBATCH --gpus-per-node",
        "#SBATCH --signal",
        "#SBATCH --output",
    ]
    to_fill_in = [line.split("=")[0] for line in script.splitlines() if line.startswith("##SBATCH")]
    assert to_fill_in == [f"##SBATCH --{name}" for name in ("time", "partition", "account", "cpus-per-task", "mem")]
    Path("job.sbatch").write_text(script)
    bash("bash -n job.sbatch")
    start = script.replace("\nsrun ", '\necho "${SRUN_CPUS_PER_TASK:-none}"; exit\n').replace("$(scontrol", "$(true")
    assert bash(start, SLURM_JOB_NODELIST="gpu1").strip() == "none"
    assert bash(start, SLURM_JOB_NODELIST="gpu1", SLURM_CPUS_PER_TASK="6").strip() == "6"


LAUNCH_ITSELF = {"num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids"}
"""What accelerate does with these, it does not tell its ranks."""


@pytest.mark.long
def test_accelerate_launch_starts_the_worker_with_the_exported_settings(tmp_path, sdxl_flags, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in sdxl_flags)
    small = {"resolution": 64, "aspect_bucket_alignment": 16, "gradient_checkpointing": False, "learning_rate": 1e-3}
    run = {"output_dir": tmp_path / "out", "max_train_steps": 1, "train_batch_size": 1, "mixed_precision": "no"}
    engine = {"fsdp_enable": True, "num_processes": 2, "use_cpu": True, "fsdp_reshard_after_forward": False}
    settings = loaded(flags | small | run | engine | {"instance_prompt": "it's $x\nand `y`"})
    exported = export(settings, "accelerate")
    Path("my accelerate.yaml").write_text(exported.text)
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("SIMPLETUNER_ACCELERATE_CONFIG", None)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", exported.replay("my accelerate.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PATH": path}, timeout=240)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((tmp_path / "out" / "settings.json").read_text())
    differing = {name for name, value in settings_as_json(settings).items() if recorded[name] != value}
    assert differing <= LAUNCH_ITSELF
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1
