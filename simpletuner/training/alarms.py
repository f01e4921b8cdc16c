"""The alarms of a run, on rank 0: what they look at, and where they are told. Opened after the first step."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import psutil
import torch
from torch import Tensor, nn

from simpletuner.parallel.gpu import slowed_by
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.preparation.plan import Plan
from simpletuner.private_api.of_torch import before_other_hooks
from simpletuner.runs.health.alarms import (
    Alarm,
    GradientNorms,
    Row,
    StepTimes,
    find_not_drawn,
    find_without_gradient,
)
from simpletuner.session import Session
from simpletuner.system.processes.threads import in_daemon
from simpletuner.training.hooks import RunHook
from simpletuner.training.step_logger import Timestamp

# Bytes read back from swap, in a run, that are more than what slept since its start.
MUCH_SWAPPED = 100 << 20


class RunAlarms:
    """Look at each row, and tell each fault once: on the terminal, in log and status, and to the hooks."""

    def __init__(
        self,
        session: Session,
        hooks: Sequence[RunHook],
        module: nn.Module,
        plan: Plan,
        max_steps: int,
        zero_gradients: tuple[str, ...] = (),
    ) -> None:
        """`module` is the denoiser, of which some weights are trained; gradients of those that begin with
        `zero_gradients` may be zero."""
        self.session, self.hooks, self.told = session, hooks, set[str]()
        self.checks = [StepTimes(), GradientNorms()]
        watched = ((name, each) for name, each in module.named_parameters() if not name.startswith(zero_gradients))
        self.gradients: GradientWatch | None = GradientWatch(watched, session.world.device)
        self.swapped = psutil.swap_memory().sin
        images = sum(bucket.num_samples for bucket in plan.buckets.values())
        if alarm := find_not_drawn(images, session.settings.effective_batch_size, max_steps):
            self.tell(alarm)

    def add(self, row: Row, shape: Hashable) -> None:
        """Look at the row of a step; nothing waits for the device."""
        for check in self.checks:
            if check.name not in self.told and (alarm := check.add(row, shape)) is not None:
                self.told.add(check.name)
                if check.name == StepTimes.name:
                    in_daemon(partial(self.tell_with_causes, alarm), "alarm")  # the driver may take 2 s to answer
                else:
                    self.tell(alarm)
        if self.gradients is not None and (silent := self.gradients.next_step()) is not None:
            if alarm := find_without_gradient(silent, len(self.gradients.names), WATCHED_STEPS):
                self.tell(alarm)
            self.gradients = None

    def tell(self, alarm: Alarm) -> None:
        self.session.report.warn(alarm.sentence, alarm.hint)
        self.session.status.alarm(alarm.sentence)
        for hook in self.hooks:
            hook.alarmed(alarm.sentence)

    def tell_with_causes(self, alarm: Alarm) -> None:
        causes = [*self.machine_causes(), *slowed_by(self.session.world.device, os.getpid())]
        on_gpu = "no other process on the GPU, " if self.session.world.device.type != "cpu" else ""
        load = f"a load of {os.getloadavg()[0]:.1f} on {os.cpu_count() or 1} CPUs"
        why = "; ".join(causes) or f"no swapping, {on_gpu}{load}"
        self.tell(Alarm(alarm.name, f"{alarm.sentence}; {why}", alarm.hint))

    def machine_causes(self) -> list[str]:
        found, load, cpus = [], os.getloadavg()[0], os.cpu_count() or 1
        if (swapped := psutil.swap_memory().sin - self.swapped) > MUCH_SWAPPED:
            found.append(f"the machine has read {swapped / 1e9:.1f} GB back from swap since the first step")
        if load > 1.5 * cpus:
            found.append(f"the machine has a load of {load:.0f} on {cpus} CPUs")
        return found


WATCHED_STEPS = 5
"""In the first step matrices of a LoRA have none, and with a warm-up in the second, too."""


class GradientWatch:
    """Find trained weights without gradients, by hooks that go away after WATCHED_STEPS.

    On rank 0 alone, whose shard of each weight is not empty; under ZeRO and DDP a gradient is that of its own samples.
    Norms are computed on the device behind the backward pass, and read a step after their copy to the host was queued.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> None:
        trained = {name: each for name, each in named if each.requires_grad}
        self.names, self.steps, self.device = [*trained], 0, device
        self.norms: dict[str, Tensor] = {}
        """Of this step, by name: the largest of its micro-batches, as ZeRO removes each one's gradients."""
        self.largest: Tensor | None = None
        """Largest norm of each weight, (weights,) float32; on the host once `copied` has passed."""
        self.copied: Timestamp | None = None
        self.handles = [before_other_hooks(each, partial(self._measure, name)) for name, each in trained.items()]

    @torch.no_grad()
    def _measure(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad)
        norm = torch.linalg.vector_norm(gradient, ord=torch.inf, dtype=torch.float32).to(self.device, non_blocking=True)
        self.norms[name] = torch.maximum(norm, self.norms[name]) if name in self.norms else norm

    def next_step(self) -> list[str] | None:
        """Take a step whose backward pass is queued; return the weights without gradients once known."""
        if not self.names:
            return []
        if self.copied is not None:
            self.copied.wait()
            assert self.largest is not None
            return [name for name, norm in zip(self.names, self.largest.tolist(), strict=True) if norm == 0]
        zero = torch.zeros((), device=self.device)
        norms = torch.stack([self.norms.get(name, zero) for name in self.names])
        self.largest = norms if self.largest is None else torch.maximum(self.largest, norms)
        self.norms.clear()
        self.steps += 1
        if self.steps > WATCHED_STEPS:  # the first may have begun before the hooks
            for handle in self.handles:
                handle.remove()
            if self.device.type == "cuda":
                self.largest = torch.empty(norms.shape, pin_memory=True).copy_(self.largest, non_blocking=True)
            self.copied = Timestamp(self.device)
        return None
