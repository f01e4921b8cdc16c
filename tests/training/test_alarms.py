"""Weights without gradients are found in any layout of a step, and what a run is warned of is told everywhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from simpletuner.report import Report
from simpletuner.runs.health.alarms import Alarm
from simpletuner.system.processes.run_status import STATUS, StatusWriter, read_status
from simpletuner.training.alarms import WATCHED_STEPS, GradientWatch, RunAlarms


class Branches(nn.Module):
    """A pair as in a LoRA, of which one is zero at first; a weight that is cut off, and one that is multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4, 4)))
        self.unused, self.silent = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.down @ self.up + 0 * self.silent + self.frozen


@torch.no_grad()
def step_and_free(weight: torch.Tensor) -> None:
    weight.sub_(weight.grad, alpha=0.1)
    weight.grad = None


@pytest.mark.parametrize("release", [False, True], ids=["step", "released in the backward pass"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_weights_that_never_have_a_gradient_are_found_once_and_the_hooks_go(release, accumulation):
    model = Branches()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
    if release:  # as engines do, before the watch is opened
        for each in (model.down, model.up, model.silent):
            each.register_post_accumulate_grad_hook(step_and_free)
    watch, found = GradientWatch(model.named_parameters(), torch.device("cpu")), []
    for _ in range(WATCHED_STEPS + 3):
        for _ in range(accumulation):
            model(torch.randn(2, 4)).square().mean().backward()
        if watch.copied is None or not found:
            found += [silent] if (silent := watch.next_step()) is not None else []
        optimizer.step()
        optimizer.zero_grad()
    assert found == [["unused", "silent"]]
    assert all(len(each._post_accumulate_grad_hooks or {}) <= release for each in model.parameters())


def test_an_alarm_is_told_on_the_terminal_in_the_status_and_to_the_hooks_once(tmp_path, capsys):
    told, status = [], StatusWriter()
    status.begin(tmp_path, "")
    session = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu")),
        report=Report(),
        status=status,
        settings=SimpleNamespace(effective_batch_size=2),
    )
    plan = SimpleNamespace(buckets={"64x64": SimpleNamespace(num_samples=400)})
    hooks = [SimpleNamespace(alarmed=told.append)]
    alarms = RunAlarms(session, hooks, Branches(), plan, max_steps=100)
    of_none = RunAlarms(session, (), Branches(), plan, max_steps=200, zero_gradients=("down", "up", "unused", "silent"))
    assert of_none.gradients.next_step() == []
    undrawn = "at least 200 images of 400 will never be drawn: this run takes 200 samples"
    assert told == [undrawn]
    for step in range(1, 60):
        alarms.add({"step": step, "seconds": 1.0, "data_seconds": 0.0, "grad_norm": 0.0}, (1,))
    names = "4 of 4 trained weights had no gradient in 5 steps: down, up, unused and 1 more"
    vanish = "gradients vanish: the norm before clipping is 0 (median of the last 20 steps)"
    assert told == [undrawn, names, vanish]
    alarms.tell_with_causes(Alarm("step time", "steps take 2 times as long", "look"))
    assert told[3].startswith("steps take 2 times as long; ")
    assert read_status(tmp_path / STATUS).alarms == tuple(told)
    said = " ".join(capsys.readouterr().err.split())
    assert all(said.count(f"warning: {each}") == 1 for each in told)
