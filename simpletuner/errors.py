"""What can go wrong, as types: each carries one sentence, a hint, and the exit code that scripts see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Say how a command ended; ops scripts on every node rely on these numbers."""

    OK = 0
    BUG = 1
    USAGE = 2
    ENVIRONMENT = 3
    DATA = 4
    TRAINING = 5
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


SIGNAL_CODES = frozenset({ExitCode.HANGUP, ExitCode.INTERRUPTED, ExitCode.TERMINATED})
"""Exit codes of a run that was asked to stop, which is not an error."""


class SimpleTunerError(Exception):
    """Stop with one sentence; `hint` ends in the next thing to type or to change."""

    exit_code: int = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SettingsError(SimpleTunerError):
    """A flag, file or combination of settings that cannot be run."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(SimpleTunerError):
    """The machine lacks something: a file, room on disk, a package, a network peer."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(SimpleTunerError):
    """Pictures, captions or buckets that cannot be trained on."""

    exit_code = ExitCode.DATA


class TrainingError(SimpleTunerError):
    """Training itself failed: a loss that is not a number, a rank that died."""

    exit_code = ExitCode.TRAINING


class Stopped(SimpleTunerError):
    """A signal asked the run to end; everything worth keeping has been saved."""

    exit_code = ExitCode.TERMINATED

    def __init__(self, signal_number: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = ExitCode(128 + signal_number)


class PassedOn(SimpleTunerError):
    """What ended another machine or rank; this one ends with the same sentence and exit code."""

    def __init__(self, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code
