"""Job files for clusters: valid by the clusters' own models, and each machine starts with the settings exported."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from settings.test_replaying import NODES, bash, executable, loaded, shown  # noqa: F401

from simpletuner.settings import settings_as_json
from simpletuner.settings.showing.clusters import CLUSTERS, OF_TORCHRUN
from simpletuner.settings.showing.export import export

PROMPT = "it's $(HOME) $$ %{command}\n`x` Bär 火 \U0001f98a"
ODD_NODES = NODES | {"instance_prompt": PROMPT, "main_process_ip": "10.0.0.9"}
ALONE = {name: value for name, value in ODD_NODES.items() if name not in ("num_machines", "machine_rank")}
TORCHRUN = """#!/bin/bash
options=()
while [ "$1" != -m ]; do options+=("$1"); shift; done
echo "${options[@]}" > options
shift
[ "$1" = simpletuner ] || exit 9
shift
exec simpletuner "$@"
"""


def kubelet(words: list[str], variables: dict[str, str]) -> str:
    """Return a container's command as the kubelet runs it: $(NAME) is replaced, $$ is $."""

    def value_of(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return shlex.join(re.sub(r"\$\$|\$\((\w+)\)", value_of, word) for word in words)


def pod_command(text: str) -> list[str]:
    [job] = yaml.safe_load(text)["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return container["command"]


def commands(to: str, text: str, machines: int) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield, for each machine, what its shell runs, the variables that the cluster sets, and the first address."""
    for number in range(machines):
        if to == "kubernetes":
            variables = {"JOB_COMPLETION_INDEX": str(number), "HOME": "/root"}
            yield kubelet(pod_command(text), variables), variables, "simpletuner-machines-0-0.simpletuner"
        elif to == "skypilot":
            ips = "10.1.0.5\n10.1.0.6\n10.1.0.7"
            yield yaml.safe_load(text)["run"], {"SKYPILOT_NODE_RANK": str(number), "SKYPILOT_NODE_IPS": ips}, "10.1.0.5"
        else:
            [script] = yaml.safe_load(text)["commands"]
            yield script, {"DSTACK_NODE_RANK": str(number), "DSTACK_MASTER_NODE_IP": "10.2.0.1"}, "10.2.0.1"


@pytest.mark.parametrize("to", ["kubernetes", "skypilot", "dstack"])
@pytest.mark.parametrize("values", [ODD_NODES, ALONE], ids=["three machines", "one machine"])
def test_every_machine_starts_with_its_number_at_the_first_one(to: str, values: dict[str, Any], bash):  # noqa: F811
    settings = loaded(values)
    machines = settings.settings.launch.num_machines
    started = list(commands(to, export(settings, to).text, machines))
    assert len(started) == machines
    for number, (script, variables, address) in enumerate(started):
        own = {"machine_rank": number, "main_process_ip": address} if machines > 1 else {"main_process_ip": ""}
        assert shown(bash(script, **variables)) == settings_as_json(settings) | own


@pytest.mark.parametrize("to", ["torchrun", "kubeflow"])
@pytest.mark.parametrize("values", [ODD_NODES, ALONE], ids=["three machines", "one machine"])
def test_torchrun_starts_ranks_with_the_settings_that_are_not_its_own(to, values, bash, tmp_path):  # noqa: F811
    executable(tmp_path / "bin" / "torchrun", TORCHRUN)
    settings = loaded(values)
    text, ranks, machines = export(settings, to).text, 2 if values is ODD_NODES else 6, 3 if values is ODD_NODES else 1
    script = kubelet(yaml.safe_load(text)["spec"]["trainer"]["command"], {}) if to == "kubeflow" else text
    found, wanted = shown(bash(script, HEAD="10.0.0.1")), settings_as_json(settings)
    assert {name for name, value in wanted.items() if found[name] != value} <= set(OF_TORCHRUN)
    options = (tmp_path / "options").read_text().split()
    assert f"--nproc-per-node={ranks}" in options
    if to == "torchrun":
        meeting = {f"--nnodes={machines}", "--rdzv-endpoint=10.0.0.1:29400"} if machines > 1 else {"--standalone"}
        assert meeting <= set(options) and "--max-restarts=10" in options


def test_the_script_for_several_machines_asks_where_they_meet(tmp_path):
    done = subprocess.run(["bash", "-c", export(loaded(NODES), "torchrun").text], capture_output=True, text=True)
    assert done.returncode and "HEAD: the address of one machine" in done.stderr


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("to", ["kubernetes", "kubeflow"])
def test_files_for_kubernetes_have_only_fields_that_its_models_have(to, gpus):
    # 0.7 CPU seconds, not of each worker that collects this.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    model: Any = {"kubernetes": JobsetV1alpha2JobSet, "kubeflow": TrainerV1alpha1TrainJob}[to]
    content = yaml.safe_load(export(loaded(ODD_NODES | {"use_cpu": not gpus}), to).text)
    assert model.from_dict(content).to_dict() == content
    assert ("nvidia.com/gpu" in str(content)) == gpus
    assert str(content).count("'terminationGracePeriodSeconds': 300") == 1


TASKS = {
    "skypilot": {"name", "num_nodes", "resources", "run"},
    "dstack": {"type", "name", "nodes", "shell", "resources", "retry", "stop_duration", "commands"},
}


@pytest.mark.parametrize("to", TASKS)
def test_tasks_have_the_fields_that_skypilot_and_dstack_read(to):
    """Their packages need a hundred others, so they are not installed: fields by SkyPilot 0.14.1 and dstack 0.22.5."""
    content = yaml.safe_load(export(loaded(ODD_NODES), to).text)
    assert content.keys() == TASKS[to] and (content.get("num_nodes") or content["nodes"]) == 3


@pytest.mark.parametrize("to", sorted(CLUSTERS.keys() - {"slurm", "torchrun"}))
def test_what_people_fill_in_are_comments_that_are_valid_when_they_are_none(to):
    text = export(loaded(ODD_NODES), to).text
    fields = re.compile(r"^( *)# ((?:- )?[\w/.]+:(?: .+)?|  .+)$", re.MULTILINE)
    assert len(fields.findall(text)) >= 4
    filled = yaml.safe_load(fields.sub(r"\1\2", text))
    assert filled.keys() >= yaml.safe_load(text).keys()
