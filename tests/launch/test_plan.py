from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from simpletuner.errors import SettingsError
from simpletuner.launch.node_info import MAY_DIFFER, NodeInfo, check_addresses, difference
from simpletuner.launch.plan import SOCKET_VARIABLE, choose_gpus, chosen_variables, round_no_pinned_memory
from simpletuner.settings.declared.sections import Launch, setting_fields
from simpletuner.system.network import addresses, interface_towards

ENOUGH = ("--model_family=sdxl", "--instance_data_dir=my pictures")
TWO_MACHINES = ("--num_processes=4", "--num_machines=2", "--main_process_ip=127.0.0.1")

TWO_MACHINES_PLANNED = """\
# machine 0
simpletuner train --model_family=sdxl '--instance_data_dir=my pictures' --num_processes=4 --num_machines=2 \
--main_process_ip=127.0.0.1 --machine_rank=0
#   MASTER_ADDR=127.0.0.1
#   MASTER_PORT=29500
#   WORLD_SIZE=4
#   LOCAL_WORLD_SIZE=2
#   GROUP_RANK=0
#   GROUP_WORLD_SIZE=2
#   TORCHELASTIC_USE_AGENT_STORE=True
#   OMP_NUM_THREADS=3
#   GLOO_SOCKET_IFNAME='(the interface that reaches 127.0.0.1)'
#   NCCL_SOCKET_IFNAME=mine
#   RANK=0 LOCAL_RANK=0
#   RANK=1 LOCAL_RANK=1
#   PYTHON -P -u -m simpletuner train --model_family=sdxl '--instance_data_dir=my pictures' --num_processes=4 \
--num_machines=2 --main_process_ip=127.0.0.1 --machine_rank=0

# machine 1
simpletuner train --model_family=sdxl '--instance_data_dir=my pictures' --num_processes=4 --num_machines=2 \
--main_process_ip=127.0.0.1 --machine_rank=1
#   MASTER_ADDR=127.0.0.1
#   MASTER_PORT=29500
#   WORLD_SIZE=4
#   LOCAL_WORLD_SIZE=2
#   GROUP_RANK=1
#   GROUP_WORLD_SIZE=2
#   TORCHELASTIC_USE_AGENT_STORE=True
#   OMP_NUM_THREADS=3
#   GLOO_SOCKET_IFNAME=lo
#   NCCL_SOCKET_IFNAME=mine
#   RANK=2 LOCAL_RANK=0
#   RANK=3 LOCAL_RANK=1
#   PYTHON -P -u -m simpletuner train --model_family=sdxl '--instance_data_dir=my pictures' --num_processes=4 \
--num_machines=2 --main_process_ip=127.0.0.1 --machine_rank=1
"""

IMPORTED = """
import sys
from simpletuner.app import main
try:
    main(sys.argv[1:])
finally:
    heavy = ("torch", "numpy", "accelerate", "diffusers", "transformers", "deepspeed", "PIL")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


def planned(folder: Path, *flags: str) -> str:
    """Return what a dry run prints, after seeing that it imported and wrote nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "mine"}
    pictures = folder / "my pictures"
    pictures.mkdir(exist_ok=True)
    (pictures / "a.png").touch()
    command = [sys.executable, "-c", IMPORTED, "train", *ENOUGH, *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert list(folder.rglob("*")) == [pictures, pictures / "a.png"]
    return done.stdout.replace(sys.executable, "PYTHON")


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found by what Linux offers")
def test_a_dry_run_shows_what_to_type_on_each_machine_and_what_that_starts(tmp_path):
    assert planned(tmp_path, *TWO_MACHINES, "--machine_rank=1", "--dry-run") == TWO_MACHINES_PLANNED


def test_a_dry_run_as_json_is_for_scripts(tmp_path):
    (plan,) = json.loads(planned(tmp_path, "--num_processes=2", "--gpu_ids=3, 1", "--dry_run", "--json"))
    assert plan["type"] == ["simpletuner", "train", *ENOUGH, "--num_processes=2", "--gpu_ids=3, 1"]
    assert plan["command"] == ["PYTHON", "-P", "-u", "-m", "simpletuner", *plan["type"][1:]]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in plan["ranks"]] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in plan["ranks"]} == {"3,1"}
    assert {rank["MASTER_PORT"] for rank in plan["ranks"]} == {"a free port"}
    interfaces = {(rank["GLOO_SOCKET_IFNAME"], rank["NCCL_SOCKET_IFNAME"]) for rank in plan["ranks"]}
    assert interfaces == {("lo", "mine")}, "a single machine stays on the loopback device, unless the user says more"


def test_one_rank_runs_where_it_is_typed(tmp_path):
    assert planned(tmp_path, "--dry_run", "--gpu_ids=2").splitlines()[1:] == [
        "simpletuner train --model_family=sdxl '--instance_data_dir=my pictures' --gpu_ids=2",
        "#   trains in this process, with CUDA_VISIBLE_DEVICES=2",
    ]


def test_gpu_ids_hide_the_other_gpus():
    environment: dict[str, str] = {}
    for launch in (Launch(), Launch(gpu_ids="ALL"), Launch(gpu_ids="0,1", use_cpu=True)):
        choose_gpus(launch, environment)
    assert environment == {}
    choose_gpus(Launch(gpu_ids="0, 2,3", num_processes=6, num_machines=2), environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2,3"}


def test_gpu_ids_count_among_the_gpus_that_a_job_was_given():
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,7"}
    choose_gpus(Launch(gpu_ids="2,0", num_processes=2), environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "7,4"}
    own = {"CUDA_VISIBLE_DEVICES": "7,4", "_SIMPLETUNER_LAUNCHER_SOCKET": "/tmp/socket"}
    choose_gpus(Launch(gpu_ids="2,0", num_processes=2), own)
    assert own["CUDA_VISIBLE_DEVICES"] == "7,4", "our launcher has chosen already"
    for number in ("2", "4"):
        sentence = f"gpu_ids names GPU {number}, but CUDA_VISIBLE_DEVICES = 4,5 leaves 2"
        with pytest.raises(SettingsError, match=sentence) as caught:
            choose_gpus(Launch(gpu_ids=number), {"CUDA_VISIBLE_DEVICES": "4,5"})
        assert "counted from 0" in caught.value.hint


@pytest.mark.parametrize(
    ("launch", "sentence", "hint"),
    [
        (
            Launch(gpu_ids="0,1", num_processes=8, num_machines=2),
            "names 2 GPUs, but every machine runs 4 ranks",
            "to 4",
        ),
        (Launch(gpu_ids="0,1,1"), "names a GPU twice", "once"),
        (Launch(gpu_ids=","), "names 0 GPUs, but every machine runs 1 ranks", "name 1 GPUs"),
    ],
)
def test_gpu_ids_that_do_not_suffice_are_refused(launch, sentence, hint):
    with pytest.raises(SettingsError, match=sentence) as caught:
        choose_gpus(launch, {})
    assert hint in caught.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found by what Linux offers")
def test_every_address_of_this_machine_belongs_to_its_interface():
    found = list(addresses())
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= {name for _, name in socket.if_nameindex()}
    for name, address in found:
        if not address.startswith("fe80"):  # a link-local address means nothing without its interface
            assert interface_towards(address, 29500) == name
    assert interface_towards("no-such-host.invalid", 29500) == ""


def test_what_may_differ_are_settings():
    assert set(MAY_DIFFER) <= set(setting_fields())


def test_settings_and_versions_that_differ_are_told_at_once():
    first = NodeInfo("a", 1, {"seed": 1, "new": True}, {"torch": "2.9"})
    assert difference(first, "machine 0", first, "machine 1") is None
    error = difference(first, "machine 0", NodeInfo("b", 2, {"seed": 2}, {"torch": "2.8"}), "machine 1")
    assert isinstance(error, SettingsError)
    assert error.message.splitlines() == [
        "seed differs: 1 on machine 0 (a), 2 on machine 1 (b)",
        "  new differs: True on machine 0 (a), None on machine 1 (b)",
        "  torch differs: '2.9' on machine 0 (a), '2.8' on machine 1 (b)",
    ]


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_rank_whose_launcher_is_gone_exits_before_it_imports_torch(is_alive, tmp_path):
    launcher, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    if not is_alive:
        launcher.close()
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", SOCKET_VARIABLE: str(rank.fileno())}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where a rank that goes on finds no store
    command = [sys.executable, "-c", IMPORTED, "train", *ENOUGH, "--num_processes=2", "--use_cpu"]
    with launcher, rank:
        done = subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment, pass_fds=[rank.fileno()]
        )
        if is_alive:
            assert launcher.recv(1 << 16) == b"{}", "what it finds out by"
            done.kill()
        said = done.communicate(timeout=PATIENCE)[1]
    assert is_alive or (done.returncode, said) == (143, "[]\n")


LOSES_ITS_STORE = """
import os, sys
from simpletuner.launch.plan import prepare_rank
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.sections import Launch

if sys.argv[1] == "rank":
    os.environ.update(RANK="1", WORLD_SIZE="2")
    prepare_rank(Loaded(Settings(launch=Launch(num_processes=2)), {}), os.environ)
import torch.distributed as dist

told, said = os.pipe()
if not (serving := os.fork()):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(said, str(store.port).encode())
    store.wait(["seen"])
    os._exit(0)
store = dist.TCPStore("127.0.0.1", int(os.read(told, 9)), is_master=False)
store.set("seen", "")
os.waitpid(serving, 0)
try:
    store.add("failures", 1)
except dist.DistError:
    print("lost")
"""


def test_a_rank_that_another_launcher_started_prints_no_stack_trace_where_the_store_is_gone():
    command = [sys.executable, "-W", "ignore", "-c", LOSES_ITS_STORE]
    alone, rank = (
        subprocess.run([*command, each], capture_output=True, text=True, timeout=PATIENCE) for each in ("", "rank")
    )
    assert alone.stdout == rank.stdout == "lost\n"
    assert "frame #" in alone.stderr and rank.stderr == "", "torch prints one unless it is told not to"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pinned_memory_is_not_rounded_up_unless_the_user_says_so(name):
    environment = {name: "expandable_segments:True"}
    round_no_pinned_memory(environment, "2.13.0+cu130")
    assert environment == {name: "expandable_segments:True,pinned_max_round_threshold_mb:1"}
    own = {name: "pinned_max_round_threshold_mb:64"}
    round_no_pinned_memory(own, "2.15.0")
    assert own == {name: "pinned_max_round_threshold_mb:64"}
    empty: dict[str, str] = {}
    for version in ("2.9.1", "2.12.0+cu130"):  # which refuse what they do not know
        round_no_pinned_memory(empty, version)
        assert empty == {}
    round_no_pinned_memory(empty, "2.13.0a0+git1234567")
    assert empty == {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = os.cpu_count() or 1
    for machines in (1, 2):
        launch = Launch(num_processes=cores * machines, num_machines=machines)
        assert chosen_variables(0, launch)["OMP_NUM_THREADS"] == "1"
    assert chosen_variables(0, Launch(num_processes=1))["OMP_NUM_THREADS"] == str(cores)


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (["127.0.1.1", "10.0.0.2"], True),
        (["127.0.0.1", "127.0.0.1"], False),  # two launchers on one machine
        (["10.0.0.1", "10.0.0.2"], False),
        (["", ""], False),
    ],
)
def test_a_first_machine_that_others_cannot_reach_is_refused(found, refused):
    infos = [NodeInfo(f"n{number}", number, {}, {}, address) for number, address in enumerate(found)]
    if not refused:
        check_addresses(infos)
        return
    with pytest.raises(
        SettingsError, match=r"leads machine 0 to its loopback address 127\.0\.1\.1, which others cannot"
    ):
        check_addresses(infos)
