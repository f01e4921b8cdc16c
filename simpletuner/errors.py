"""What can go wrong, as types: each carries one sentence, a hint, and the exit code that scripts see."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


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


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with the settings, as data: the command line prints it, a page can show it beside the field."""

    setting: str
    """Its name, followed by the key inside it where it holds JSON; as it was written where there is no such setting."""
    message: str
    """What is wrong and what to write instead."""
    place: str = ""
    """Where it was written: `flag`, `config.toml:3`, `environment SIMPLETUNER_SEED`."""
    given: str = ""
    """The value as it was written, shortened."""
    hint: str = ""
    """A guess at what was meant."""

    def __str__(self) -> str:
        given = f" = {self.given}" if self.given else ""
        place = f" ({self.place})" if self.place else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.setting}{given}{place}: {self.message}{hint}"


@dataclass(frozen=True)
class BrokenRule(Mistake):
    """A mistake that no single value is to blame for; `message` is a whole sentence."""

    others: tuple[str, ...] = ()
    """The other settings that the sentence is about."""

    def __str__(self) -> str:
        return f"{self.message} [{self.place}]" if self.place else self.message


class SettingsError(SimpleTunerError):
    """A flag, file or combination of settings that cannot be run; `mistakes` lists them where there are several."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str = "", hint: str = "", *, mistakes: Sequence[Mistake] = ()) -> None:
        super().__init__(message or "\n  ".join(map(str, mistakes)), hint)
        self.mistakes = tuple(mistakes)


class EnvironmentNotReady(SimpleTunerError):
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


class RemoteFailure(SimpleTunerError):
    """What ended another machine or rank; this one ends with the same sentence and exit code."""

    def __init__(self, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


HINTS = {
    errno.ENOSPC: "make room, then run the same command again: it goes on where it stopped",
    errno.EDQUOT: "make room, then run the same command again: it goes on where it stopped",
    errno.EROFS: "the file system is mounted read-only: choose another folder",
    errno.EACCES: "see who owns it, and whether this user may use it",
    errno.EPERM: "see who owns it, and whether this user may use it",
    errno.EEXIST: "something else has this name: move it away, or choose another folder",
    errno.ENOTDIR: "something else has this name: move it away, or choose another folder",
    errno.EISDIR: "something else has this name: move it away, or choose another folder",
    errno.ENOENT: "check that it exists and that nothing removes it while a run uses it",
}
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers, which raise exceptions of their own, end messages about files."""


@contextmanager
def system_errors_explained(folder: Path | None = None) -> Iterator[None]:
    """Turn what the system refuses (a full disk, a missing right, no memory) into EnvironmentFault.

    Whatever touches files may raise OSError, so this is used at the two walls, around all of a command or of a rank.
    `folder` is named where an error names no file.
    """
    try:
        yield
    except (SimpleTunerError, BrokenPipeError):  # a reader such as `head` that has seen enough is no fault
        raise
    except OSError as error:
        raise os_fault(error, folder) from error
    except MemoryError as error:
        raise EnvironmentNotReady("out of memory", "lower what is held at once, such as train_batch_size") from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, not importable here
            raise EnvironmentNotReady(str(error).partition(". ")[0], OUT_OF_GPU_MEMORY) from error
        if number := RUST_ERRNO.search(str(error)):
            raise os_fault(OSError(int(number[1]), os.strerror(int(number[1]))), folder) from error
        raise


OUT_OF_GPU_MEMORY = "lower train_batch_size, or set gradient_checkpointing or fsdp_enable"


def os_fault(error: OSError, folder: Path | None = None) -> EnvironmentNotReady:
    """Return what to say about a refused system call."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None] or [str(folder or "")]
    why = error.strerror or str(error) or type(error).__name__
    message = f"cannot use {' and '.join(names)}: {why}" if any(names) else why
    return EnvironmentNotReady(message, HINTS.get(error.errno or 0, "`--debug` shows where"))
