"""The training loop, driven with a fake engine: what is called when, and what stops it."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from disk_calls import recorded_calls

from simpletuner.data.prefetch import Batch, StepBatch
from simpletuner.data.sampler.batch_sampler import SamplerState
from simpletuner.errors import Stopped, TrainingError
from simpletuner.models.family.objectives import NoisedLatents
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.runs.metrics import METRICS
from simpletuner.settings.declared.sections import Optimizer
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.metrics.metrics import Metrics
from simpletuner.training.metrics.speed import Durations
from simpletuner.training.optimizers import LearningRate, Schedule
from simpletuner.training.step_logger import StepLogger, StopVote
from simpletuner.training.trainer import Trainer, Verdict


class FakeEngine:
    """An engine without weights: it notes what it is asked for."""

    model = None

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    @contextmanager
    def micro_batch(self, is_last: bool):
        self.calls.append("last micro-batch" if is_last else "micro-batch")
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.calls.append(f"backward {loss.item():g}")

    def set_learning_rate(self, learning_rate: float) -> None:
        assert self.calls == [] or not self.calls[-1].startswith("backward"), "weights may step in the backward pass"
        self.learning_rate = learning_rate

    grad_norm = 0.5

    def step(self, max_grad_norm: float) -> torch.Tensor:
        self.calls.append(f"step {self.learning_rate:g}")
        return torch.tensor(self.grad_norm)


class FakeModel:
    """A family and objective in one: the loss is the square of the latents."""

    host_inputs = ()
    stream_weights = {}

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, u: torch.Tensor) -> NoisedLatents:
        return NoisedLatents(latents, u, noise, torch.ones(len(u)))

    def predict_streams(self, model, noised, timesteps, conditioning) -> dict[str, torch.Tensor]:
        return noised


class Noted:
    """A checkpointer and an evaluation in one."""

    title = "looking"

    def __init__(self, calls: list[str], interval: int) -> None:
        self.calls, self.interval, self.complete = calls, interval, True
        self.between = None
        """Called between the two pieces of work of an evaluation."""

    def save(self, step: int, sampler_state: SamplerState) -> None:
        assert sampler_state.batch == step, "the state after the step, from which a resumed run takes the next batch"
        self.calls.append(f"save {step}")

    def wait(self) -> None:
        self.calls.append("wait")

    def close(self) -> None:
        pass

    def count(self, step: int) -> int:
        return 2

    def run(self, step: int, advance) -> None:
        self.calls.append(f"validate {step}")
        if self.between is not None:
            advance(1)
            self.between(step)
            advance(1)
            self.calls.append("validated")

    def is_complete(self, step: int) -> bool:
        return self.complete


def batches_of(losses: list[float], micro_batches: int, first: int):
    for step, loss in enumerate(itertools.islice(itertools.cycle(losses), first, None), start=first + 1):
        latents = torch.full((2, 1, 1, 1), loss) ** 0.5
        batch = Batch(latents, torch.zeros_like(latents), torch.zeros(2), {}, (f"sample {step}",))
        yield StepBatch([batch] * micro_batches, SamplerState(0, step, 2, {}))


@pytest.fixture(scope="module")
def world():
    with joined_world() as world:
        yield world


@pytest.fixture
def build(world, tmp_path):
    """A function that builds a trainer; `calls` on it is what happened in order."""

    opened = []

    def build(losses=(1.0,), micro_batches: int = 1, step: int = 0, **changes: Any) -> Trainer:
        calls: list[str] = []
        stop, noted = changes.pop("stop", StopRequest()), Noted(calls, changes.pop("validate_every", 100))
        metrics, stop_vote = Metrics(tmp_path, step), StopVote(stop)
        opened.append(metrics)
        values = {
            "engine": FakeEngine(calls),
            "family": FakeModel(),
            "objective": FakeModel(),
            "batches": batches_of(list(losses), micro_batches, step),
            "learning_rate": LearningRate(Schedule(4), Optimizer(learning_rate=1.0, lr_scheduler="linear")),
            "ema": None,
            "logger": StepLogger(Mesh(world), stop_vote, metrics, None, 2),
            "stop_vote": stop_vote,
            "checkpointer": noted,
            "evaluations": [noted],
            "answer_request": lambda step, advance: calls.append(f"answer {step}"),
            "device": world.device,
            "activity": world.activity,
            "stop": stop,
            "report": Report(quiet=True),
            "step": step,
            "max_steps": 4,
            "checkpoint_every": 2,
            "max_grad_norm": 1.0,
            "dtype": torch.float32,
            "dropout_seed": 0,
            "profiler": None,
            "durations": Durations(),
        }
        trainer = Trainer(**{**values, **changes})
        trainer.calls = calls
        return trainer

    yield build
    for metrics in opened:
        metrics.close()


def rows_in(tmp_path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]


def test_metrics_are_on_the_disk_before_the_checkpoint_of_their_step(build, tmp_path):
    with recorded_calls() as calls:
        build().train()
    synced = [size for _, path, size in calls if path == str(tmp_path / METRICS)]
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    assert synced == [len(b"".join(lines[:step])) for step in (2, 4)]


def test_a_step_accumulates_its_micro_batches_and_only_the_last_one_reduces(build):
    trainer = build(losses=[4.0], micro_batches=2)
    batch, _ = trainer.next_batch()
    output = trainer.train_step(batch)
    assert trainer.calls == ["micro-batch", "backward 2", "last micro-batch", "backward 2", "step 1"]
    assert output.loss.item() == 4.0 and output.grad_norm.item() == 0.5


def test_checkpoints_are_due_by_step_and_at_the_end_and_validation_follows_them(build, tmp_path):
    trainer = build(max_steps=3, validate_every=2)
    trainer.train()
    assert [call for call in trainer.calls if call.startswith(("save", "validate", "step"))] == [
        *("validate 0", "step 1", "step 0.75", "save 2", "validate 2", "step 0.5", "save 3", "validate 3")
    ]
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2, 3]
    assert [row["learning_rate"] for row in rows_in(tmp_path)] == [1.0, 0.75, 0.5]


def test_an_evaluation_may_ask_for_a_checkpoint_or_end_the_run_as_after_its_last_step(build):
    verdict = Verdict()

    def judge(step: int) -> None:
        verdict.save_at, verdict.ends = (1 if step == 1 else -1), step >= 3

    def built(**changes):
        trainer = build(verdict=verdict, validate_every=1, checkpoint_every=10, **changes)
        trainer.evaluations[0].between = judge
        # one that is due after the last step alone, as images may be
        trainer.evaluations = [*trainer.evaluations, Noted(trainer.calls, 100)]
        return trainer

    trainer = built(max_steps=9)
    trainer.train()
    done = [call for call in trainer.calls if call.startswith(("save", "validate "))]
    both = ["validate 0", "validate 0"]
    assert done == [*both, "validate 1", "save 1", "validate 2", "validate 3", "save 3", "validate 3"]
    assert trainer.step == trainer.max_steps == 3
    again = built(max_steps=9, step=3)  # killed before its export: the verdict is found again by `is_complete`
    again.train()
    assert not [call for call in again.calls if call.startswith("step")] and again.step == 3


def test_a_run_on_a_cpu_that_will_take_hours_is_warned_of_by_its_first_step(build, capsys):
    for steps in (3, 1_000_000_000):
        with suppress(StopIteration):  # there are no more batches
            build(batches=itertools.islice(batches_of([1.0], 1, 0), 3), max_steps=steps, report=Report()).train()
        said = " ".join(capsys.readouterr().err.split())
        assert ("this run is on the CPU: its first step took" in said) == (steps > 3), said
    assert said.count("warning") == 1 and re.search(r"so the rest takes about \d+ days?, ", said)


def test_without_an_interval_validation_comes_before_the_first_step_and_after_the_last(build):
    trainer = build(max_steps=3, validate_every=0)
    trainer.train()
    assert [call for call in trainer.calls if call.startswith("validate")] == ["validate 0", "validate 3"]


def test_a_resumed_run_goes_on_with_the_next_step_and_makes_up_for_lost_images(build):
    trainer = build(step=2, validate_every=2)
    trainer.train()
    assert [call for call in trainer.calls if "micro" not in call and "back" not in call] == [
        *("step 0.5", "step 0.25", "save 4", "validate 4", "wait")
    ]
    trainer = build(step=2, validate_every=2)
    trainer.evaluations[0].complete = False
    trainer.train()
    assert trainer.calls[0] == "validate 2", "it was killed between its checkpoint and its images"


def test_a_run_that_is_asked_to_stop_saves_first(build, tmp_path):
    stop = StopRequest()
    trainer = build(stop=stop, checkpoint_every=100, max_steps=10)
    stop.signal_number = signal.SIGTERM
    with pytest.raises(Stopped, match="stopped by SIGTERM at step 2; its checkpoint is saved"):
        trainer.train()  # the wish is read one step late, as the loss is
    assert trainer.calls[-2:] == ["save 2", "wait"], "it ends when the checkpoint is written"
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2]


def test_an_image_that_is_asked_for_is_sampled_between_steps_unless_the_run_is_to_stop(build):
    trainer = build(checkpoint_every=100, max_steps=6, losses=(1.0,) * 6)
    votes = iter((False, True, False, False, False, False))
    trainer.stop_vote.is_asked = lambda: next(votes)
    trainer.train()
    assert [call for call in trainer.calls if call.startswith("answer")] == ["answer 3"]
    trainer = build(stop=(stop := StopRequest()), checkpoint_every=100, max_steps=6, losses=(1.0,) * 6)
    trainer.stop_vote.is_asked, stop.signal_number = lambda: True, signal.SIGTERM
    with pytest.raises(Stopped):
        trainer.train()
    assert not [call for call in trainer.calls if call.startswith("answer")]


def test_a_stop_that_is_asked_for_during_an_evaluation_does_not_wait_for_its_end(build):
    for stopped_at, saves in ((0, []), (1, ["save 1"]), (2, ["save 2"])):  # before training; before and after a save
        stop = StopRequest()
        trainer = build(stop=stop, validate_every=1)
        trainer.evaluations[0].between = lambda step, at=stopped_at, stop=stop: setattr(
            stop, "signal_number", signal.SIGINT if step == at else 0
        )
        with pytest.raises(Stopped, match=f"stopped by SIGINT at step {stopped_at}; "):
            trainer.train()
        assert [call for call in trainer.calls if call.startswith("save")] == saves
        begun, ended = trainer.calls.count("validated"), [c for c in trainer.calls if c.startswith("validate ")]
        assert (begun, len(ended)) == (stopped_at, stopped_at + 1)


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(build, tmp_path):
    trainer = build(losses=[1.0, float("nan")])
    with pytest.raises(TrainingError, match=r"step 2: loss is nan.*samples of rank 0: sample 2"):
        trainer.train()
    assert "save 2" not in trainer.calls
    assert [row["step"] for row in rows_in(tmp_path)] == [1]


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_gradient_norm_that_is_not_finite_ends_the_run_though_the_loss_is(build, norm):
    trainer = build()
    trainer.engine.grad_norm = norm
    with pytest.raises(TrainingError, match=rf"step 1: loss is 1.0, gradient norm {norm}"):
        trainer.train()
    assert "save 2" not in trainer.calls, "clipping by such a norm makes every weight NaN"


def test_what_saving_takes_is_no_time_of_the_next_step(build, tmp_path):
    trainer = build(max_steps=4)
    save = trainer.checkpointer.save
    trainer.checkpointer.save = lambda *arguments: (time.sleep(1), save(*arguments))
    trainer.train()
    rows = {row["step"]: row["seconds"] for row in rows_in(tmp_path)}
    assert rows[3] < 1, "step 2 was saved"
