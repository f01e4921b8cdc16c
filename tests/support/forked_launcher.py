"""Launchers that are forked from the warm server, and ranks that are forked from them.

Command lines, parents, sessions, signals, sockets, environments, namespaces and exit codes are those of
`simpletuner train`; what is left out is the start of interpreters with their imports: 1.5 CPU seconds of each launcher,
3.7 of each rank. The page forks what it starts in the same way: runs, plans, samples, checks of datasets. Launchers
that start ranks cold are some in `end_to_end/test_ending.py`, and some in `launch/test_machines.py`; pages
that start cold, and what they start, are those of `test_runs.py`, `test_dialogs.py` and `test_security.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ranks

from simpletuner.run_log import stop_run_log

MODULE = ["-m", "simpletuner"]
"""How the command of a rank goes on after the interpreter and its flags."""
FORKED = ("train", "net", "plan", "detect-blocks", "runs", "dataset", "sample")
"""Commands that are forked."""
HELD = "held"
"""A file beside the environments: while it is there, processes stop before they begin, until they are told to go on."""


class ForkedPopen(subprocess.Popen[Any]):
    """A Popen that forks where the command is a rank's, instead of starting an interpreter."""

    folder = Path()
    """Where each rank writes its environment, as PID.json: /proc/PID/environ is that of the fork server."""

    def __init__(self, args: Any, **options: Any) -> None:
        self.options = options
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *others: Any) -> None:
        args = args if isinstance(args, str) else list(args)
        if MODULE not in (args[2:4], args[3:5]) or args[args.index(MODULE[1]) + 1] not in FORKED:
            super()._execute_child(args, *others)  # pyright: ignore[reportAttributeAccessIssue]
            return
        ends = others[9:15]
        """Of pipes and files for stdin, stdout and stderr: of each what the child has, or reads, and then the other."""
        self.pid = os.fork()
        if not self.pid:
            end_as(lambda: self.become(args[args.index(MODULE[1]) + 1 :], (ends[0], ends[3], ends[5])))
        self._child_created = True
        self._close_pipe_fds(*ends)  # pyright: ignore[reportAttributeAccessIssue]

    def become(self, arguments: Sequence[str], streams: Sequence[int]) -> None:
        """Run a command line of simpletuner, in this process, with the options of the Popen."""
        if self.options.get("start_new_session"):
            os.setsid()
        os.chdir(self.options.get("cwd") or ".")
        for number, descriptor in enumerate(streams):
            if descriptor != -1:
                os.dup2(descriptor, number)
        become_rank(arguments, self.options.get("pass_fds", ()), self.options["env"], self.folder)


def become_rank(arguments: Sequence[str], kept: Sequence[int], variables: Mapping[str, str], folder: Path) -> None:
    """Forget the launcher as exec would, and run the command line of a rank."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    first = 3
    for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR may be another one
    sys.argv = ["simpletuner", *arguments]
    stop_run_log()
    open_streams()
    (folder / f"{os.getpid()}.json").write_text(json.dumps(dict(variables)))
    if (folder / HELD).exists():
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.command_line([*arguments])


def open_streams() -> None:
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def end_as(action: Callable[[], object]) -> NoReturn:
    """End this process with the code that an action exits with; nothing of the process that forked is run."""
    code: Any = None
    try:
        action()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        if code is None:
            traceback.print_exc()
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)


def run_elsewhere(enter: Callable[[], None], log: str, action: Callable[..., None], *arguments: Any) -> None:
    """Run an action in a session of its own, where `enter` leads; it says everything into a log."""
    os.setsid()
    with Path(log).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    open_streams()
    enter()
    action(*arguments)


def launch(folder: str, variables: Mapping[str, str], arguments: list[str]) -> None:
    """Run a command line whose ranks are forked, and write their environments into the folder."""
    os.environ.update(variables)
    ForkedPopen.folder = Path(folder)
    subprocess.Popen = ForkedPopen
    ranks.command_line(arguments)


def serve(said: str, log: str, place: str, variables: Mapping[str, str], arguments: list[str]) -> None:
    """Run `simpletuner page`, whose runs are forked, in a folder; its stdout is a FIFO, its stderr a file."""
    os.dup2(os.open(said, os.O_WRONLY), 1)  # first: who opens the other end waits for this
    os.dup2(os.open(log, os.O_WRONLY), 2)
    from simpletuner.page import child_processes

    open_streams()
    os.chdir(place)
    os.environ.update(variables)
    ForkedPopen.folder = Path(log).parent
    child_processes.Popen = ForkedPopen
    ranks.command_line(["page", *arguments])


def launch_with_torchrun(folder: str, arguments: list[str]) -> None:
    """Run torchrun, whose agent starts ranks that are forked."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    ForkedPopen.folder = Path(folder)
    subprocess_handler.Popen = ForkedPopen
    main(arguments)


class ForkedProcess:
    """A forked launcher, with what tests do to a Popen."""

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("simpletuner", timeout or 0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
