"""What four ranks save, two copies of two shards: groups without a model, run by the fork server."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from checkpoint_states import state_of
from disk_calls import recorded_calls
from patience import PATIENCE
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from simpletuner.checkpoints.layout import load_checkpoint
from simpletuner.checkpoints.saving import BackgroundSaver, Snapshot, save
from simpletuner.checkpoints.tensors import plan_group, planned, read_tensors
from simpletuner.checkpoints.writing import write_full
from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel import world as world_module
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import World, joined_world, lost_a_peer

STATE = {name: value for name, value in state_of(1, moments=()).items() if name != "step"}


def whole_tensors() -> dict[str, Tensor]:
    """Return what is saved, by name; `a` is cut unevenly, of `b` one rank has no rows, the last three are not cut."""
    return {
        "a": torch.arange(15.0).view(5, 3),
        "b": torch.arange(4.0).view(1, 4) + 100,
        "c": torch.arange(8.0).view(4, 2).bfloat16(),
        "large": torch.arange(300_000.0),
        "whole": torch.arange(90_000.0) + 0.5,
        "scalar": torch.tensor(7.25),
        "count": torch.tensor([1, 2**40]),
    }


def tensors_of_rank() -> dict[str, Tensor]:
    """Return the same as DTensors, where they are cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    made = whole_tensors()
    for name in ("a", "b", "c", "large"):
        rows = made[name].chunk(2)
        own = rows[mesh.get_local_rank("shards")] if mesh.get_local_rank("shards") < len(rows) else made[name][:0]
        shape, stride = made[name].shape, made[name].stride()
        made[name] = DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False, shape=shape, stride=stride)
    return made


def snapshot_of(tensors: dict[str, Tensor], step: int, is_views: bool = False) -> Snapshot:
    return Snapshot(step, {"model": planned(lambda: tensors)}, STATE, {"kind": "none"}, is_views)


def read_back(folder: Path, tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that a checkpoint holds with other values than this rank."""
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensors(load_checkpoint(folder).files("model"), found, "it")
    return [name for name in found if not torch.equal(local_tensor(found[name]), local_tensor(tensors[name]))]


def save_all_ways(root: str, report: str) -> None:
    """Save at once and in the background, in both forms, and write what went wrong, by rank."""
    answers: dict[str, object] = {}
    with joined_world() as world:
        tensors, path = tensors_of_rank(), Path(root)
        for form, full in (("sharded", False), ("full", True)):
            with recorded_calls() as answers[f"{form}, calls"]:
                folder = save(path / form, snapshot_of(tensors, 1), world, full, keep=5)
            answers[form] = read_back(folder, tensors)
            answers[f"{form} in the background"] = saved_in_background(path / form, tensors, world, full)
        answers["no room"] = failed_in_background(path, tensors, world)
        answers["one rank cannot write"] = one_cannot_write(path / "blocked", tensors, world)
        answers["files"] = sorted(each.name for each in (path / "full" / "checkpoint-000001" / "model").iterdir())
        Path(f"{report}.{world.rank}").write_text(json.dumps(answers))


def saved_in_background(root: Path, tensors: dict[str, Tensor], world: World, full: bool) -> list[str]:
    """Save twice; change the tensors, and communicate, while they are written. Return names that differ then."""
    saver, wrong = BackgroundSaver(world), []
    kept = {name: local_tensor(tensor).clone() for name, tensor in tensors.items()}
    for step, is_views in ((2, False), (3, True)):
        goes_on, folder = threading.Event(), root / f"checkpoint-{step:06d}"
        write = partial(held, goes_on, partial(save, root, full=full, keep=5))
        saver.start(snapshot_of(tensors, step, is_views), write)
        saver.finish_copying()
        for tensor in tensors.values():
            local_tensor(tensor).add_(1)
        assert world.all_mean(torch.ones(1)).item() == 1
        assert not saver.has_failed and not folder.exists(), "it waits for the event"
        goes_on.set()
        saver.wait()
        for name, tensor in tensors.items():
            local_tensor(tensor).copy_(kept[name])
        wrong += read_back(folder, tensors)
    buffers = [buffer.block.data_ptr() for buffer in saver.copies.buffers.values()]
    saver.start(snapshot_of(tensors, 4), partial(save, root, full=full, keep=5))
    assert buffers == [buffer.block.data_ptr() for buffer in saver.copies.buffers.values()], "they are used again"
    saver.close()
    load_checkpoint(root / "checkpoint-000004")
    return wrong


def held(goes_on: threading.Event, write: Callable[..., Path], snapshot: Snapshot, world: World) -> Path:
    assert goes_on.wait(PATIENCE)
    return write(snapshot, world)


def failed_in_background(root: Path, tensors: dict[str, Tensor], world: World) -> str:
    """Save below a file, and return what `wait` says."""
    (root / "file").touch()
    saver = BackgroundSaver(world)
    saver.start(snapshot_of(tensors, 1), partial(save, root / "file", full=False, keep=5))
    while not saver.has_failed:
        time.sleep(0.01)
    try:
        saver.wait()
    except EnvironmentNotReady as error:
        return error.message
    finally:
        saver.close()
    return ""


def one_cannot_write(folder: Path, tensors: dict[str, Tensor], world: World) -> str:
    """Write whole tensors, where the file of rank 1 has the name of a folder; return what each rank says."""
    (folder / "w-00002-of-00004.safetensors").mkdir(parents=True, exist_ok=True)
    world.barrier()
    try:
        write_full(folder, plan_group(tensors), world, "w")
    except OSError as error:
        return type(error).__name__
    return ""


def lose_a_rank(root: str, report: str) -> None:
    """Lose rank 3 while all save in the background; the others report whether they know why."""
    with joined_world() as world:
        saver, goes_on = BackgroundSaver(world), threading.Event()
        snapshot = snapshot_of(tensors_of_rank(), 1)
        saver.start(snapshot, partial(held, goes_on, partial(save, Path(root), full=True, keep=5)))
        if world.rank == 3:
            os._exit(0)
        goes_on.set()
        try:
            saver.wait()
        except (RuntimeError, dist.DistError) as error:
            Path(f"{report}.{world.rank}").write_text(json.dumps(lost_a_peer(error)))
        saver.close()
        os._exit(0)  # without the others no process group can be taken down


def threads_after_reading(folder: str, report: str) -> None:
    """Read many tensors in a world of one, with two OpenMP threads; write how many threads that has left."""
    torch.set_num_threads(2)
    with joined_world() as world:
        torch.ones(1 << 20).add_(1)  # starts this thread's own team
        before = psutil.Process().num_threads()
        found = {f"blocks.{number:04d}.some.layer.weight": torch.zeros(2, 2) for number in range(2000)}
        save_file(found, Path(folder) / "many.safetensors")
        read_tensors([Path(folder) / "many.safetensors"], found, "it")
        world.gather_texts("a checksum" * 10_000)
        Path(report).write_text(json.dumps([before, psutil.Process().num_threads()]))


def wait_for_a_slow_disk(seconds: float, report: str) -> None:
    """Gather texts while rank 0 writes for longer than collectives of a GPU may take."""
    world_module.COLLECTIVE_TIMEOUT = timedelta(seconds=seconds / 3)
    with joined_world() as world:
        if world.is_first:
            time.sleep(seconds)
        texts = world.gather_texts(str(world.rank))
        world.barrier()
        if world.is_first:
            Path(report).write_text(",".join(texts))
