"""Exceptions for the user: each carries one sentence, a hint and the exit code of the command."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from traceback import walk_tb

from simpletuner.credentials import mask_credentials


class ExitCode(IntEnum):
    """Exit codes of all commands; scripts rely on these numbers."""

    OK = 0
    BUG = 1
    USAGE = 2
    ENVIRONMENT = 3
    DATA = 4
    TRAINING = 5
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


# Exit codes after a signal, which is not an error.
SIGNAL_CODES = frozenset({ExitCode.HANGUP, ExitCode.INTERRUPTED, ExitCode.TERMINATED})


class SimpleTunerError(Exception):
    """An error with one sentence for the user; `hint` says what to type or change next."""

    exit_code: int = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = mask_credentials(message)
        self.hint = mask_credentials(hint)
        super().__init__(self.message)
        self.about: tuple[str, ...] = ()
        """The settings that the error is about, where it lists no mistakes: if some were set, these."""


@dataclass(frozen=True)
class Mistake:
    """A mistake in the settings, as data: the command line prints it, the page shows it next to the field."""

    setting: str
    """Its name, with the key inside it where it holds JSON; as written where there is no such setting."""
    message: str
    """The mistake, and what to write instead."""
    place: str = ""
    """Source of the value: `flag`, `config.toml:3`, `environment SIMPLETUNER_SEED`."""
    given: str = ""
    """The value as it was written, shortened."""
    hint: str = ""
    """A guess at what was meant."""

    def __str__(self) -> str:
        name = self.setting if self.setting.strip() and self.setting.isprintable() else repr(self.setting)
        given = f" = {self.given}" if self.given else ""
        place = f" ({self.place})" if self.place else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{name}{given}{place}: {self.message}{hint}"


@dataclass(frozen=True)
class BrokenRule(Mistake):
    """A mistake that no single value is to blame for; `message` is a whole sentence."""

    others: tuple[str, ...] = ()
    """The other settings that the sentence is about."""

    def __str__(self) -> str:
        return f"{self.message} [{self.place}]" if self.place else self.message


# Largest number of mistakes printed. Nearest names, which take long to find, are sought in no more.
MAX_MISTAKES = 100


class SettingsError(SimpleTunerError):
    """A flag, file or combination of settings that cannot run; `mistakes` lists several of them."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str = "", hint: str = "", *, mistakes: Sequence[Mistake] = ()) -> None:
        more = len(mistakes) - MAX_MISTAKES
        shown = [*map(str, mistakes[:MAX_MISTAKES]), *([f"and {more:,} more"] if more > 0 else [])]
        hints = dict.fromkeys(each.hint for each in mistakes if isinstance(each, BrokenRule) and each.hint)
        super().__init__(message or "\n  ".join(shown), hint or "; ".join(hints))
        self.mistakes = tuple(mistakes)


class OtherRunsFolder(SettingsError):
    """A start in an output_dir whose run it cannot go on with; the status of that run stays as it is."""


@contextmanager
def collect_error(errors: list[SimpleTunerError]) -> Iterator[None]:
    # Other checks can be made before it is raised.
    try:
        yield
    except SimpleTunerError as error:
        errors.append(error)


def join_errors(errors: Sequence[SimpleTunerError]) -> SimpleTunerError:
    """Return one error that says all, with all hints: a SettingsError if one of them is."""
    if len(errors) == 1 or not any(isinstance(each, SettingsError) for each in errors):
        return join_data_errors(errors)
    rules = [[*getattr(each, "mistakes", ())] or [rule_of(each)] for each in errors]
    hints = dict.fromkeys(each.hint for each in errors if each.hint)
    return SettingsError(mistakes=[rule for own in rules for rule in own], hint="; ".join(hints))


def rule_of(error: SimpleTunerError) -> BrokenRule:
    setting, *others = error.about or ("",)
    return BrokenRule(setting, error.message, hint=error.hint, others=tuple(others))


def join_data_errors(errors: Sequence[SimpleTunerError]) -> SimpleTunerError:
    """Return one error that says what all say about the data, or about this machine, with all hints."""
    if len(errors) == 1:
        return errors[0]
    hints = dict.fromkeys(error.hint for error in errors if error.hint)
    kind = EnvironmentNotReady if all(isinstance(each, EnvironmentNotReady) for each in errors) else DataError
    more = len(errors) - MAX_MISTAKES
    said = [*(error.message for error in errors[:MAX_MISTAKES]), *([f"and {more:,} more"] if more > 0 else [])]
    return kind("\n".join(said), "; then: ".join(hints))


class EnvironmentNotReady(SimpleTunerError):
    """Something is missing on this machine: a file, disk space, a package, a network peer."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(SimpleTunerError):
    """Images, captions or buckets that cannot be trained on."""

    exit_code = ExitCode.DATA


class TrainingError(SimpleTunerError):
    """Training failed: a loss that is not finite, a rank that died."""

    exit_code = ExitCode.TRAINING


def describe_bug(error: Exception) -> SimpleTunerError:
    return SimpleTunerError(f"{type(error).__name__}: {error}", "this is a bug in simpletuner; `--debug` shows where")


class Stopped(SimpleTunerError):
    """The run was stopped by a signal; everything worth keeping has been saved."""

    exit_code = ExitCode.TERMINATED

    def __init__(self, signal_number: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = ExitCode(128 + signal_number)


class RemoteFailure(SimpleTunerError):
    """The failure of another machine or rank, with whose sentence and exit code this one exits."""

    def __init__(self, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


# Sentences for system errors whose own words ("Stale file handle") tell nobody what has happened.
REASONS = {
    errno.EFBIG: "the file would be larger than a limit allows",
    errno.EIO: "the disk or the file server answers with an error",
    errno.ELOOP: "it is a link that leads to itself, or one that is not followed",
    errno.ENXIO: "it is a pipe that nobody reads, or a device that is not there",
    errno.ESTALE: "the file server has removed or replaced it since it was opened",
}
HINTS = {
    errno.EFBIG: "see `ulimit -f`, and what the file system allows (4 GiB on FAT32); then run the same command again",
    errno.EIO: "see `sudo dmesg | tail`, and the health of the disk or file server; then run the same command again",
    errno.ESTALE: "run the same command again: it goes on where it stopped; `simpletuner nfs check` tests the folder",
    errno.ENOSPC: "make room, then run the same command again",
    errno.EDQUOT: "make room, then run the same command again",
    errno.EROFS: "the file system is mounted read-only: choose another folder",
    errno.EACCES: "see who owns it, and whether this user may use it",
    errno.EPERM: "see who owns it, and whether this user may use it",
    errno.ELOOP: "remove it, or name a file or folder that is there",
    errno.ENXIO: "remove it, or choose another name",
    errno.EEXIST: "something else has this name: move it away, or choose another folder",
    errno.ENOTDIR: "something else has this name: move it away, or choose another folder",
    errno.EISDIR: "something else has this name: move it away, or choose another folder",
    errno.ENOENT: "check that it exists and that nothing removes it while a run uses it",
}
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|std::bad_alloc|failed to allocate|unable to mmap|os error 12\)"
    # The loader of shared libraries; a reason behind it is another one (a folder mounted noexec).
    r"|failed to map segment from shared object$"
    r"|can't start new thread|could not create a primitive$",
    re.IGNORECASE,
)
"""Messages of torch's CPU allocator, C++, NumPy, torch's storages, Rust, Python's threads, each of which has
a stack, and oneDNN when the machine's memory is used up."""
# Errno in exceptions of safetensors and tokenizers, which do not raise OSError.
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


def without_errno(error: BaseException, *said: Path) -> str:
    """Error's message without Python's `[Errno 2]`: the reason, and the files that are not `said` already."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return ": ".join(filter(None, (reason_of_os(error), " and ".join(files_of(error, *said)))))


def reason_of_os(error: OSError) -> str:
    # Our own errors have a number, too, and words that say more than those of the system.
    is_own = error.strerror != os.strerror(error.errno or 0)
    return (not is_own and REASONS.get(error.errno or 0)) or error.strerror or str(error) or type(error).__name__


def files_of(error: OSError, *said: Path) -> list[str]:
    names = (error.filename, error.filename2)
    return [str(name) for name in names if name is not None and str(name) not in map(str, said)]


@contextmanager
def explain_system_errors(folder: Path | None = None) -> Iterator[None]:
    """Turn errors of the system (full disk, permission denied, out of memory) into EnvironmentNotReady.

    Any code that touches files may raise OSError, so this wraps the whole of a command and of a rank rather
    than each caller. `folder` is named where an error names no file.
    """
    try:
        yield
    except SimpleTunerError:
        raise
    except Exception as error:
        # A command's results: `head` has read enough. What a run prints raises none (processes/console.py).
        if isinstance(error, BrokenPipeError) and folder is None:
            raise
        if is_out_of_memory(error):
            raise out_of_memory() from error
        if failed := system_error(error):
            raise explain_os_error(failed, folder) from error
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ImportError):
            cause = cause.__cause__  # not __context__: after a failed import, another way may be tried
        if cause is not None and (explained := explain_import_error(cause)):
            raise explained from error
        if number := RUST_ERRNO.search(str(error)):
            raise explain_os_error(OSError(int(number[1]), os.strerror(int(number[1]))), folder) from error
        raise


def system_error(error: BaseException) -> OSError | None:
    """Error of the operating system that an exception is, or that pathlib has made a RuntimeError of.

    Until Python 3.13 `Path.resolve` raises one for a link that leads to itself.
    """
    hidden = error.__context__ if isinstance(error, RuntimeError) else error
    return hidden if isinstance(hidden, OSError) and (hidden is error or hidden.errno == errno.ELOOP) else None


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error in the chain was raised because the machine has no memory left.

    Libraries hide it: of a file that it cannot map, diffusers says "unable to load weights from" it.
    """
    return any(
        isinstance(one, MemoryError)
        or getattr(one, "errno", None) == errno.ENOMEM
        or (not isinstance(one, SimpleTunerError) and OUT_OF_MEMORY.search(str(one)))
        for one in chain_of(error)
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those from which it was raised."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or one in seen:
            continue
        # Chains may be circular: `raise a from b` takes any exception.
        seen.append(one)
        yield one
        pending += [one.__cause__, one.__context__]


def explain_import_error(error: ImportError) -> EnvironmentNotReady | None:
    """Describe packages that do not fit each other, None where the import is our own mistake.

    With torchao 0.18 and torch 2.9, no pipeline of diffusers can be imported.
    """
    from importlib.metadata import PackageNotFoundError, version

    def named(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return package

    places = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    importer, missing = ((name or "").partition(".")[0] for name in (places[-1] if places else "", error.name))
    if missing == __package__ or not missing or not importer:
        return None
    packages = " ".join(dict.fromkeys(each for each in (importer, missing) if each != __package__))
    return EnvironmentNotReady(
        f"{named(importer)} does not work with {named(missing)}: {str(error).partition(' (/')[0]}",
        f"install versions that fit: `pip install --upgrade {packages}`; or remove the one that is not needed",
    )


def out_of_memory() -> EnvironmentNotReady:
    return EnvironmentNotReady(
        "out of memory: this process got no more of the machine's memory, or of what a limit leaves it",
        "see `free -h`, `ulimit -v`, `ulimit -u` and the container's limits; fewer ranks per machine, a smaller "
        "train_batch_size or less offloading need less, and `simpletuner plan` shows how much",
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError that does not: a failed write knows its descriptor alone."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def explain_os_error(error: OSError, folder: Path | None = None) -> EnvironmentNotReady:
    """Describe a failed system call in one sentence."""
    names, why = files_of(error) or [str(folder or "")], reason_of_os(error)
    message = f"cannot use {' and '.join(names)}: {why}" if any(names) else why
    return EnvironmentNotReady(message, hint_for(error))


def hint_for(error: BaseException) -> str:
    """Next step after a failed use of files, by its errno, which safetensors has in its message."""
    if is_out_of_memory(error):
        return out_of_memory().hint
    number = getattr(error, "errno", None)
    if number is None and (found := RUST_ERRNO.search(str(error))):
        number = int(found[1])
    return HINTS.get(number or 0, "`--debug` shows where")
