from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.world import check_no_gpu_is_lost, device_of, gpu_of, open_store


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here to leave alone")
def test_use_cpu_leaves_gpus_alone():
    assert device_of(0).type == "cuda"
    assert device_of(0, use_cpu=True).type == "cpu"


def test_a_gpu_that_torch_cannot_use_is_named_instead_of_training_on_the_cpu(tmp_path):
    (tmp_path / "nvidiactl").touch()
    check_no_gpu_is_lost(tmp_path)
    (tmp_path / "nvidia3").touch()  # of a container that is given the fourth GPU
    with pytest.raises(EnvironmentNotReady, match=r"has a GPU .*nvidia3.*, but torch .* cannot use it") as caught:
        check_no_gpu_is_lost(tmp_path)
    assert "--use_cpu" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
def test_gpus_that_are_hidden_are_not_missed(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device_of(0, devices=tmp_path).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(EnvironmentNotReady, match="cannot use it"):
        device_of(0, devices=tmp_path)


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_of_a_slurm_task():
    assert gpu_of(1, 2, "all", {}) == torch.device("cuda", 1)
    assert gpu_of(3, 1, "0", {"SLURM_GPUS_PER_TASK": "1"}) == torch.device("cuda", 0)
    with pytest.raises(EnvironmentNotReady, match="rank 1 of this machine has no GPU: there are 1") as caught:
        gpu_of(1, 1, "0", {})
    assert "MIG" not in caught.value.hint
    with pytest.raises(EnvironmentNotReady) as caught:
        gpu_of(1, 1, "MIG-0d0b4ff6-a2ba", {})
    assert "one MIG slice to a process" in caught.value.hint


def test_ranks_meet_whose_agents_have_counted_different_numbers_of_restarts():
    """A machine that joins torchrun's run later begins to count at 0; there rank 0 serves a new store each time."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_store, place | {"TORCHELASTIC_RESTART_COUNT": "1"}, 0, 2)
        second = open_store(place | {"TORCHELASTIC_RESTART_COUNT": "0"}, 1, 2)
        first.result().set("key", "value")
        assert second.get("key") == b"value"
