"""A cloud's notices that it will take this machine away (`preemption_check`)."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from simpletuner.errors import without_errno
from simpletuner.report import Report
from simpletuner.system.network import http_request
from simpletuner.system.processes.signals import StopRequest

# Polling interval that AWS recommends (two minutes' notice); Google and Azure give 30 s.
ASK_SECONDS = 5.0
ANSWER_SECONDS = 5.0
NO_NOTICE = (HTTPStatus.NOT_FOUND, HTTPStatus.NO_CONTENT)
# Exit codes of a shell whose command is no program, or is not there.
CANNOT_RUN = (126, 127)


@dataclass(frozen=True)
class Answer:
    """Knowledge of a machine's end; `problem` says why nothing is."""

    is_taken_away: bool
    problem: str = ""


def ask(check: str) -> Answer:
    try:
        return ask_address(check) if check.startswith(("http://", "https://")) else ask_command(check)
    except subprocess.TimeoutExpired:
        return Answer(False, f"has not answered within {ANSWER_SECONDS:.0f} s")
    except (OSError, ValueError) as error:
        return Answer(False, f"cannot be asked: {without_errno(error)}")


def ask_command(command: str) -> Answer:
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS)
    if done.returncode in CANNOT_RUN:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return Answer(False, f"cannot be run: {said[-1] if said else f'exit code {done.returncode}'}")
    return Answer(done.returncode == 0)


def ask_address(url: str) -> Answer:
    import urllib.request
    from urllib.error import HTTPError, URLError

    # Without the proxy of the environment, which has another machine's metadata or none.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(http_request(url), timeout=ANSWER_SECONDS) as answer:
            return Answer(answer.status == HTTPStatus.OK)
    except HTTPError as error:
        error.close()  # it holds the connection
        return Answer(False, "" if error.code in NO_NOTICE else f"answers with the status {error.code}")
    except URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else error
        return Answer(False, f"cannot be reached: {without_errno(reason)}")


@contextmanager
def watch_preemption(check: str, stop: StopRequest) -> Iterator[None]:
    """Ask from a thread, and request a stop when the machine will be taken away; do nothing without a check.

    An answer that says nothing is one warning.
    """
    ended = threading.Event()

    def watch() -> None:
        warned, answer = False, ask(check)
        while not answer.is_taken_away:
            if answer.problem and not warned:
                warned = True
                Report().warn(f"preemption_check {answer.problem}", "it is asked again every 5 s")
            if ended.wait(ASK_SECONDS):
                return
            answer = ask(check)
        if not ended.is_set():
            Report().say("preemption_check: this machine will be taken away")
            stop.announce()

    if check:
        threading.Thread(target=watch, name="preemption", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
