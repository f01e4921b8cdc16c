"""Everything about DeepSpeed that this machine can answer before a run, in one call."""

from __future__ import annotations

from simpletuner.deepspeed.disk import check_disk
from simpletuner.deepspeed.estimate import Model, estimate
from simpletuner.deepspeed.platform_support import INSTALL, check_platform, is_installed
from simpletuner.settings import Settings
from simpletuner.settings.deepspeed.config import deepspeed_config, deepspeed_options


def check_zero(settings: Settings, parameters: int | None = None) -> list[str]:
    """Return warnings about running a configuration with DeepSpeed here; nothing where DeepSpeed is off.

    Raises EnvironmentFault for a platform without DeepSpeed, and for an offload folder that cannot be used.
    `parameters` is None where nobody can count them; then the room on disk is not checked.
    """
    zero = deepspeed_options(settings)
    if zero is None:
        return []
    check_platform()
    if zero.nvme_path is not None:
        check_disk(zero.nvme_path, disk_bytes(settings, parameters) if parameters else None)
    return [] if is_installed() else [f"deepspeed is not installed on this machine: {INSTALL}"]


def disk_bytes(settings: Settings, parameters: int) -> int:
    """Return what the ranks of one machine put into files."""
    return estimate(
        deepspeed_config(settings, settings.launch.num_processes), model_of(settings, parameters)
    ).disk_bytes


def model_of(settings: Settings, parameters: int) -> Model:
    """Return what settings say of a model with so many parameters, for an estimate."""
    zero, launch = deepspeed_options(settings), settings.launch
    states = len(zero.states) if zero else 2
    ema_device = settings.ema.ema_device if settings.ema.use_ema else ""
    return Model(parameters, launch.num_processes, launch.num_machines, states, ema_device)
