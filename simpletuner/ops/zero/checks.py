"""Everything about DeepSpeed that this machine can answer before a run, in one call."""

from __future__ import annotations

from simpletuner.ops.zero.disk import check_disk
from simpletuner.ops.zero.estimate import Model, estimate
from simpletuner.ops.zero.machine import INSTALL, check_platform, is_installed
from simpletuner.settings import Settings
from simpletuner.settings.zero.config import zero_config, zero_of


def check_zero(settings: Settings, parameters: int | None = None) -> list[str]:
    """Return warnings about running a configuration with DeepSpeed here; nothing where DeepSpeed is off.

    Raises EnvironmentFault for a platform without DeepSpeed, and for an offload folder that cannot be used.
    `parameters` is None where nobody can count them; then the room on disk is not checked.
    """
    zero = zero_of(settings)
    if zero is None:
        return []
    check_platform()
    if zero.nvme_path is not None:
        check_disk(zero.nvme_path, disk_bytes(settings, parameters) if parameters else None)
    return [] if is_installed() else [f"deepspeed is not installed on this machine: {INSTALL}"]


def disk_bytes(settings: Settings, parameters: int) -> int:
    """Return what the ranks of one machine put into files."""
    return estimate(zero_config(settings, settings.launch.num_processes), model_of(settings, parameters)).disk_bytes


def model_of(settings: Settings, parameters: int) -> Model:
    """Return what settings say of a model with so many parameters, for an estimate."""
    zero, launch = zero_of(settings), settings.launch
    states = len(zero.states) if zero else 2
    ema_device = settings.ema.ema_device if settings.ema.use_ema else ""
    return Model(parameters, launch.num_processes, launch.num_machines, states, ema_device)
