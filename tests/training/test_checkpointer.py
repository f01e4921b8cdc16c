"""Whether training goes on while a checkpoint is written."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE
from safetensors.torch import load_file
from torch.distributed import HashStore

from simpletuner.checkpoints.layout import list_checkpoints
from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.tensors import planned
from simpletuner.data.sampler.batch_sampler import SamplerState
from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import TorchEngine
from simpletuner.parallel.world import World, joined_world
from simpletuner.settings.declared.sections import Checkpoints, Ema, Launch, Optimizer, Settings, Training
from simpletuner.training import checkpointer
from simpletuner.training.checkpointer import Checkpointer, TrainingState
from simpletuner.training.ema import EMA
from simpletuner.training.metrics.speed import EXPORTING, SAVING, UPLOADING, WRITING, Durations
from simpletuner.training.optimizers import Schedule, make_optimizer


def engine() -> SimpleNamespace:
    return SimpleNamespace(before_update=[])


@pytest.mark.parametrize(
    ("asked", "available", "is_async"), [(None, 1600, True), (None, 1599, False), (True, 0, True), (False, 1600, False)]
)
def test_training_goes_on_where_copies_take_half_of_the_memory_at_most(
    asked, available, is_async, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpointer, "available_bytes", lambda: available)
    settings = Settings(training=Training(output_dir=tmp_path), checkpoints=Checkpoints(async_checkpointing=asked))
    state = SimpleNamespace(
        engine=engine(),
        snapshot=lambda step, sampler_state, facts: Snapshot(
            step, {name: planned(lambda: {"w": torch.ones(100)}) for name in ("model", "exp_avg")}, {}, {}
        ),
    )
    said: list[str] = []
    with joined_world({}, use_cpu=True) as world:
        session = SimpleNamespace(settings=settings, world=world, report=SimpleNamespace(say=said.append))
        durations = Durations()
        saver = Checkpointer(session, state, durations, 800)
        saver.save(1, None)
        assert saver.is_async == is_async
        saver.close()
        written = durations.mean(WRITING)
        assert (written > 0) == is_async and durations.mean(EXPORTING) > 0
        assert not is_async or durations.mean(EXPORTING) == written / 2, "one of two groups is exported"
    assert [folder.name for folder in list_checkpoints(tmp_path / "checkpoints")] == ["checkpoint-000001"]
    assert bool(said) == (asked is None and not is_async)


def test_a_save_waits_for_the_one_before_it_and_raises_what_went_wrong_there(tmp_path):
    order: list[str] = []
    goes_on = threading.Event()

    def weights() -> dict[str, torch.Tensor]:
        order.append("copied")
        return {"w": torch.ones(100)}

    settings = Settings(training=Training(output_dir=tmp_path), checkpoints=Checkpoints(async_checkpointing=True))
    with joined_world({}, use_cpu=True) as world:
        session = SimpleNamespace(settings=settings, world=world, report=SimpleNamespace(say=order.append))
        state = SimpleNamespace(
            engine=engine(),
            snapshot=lambda step, sampler_state, facts: Snapshot(step, {"model": planned(weights)}, {}, {}),
        )
        saver = Checkpointer(session, state, Durations(), 400)
        write, saver._write = saver._write, lambda *arguments: goes_on.wait(PATIENCE) and write(*arguments)
        saver.save(1, None)
        threading.Timer(0.2, lambda: (order.append("written"), goes_on.set())).start()
        saver.save(2, None)
        assert order == ["copied", "written", "copied"], "two copies at once would not fit"
        saver.wait()
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").touch()
        saver.save(3, None)
        end = time.monotonic() + PATIENCE
        while not saver.has_failed:  # which ends the run at its next step
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(EnvironmentNotReady, match="cannot save to"):
            saver.save(4, None)
        saver.close()


@pytest.mark.parametrize(
    ("grace", "mirror", "said"),
    [
        (30, "", []),
        (
            30,
            "s3://b/x",
            ["to stop takes about 45 s (saving 1 s, writing a checkpoint 19 s, uploading a checkpoint 25 s)"],
        ),
        (15, "", ["to stop takes about 20 s (saving 1 s, writing a checkpoint 19 s)"]),
        (0, "s3://b/x", []),
    ],
)
def test_a_save_that_takes_longer_than_a_machine_lives_on_is_told_once(grace, mirror, said, tmp_path):
    settings = Settings(
        training=Training(output_dir=tmp_path),
        checkpoints=Checkpoints(mirror_output=mirror),
        launch=Launch(preemption_grace_seconds=grace),
    )
    durations = Durations()
    for name, seconds in ((SAVING, 1.0), (WRITING, 19.0), (UPLOADING, 25.0)):
        durations.estimate(name, seconds)  # as durations.json of an earlier start does
    warned: list[str] = []
    report = SimpleNamespace(say=lambda text: None, warn=lambda text, hint: warned.append(text))
    snapshot = Snapshot(1, {"model": planned(lambda: {"w": torch.ones(9)})}, {}, {})
    state = SimpleNamespace(engine=engine(), snapshot=lambda *_: snapshot)
    with joined_world({}, use_cpu=True) as world:
        saver = Checkpointer(SimpleNamespace(settings=settings, world=world, report=report), state, durations, 36)
        assert [text.partition(", but")[0] for text in warned] == said
        assert world.activity.save_seconds == (45 if mirror else 20)
        saver.save(1, None)
        saver.close()
        assert len(warned) == len(said)


@pytest.mark.parametrize("released", [False, True])
def test_what_is_saved_while_the_next_step_begins_is_of_the_step_before_it(released, tmp_path):
    """Copies of 96 MB take longer than all that a training thread does here between a save and its update."""
    torch.manual_seed(0)
    module, mesh = torch.nn.Linear(4096, 1536), Mesh(World(0, 1, 0, torch.device("cpu"), HashStore()))
    make = partial(make_optimizer, settings=Optimizer())
    trained = TorchEngine(module, module, mesh, make, lambda is_last: nullcontext(), nullcontext)
    trained.step_as(Optimizer(optimizer_release_gradients=released))
    settings = Settings(training=Training(output_dir=tmp_path), checkpoints=Checkpoints(async_checkpointing=True))

    def step() -> None:
        trained.backward(module(torch.ones(1, 4096)).sum())
        trained.step(1.0)

    with joined_world({}, use_cpu=True) as world:
        session = SimpleNamespace(settings=settings, world=world, report=SimpleNamespace(say=print))
        average = EMA(trained, Ema(use_ema=True))
        state = TrainingState(trained, average, {}, {}, "d", Schedule(4), 0, SamplerState(0, 0, 1, {}))
        saver = Checkpointer(session, state, Durations(), 4 * 4 * 1536 * 4097)
        for number in range(1, 4):
            step()
            average.update(number)
            groups = state.groups(trained.optimizer_state())
            kept = {
                (group, name): each.detach().clone() for group, make in groups.items() for name, each in make().items()
            }
            saver.save(number, state.sampler_state)
            if number == 2:
                with average.swapped_in():  # as validation does after a save
                    pass
            else:
                step()
            saver.wait()
            for group in groups:
                files = (tmp_path / "checkpoints" / f"checkpoint-{number:06d}" / group).glob("*.safetensors")
                found = {(group, name): each for file in files for name, each in load_file(file).items()}
                assert found and all(torch.equal(each, kept[name]) for name, each in found.items()), (number, group)
        saver.close()
