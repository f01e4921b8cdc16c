"""Why a run ends early: what other machines say of it is checked, and only signals give ranks time."""

from __future__ import annotations

import signal

import pytest

from simpletuner.errors import ExitCode
from simpletuner.launch.ranks import ProcessExit
from simpletuner.launch.termination import Termination, launcher_signaled, parse_termination, rank_failed


def sent(**changes: object) -> dict[str, object]:
    return Termination(1, 5, "rank 3 was killed", "look").as_json() | changes


def test_what_a_machine_says_is_read_unless_there_is_no_such_machine():
    assert parse_termination(sent(), 2) == Termination(1, 5, "rank 3 was killed", "look")
    for machine in (2, -1, "1", None):
        assert parse_termination(sent(machine=machine), 2) is None
    for name in ("said", "killed", "stalled"):
        assert parse_termination(sent(**{name: True}), 2) == Termination(
            1, 5, "rank 3 was killed", "look", **{name: True}
        )
    assert parse_termination(sent(exit_code=0), 2) == Termination(1, ExitCode.TRAINING, "rank 3 was killed", "look")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_asks_for_a_stop_is_passed_on(number):
    assert launcher_signaled(0, number).signal_number == number


@pytest.mark.parametrize("code", [1, 5, 128, 137, 139, 255])
def test_any_other_end_is_no_signal_to_save(code):
    assert Termination(0, code, "").signal_number == 0


def test_who_was_aborted_is_not_told_to_look_for_memory():
    aborted, killed = (rank_failed(0, ProcessExit(2, 77, -number)) for number in (signal.SIGABRT, signal.SIGKILL))
    assert "collective takes 10 minutes" in aborted.hint and "memory" not in aborted.hint
    assert "memory runs out" in killed.hint
