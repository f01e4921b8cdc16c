from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.gpu import View, agree_on_devices, assign_cards, check_no_gpu_is_lost, view_of_rank


def views(*lists: str, local: str = "01234567", host: str = "node1") -> list[View]:
    """Return what ranks of one machine see, a letter for each card; `local` are their local ranks."""
    return [View(host, int(local[rank]), "all", tuple(cards)) for rank, cards in enumerate(lists)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here to leave alone")
def test_use_cpu_leaves_gpus_alone():
    assert view_of_rank(0).cards
    assert view_of_rank(0, use_cpu=True).cards == ()


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
        assert view_of_rank(0, devices=tmp_path).cards == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(EnvironmentNotReady, match="cannot use it"):
        view_of_rank(0, devices=tmp_path)


@pytest.mark.parametrize(
    ("seen", "used"),
    [
        (views("a"), "a"),
        (views("abcd", local="2"), "c"),  # alone, with a LOCAL_RANK of its own
        (views("abcd", "abcd", "abcd", "abcd"), "abcd"),  # torchrun, our launcher, srun --gpus-per-node=4
        (views("abcd", "abcd", "abcd", local="210"), "cba"),
        (views("abcd", "abcd", local="00"), "ab"),
        (views("abcd", "abcd", local="23"), "cd"),
        (views("ab", "ab", local="23"), "ab"),
        (views("a", "b", "c", "d"), "abcd"),  # --ntasks-per-gpu, --gpu-bind=map_gpu, --tres-per-task, wrappers
        (views("a", "b", "c", "d", local="0000"), "abcd"),
        (views("ab", "cd", "ef", "gh"), "aceg"),  # --gpus-per-task=2: the first of each
        (views("abcd", "bcda", "cdab", "dabc"), "abcd"),  # a wrapper that rotates
        (views("ab", "a"), "ba"),  # who has no choice chooses first
        ([*views("ab", "ab"), *views("cd", "cd", host="node2")], "abcd"),
        ([*views("a", "b"), *views("cd", "cd", host="node2")], "abcd"),
    ],
)
def test_ranks_take_cards_of_their_own_by_what_they_see(seen, used):
    assert "".join(view.cards[index] for view, index in zip(seen, assign_cards(seen), strict=True)) == used


def test_two_ranks_on_one_card_are_refused_by_name():
    """Also where wrappers or Slurm show the same card under the same number to tasks of one machine."""
    with pytest.raises(
        EnvironmentNotReady, match=r"rank 2 has no GPU of its own on node1: it sees 1 \(GPU-b\)"
    ) as caught:
        assign_cards(views("a", "b", "b"))
    assert (
        "rank 1" in caught.value.message and "--gpus-per-task=1" in caught.value.hint and "MIG" not in caught.value.hint
    )
    with pytest.raises(EnvironmentNotReady, match=r"rank 2 has no .* sees 2 \(GPU-a, GPU-b\), .* rank 0"):
        assign_cards(views("ab", "ab", "ab"))
    with pytest.raises(EnvironmentNotReady) as caught:
        assign_cards([View("node1", rank, "MIG-0d0b4ff6-a2ba", ("a",)) for rank in range(2)])
    assert "one MIG slice to a process" in caught.value.hint
    with pytest.raises(EnvironmentNotReady, match="rank 1 on node1 sees no GPU .*, and rank 0 on node1 sees 1"):
        assign_cards(views("a", ""))


@pytest.mark.parametrize(
    ("lists", "devices"), [(("a", "b", "c"), ["cuda:0"] * 3), (("abc",) * 3, None), (("",) * 3, ["cpu"] * 3)]
)
def test_ranks_agree_through_the_store_or_all_end_with_one_sentence(lists, devices):
    seen, size = views(*lists), 3
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(size) as pool:
        stores = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in seen]
        found = [pool.submit(agree_on_devices, stores[rank], rank, size, seen[rank]) for rank in range(size)]
        assert [str(each.result()) for each in found] == (devices or ["cuda:0", "cuda:1", "cuda:2"])
        again = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [dist.TCPStore("127.0.0.1", again.port, wait_for_workers=False) for _ in seen]
        same = views("a", "a", "b")
        refused = [pool.submit(agree_on_devices, stores[rank], rank, size, same[rank]) for rank in range(size)]
        assert len({str(each.exception()) for each in refused}) == 1
        assert all(isinstance(each.exception(), EnvironmentNotReady) for each in refused)
