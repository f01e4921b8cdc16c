"""What a forked rank runs. Nothing heavy is imported here: `warm.py` is what the fork server holds ready."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")


def as_rank(function: Callable[..., None], rank: int, world: int, port: int, log: str, *arguments: Any) -> None:
    """Become one rank of a world, say everything into a log, and run a function."""
    with Path(log).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    if world > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    function(*arguments)


def command_line(arguments: list[str]) -> None:
    """Run the real command line in this process."""
    import simpletuner.app

    simpletuner.app.main(arguments)


def build_pipeline(family: str, folder: str) -> None:
    """Write the tiny pipeline of a family."""
    from simpletuner.models.registry import family_class
    from simpletuner.models.tiny.build import build_tiny
    from simpletuner.settings.sections import Model

    build_tiny(family_class(Model(model_family=family)), Path(folder))


def command_line_at(folders: list[str], arguments: list[str]) -> None:
    """Run the command line of each rank in a folder of its own, as on machines that share nothing."""
    import simpletuner.app

    os.chdir(folders[int(os.environ["RANK"])])
    simpletuner.app.main(arguments)


def launcher(arguments: list[str]) -> None:
    """Run a launcher in a session of its own; its ranks are forked from it, with torch loaded, instead of started."""
    os.setsid()
    subprocess.Popen = ForkedRank
    command_line(arguments)


class ForkedRank:
    """What a launcher needs of `subprocess.Popen`, over a fork of the launcher itself.

    A rank that is started spends 5 CPU seconds on imports. As after a start, it has its own environment, the default
    signal handlers, and no open files but
    those passed on: a rank notices by a socket that breaks that its launcher has died.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(command, env, pass_fds)

    def _become(self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
            if int(name) > 2 and int(name) not in pass_fds:
                with suppress(OSError):  # the one that lists this folder
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(env)
        code = 1
        try:
            command_line(list(command[command.index("simpletuner") + 1 :]))
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:  # noqa: BLE001 - what an interpreter does with it
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what the launcher would clean up at its exit is not this process's

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
