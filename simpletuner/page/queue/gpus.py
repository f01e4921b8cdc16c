"""GPUs of this machine, without torch, and those that a run takes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pydantic import ValidationError

from simpletuner.errors import SettingsError
from simpletuner.launch.plan import GPUS, ranks_per_machine, visible_gpus
from simpletuner.page.runs.folder import RunFolder
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.numbers import count_noun
from simpletuner.training.run_folder.settings_record import SETTINGS, read_settings

DEVICES = Path("/dev")
CPU = "the CPU"
"""The device of runs without GPUs: each takes all cores, so there is one at a time."""


@dataclass(frozen=True)
class Need:
    """Devices that a run takes of this machine: those it is bound to, else any `count` GPUs."""

    count: int = 1
    bound: tuple[str, ...] = ()

    def __str__(self) -> str:
        if CPU in self.bound:
            return CPU
        return f"GPU {', '.join(self.bound)}" if self.bound else count_noun(self.count, "GPU")

    def wanted(self, devices: Collection[str]) -> list[str]:
        """Return those of the devices that the run could take."""
        return [each for each in devices if (each in self.bound if self.bound else each != CPU)]

    def choose(self, free: Collection[str]) -> tuple[str, ...]:
        """Return the devices that the run gets; none where too few are free."""
        wanted = self.wanted(free)
        return tuple(wanted[: self.count]) if len(wanted) >= self.count else ()


def list_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that processes with this environment have, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := environment.get(GPUS)) is not None:
        return tuple(part for each in visible.split(",") if (part := each.strip()) not in ("", "-1"))
    # By their number alone: a container that is given the fourth GPU has nvidia3, which CUDA counts as 0.
    return tuple(str(number) for number, _ in enumerate(DEVICES.glob("nvidia[0-9]*")))


def need_of(launch: Launch, environment: Mapping[str, str]) -> Need:
    """Raises SettingsError for gpu_ids that no run can have."""
    if launch.use_cpu or not list_gpus(environment):
        return Need(1, (CPU,))
    count = ranks_per_machine(launch)
    bound = visible_gpus(launch, environment).get(GPUS, "")
    return Need(count, tuple(bound.split(",")[:count]) if bound else ())


def need_of_start(loaded: Loaded) -> Need:
    """Return the need of a run that the page would start now. Raises as `need_of` does."""
    environment = {**loaded.variables, **os.environ}  # as `train` passes on what an .env file has
    need = need_of(loaded.settings.launch, environment)
    if need.bound or GPUS in os.environ or GPUS not in loaded.variables:
        return need
    return replace(need, bound=list_gpus(environment)[: need.count])


def devices_of(run: RunFolder, pid: int) -> tuple[str, ...]:
    """Return the devices of a running run, whoever has started it: by its settings and its process's environment."""
    try:
        environment = psutil.Process(pid).environ()
    except (psutil.Error, OSError):  # another user's
        environment = dict(os.environ)
    devices = (CPU, *list_gpus(environment))
    try:
        return need_of(launch_of(run), environment).choose(devices) or devices
    except SettingsError:
        return devices


def launch_of(run: RunFolder) -> Launch:
    recorded = (read_settings(path) if (path := run.file(SETTINGS)) is not None else None) or {}
    names = ("num_processes", "num_machines", "gpu_ids", "use_cpu")
    try:
        return Launch.model_validate({name: recorded[name] for name in names if name in recorded})
    except ValidationError:
        return Launch()
