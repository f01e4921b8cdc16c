"""Start the ranks of this machine with torchrun's agent, each running the same command line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simpletuner.errors import ExitCode, SettingsError, SimpleTunerError, TrainingError
from simpletuner.report import Report
from simpletuner.settings import Loaded, Origin, Settings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SAVE_ON_SIGNAL_SECONDS = 900
"""How long ranks may take to save after SIGTERM or Ctrl-C before they are killed."""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this process is already a rank, started by us, by torchrun or by `accelerate launch`."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def settings_of_rank(loaded: Loaded, environment: Mapping[str, str]) -> Loaded:
    """Return the settings with the number of ranks that really were started."""
    world_size = int(environment["WORLD_SIZE"]) if is_rank(environment) else 1
    launch = loaded.settings.launch
    if world_size == launch.num_processes:
        return loaded
    if "num_processes" in loaded.origins:
        raise SettingsError(
            f"num_processes = {launch.num_processes} ({loaded.origins['num_processes']}), but {world_size} ranks run",
            "leave num_processes out, or start as many ranks as it says",
        )
    started = launch.model_copy(update={"num_processes": world_size})
    settings = loaded.settings.model_copy(update={"launch": started})
    origins = {**loaded.origins, "num_processes": Origin("launcher", world_size)}
    return replace(loaded, settings=settings, origins=origins)


def launch_ranks(settings: Settings, arguments: Sequence[str]) -> None:
    """Run `simpletuner ARGUMENTS` once per rank and pass on how it ended.

    Raises TrainingError with the rank and the reason when one died without a word; leaves with the rank's own exit
    code when it said why.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    ranks = settings.launch.num_processes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="simpletuner",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SAVE_ON_SIGNAL_SECONDS,
    )
    command = [sys.executable, "-u", "-m", "simpletuner", *arguments]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        raise_reason(error.failures)
    except SignalException as error:
        raise SystemExit(128 + int(error.sigval)) from None


def raise_reason(failures: Mapping[int, ProcessFailure]) -> None:
    """Leave with the exit code of the rank that failed first, and name it when a signal killed it."""
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = "the kernel kills a process when memory runs out: see `dmesg`; run the same command to resume"
        raise TrainingError(f"rank {rank} (pid {failure.pid}) was killed by {name}", hint)
    if failure.exitcode not in ExitCode.__members__.values():
        Report().error(SimpleTunerError(f"rank {rank} (pid {failure.pid}) ended with exit code {failure.exitcode}"))
    raise SystemExit(failure.exitcode)
