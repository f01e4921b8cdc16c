"""What a signal does to a process, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from patience import PATIENCE

from simpletuner.errors import Stopped
from simpletuner.system.processes.signals import StopRequest, handle_stop_signals, stop_announcement

WAIT = """
import sys, time
from simpletuner.system.processes import signals
with signals.handle_stop_signals(lambda: 7) as request:
    request.when_asked = lambda: print("asked", flush=True)
    request.before_exit = lambda sentence: print(sentence, flush=True)
    request.may_exit = sys.argv[1] == "may exit"
    print("ready", flush=True)
    while not request.signal_number or sys.argv[1] == "may exit":
        time.sleep(0.01)
    request.check()
"""


@pytest.fixture
def started():
    made: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WAIT, how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_a_second_signal_a_second_later_leaves_without_saving(started):
    process = started("may exit")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)  # of the same scheduler
    time.sleep(1.5)
    assert process.poll() is None, "within a second, two signals are one request"
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (130, "stopped without saving, by a second SIGINT\n")
    assert "stopping: finishing step 7, then saving a checkpoint; signal again to leave without saving" in errors
    assert errors.rstrip().endswith("stopped without saving")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_of_any_kind_asks_for_a_stop(started, number):
    process = started("not at once")
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    _, errors = process.communicate(timeout=PATIENCE)
    assert f"Stopped: stopped by {number.name} before training; what was prepared is kept" in errors


def test_handlers_are_as_before_afterwards_and_signals_are_ours_within():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    asked = threading.Event()
    with handle_stop_signals() as request:
        request.when_asked = asked.set
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(PATIENCE) and request.signal_number == signal.SIGTERM
        with pytest.raises(Stopped) as caught:
            request.check()
        assert int(caught.value.exit_code) == 143
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_what_follows_names_the_step_where_it_is_known():
    assert stop_announcement(7, 12.4) == "finishing step 7, then saving a checkpoint, which takes about 12 s"
    assert [stop_announcement(unsaved, 1.0) for unsaved in (0, 7, -1)] == [
        "what is done is kept",
        "finishing step 7, then saving a checkpoint",
        "finishing this step, then saving a checkpoint",
    ]
    assert StopRequest().stopped("x").message == "stopped by SIGTERM x", "asked for on another rank"
