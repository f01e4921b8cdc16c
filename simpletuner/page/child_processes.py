"""Commands of simpletuner that the page starts: it waits for the answer of some, others outlive it."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryFile

from simpletuner.errors import EnvironmentNotReady, ExitCode
from simpletuner.run_log import START_CONSOLE
from simpletuner.runs.folder import RunFolder
from simpletuner.system.files.lease import nothing
from simpletuner.system.processes.python_process import module_command


class AwaitedCommands:
    """Commands whose answer the page waits for, one of a name at a time; they end with the page."""

    def __init__(self) -> None:
        self.heavy = threading.Lock()  # for those that import torch: each takes gigabytes and all cores
        self.lock = threading.RLock()
        self.processes: dict[str, Popen[bytes]] = {}
        self.is_closed = False

    def run(
        self,
        arguments: Sequence[str],
        seconds: float = threading.TIMEOUT_MAX,
        *,
        place: Path | None = None,
        variables: Mapping[str, str] = {},
        answered: Sequence[int] = (ExitCode.OK,),
        say: Callable[[str], None] = nothing,
    ) -> str | None:
        """Output of a command; None if it was killed by a later one of its name, or by the page's end.

        `say` gets each line of its standard error. Raises EnvironmentNotReady with the error that it printed
        where its exit code is not `answered`, and where it takes longer than `seconds`.
        """
        with TemporaryFile() as output:  # while the errors are read, a pipe for the output would fill up
            with self.lock:
                self.kill(arguments[0])
                if self.is_closed:
                    return None
                process = start(arguments, place, variables, output.fileno(), PIPE, is_detached=False)
                self.processes[arguments[0]] = process
            end, said = time.monotonic() + seconds, list[str]()
            limit = threading.Timer(seconds, process.kill)
            limit.daemon = True
            limit.start()
            with process:
                for line in process.stderr or ():
                    said.append(line.decode(errors="replace"))
                    say(said[-1])
            limit.cancel()
            with self.lock:
                if self.processes.get(arguments[0]) is not process:
                    return None
                del self.processes[arguments[0]]
            output.seek(0)
            if process.returncode in answered and ((printed := output.read()) or not process.returncode):
                return printed.decode()
        command = shlex.join(["simpletuner", *arguments])
        if time.monotonic() >= end:
            message = f"`simpletuner {arguments[0]}` took longer than {seconds} s and was ended"
            raise EnvironmentNotReady(message, f"run it in a terminal: {command}")
        lines = dict(line.strip().split(": ", 1) for line in said if line.startswith(("error: ", "hint: ")))
        raise EnvironmentNotReady(lines.get("error", f"`{command}` ended without a result"), lines.get("hint", ""))

    def kill(self, name: str) -> None:
        with self.lock:
            if (process := self.processes.pop(name, None)) is not None:
                process.kill()  # whoever waits for it reaps it

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            for name in [*self.processes]:
                self.kill(name)


def launch(run: RunFolder, arguments: Sequence[str], place: Path, variables: Mapping[str, str] = {}) -> Popen[bytes]:
    """Start a command that goes on when the page ends. What it prints is in the folder, beside the console of
    the run that is there: the command may have to leave that as it is."""
    # O_NONBLOCK: opening a FIFO of that name would wait for a reader, and is refused.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(run.path / START_CONSOLE, flags, 0o666)
    try:
        return start(arguments, place, variables, descriptor, STDOUT, is_detached=True)
    finally:
        os.close(descriptor)


def start(
    arguments: Sequence[str], place: Path | None, variables: Mapping[str, str], out: int, errors: int, is_detached: bool
) -> Popen[bytes]:
    return Popen(
        module_command("simpletuner", *arguments),
        cwd=place,
        env={**os.environ, **variables},
        stdin=DEVNULL,
        stdout=out,
        stderr=errors,
        start_new_session=is_detached,  # Ctrl-C in the page's terminal, and its end, are not for a run
    )
