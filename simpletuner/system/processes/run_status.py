"""`output_dir/status.json`: what a run is doing and how it ended, as the run itself says it.

Rank 0 writes it while it holds the lock of the folder. The end is written by the process that prints the
reason: a rank, or the launcher for killed ranks. A status without an end, in a folder without a holder, means
that the run was killed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.errors import SIGNAL_CODES, SimpleTunerError, describe_bug
from simpletuner.system.files.atomic import atomic_file
from simpletuner.system.files.lease_record import launcher_pid
from simpletuner.system.files.regular_files import read_file

if TYPE_CHECKING:
    from pydantic import TypeAdapter


STATUS = "status.json"
MAX_BYTES = 1 << 20
# Between writes that only tell progress. Changes of the state are written at once.
WRITE_SECONDS = 2.0
# Longest wait, at the end, for a write that hangs, as on a file system that does not answer.
LOCK_SECONDS = 2.0


class RunState(StrEnum):
    """Activity or end of a run: six that it writes, three that a reader finds (`runs/condition.py`)."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    STUCK = "stuck"
    KILLED = "killed"
    UNKNOWN = "unknown"


ENDS = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED, RunState.KILLED})


@dataclass(frozen=True)
class RunStatus:
    """The content of `status.json`; a reader ignores names that it does not know."""

    state: RunState
    reason: str = ""
    """Reason of the stop or the end, as a sentence."""
    hint: str = ""
    doing: str = ""
    """The phase, such as `training`, and how much of it is done where `total` is above 0."""
    done: int = 0
    total: int = 0
    step: int = 0
    """Optimizer steps taken."""
    max_steps: int = 0
    """0 while it is not known."""
    loss: float | None = None
    seconds_left: float | None = None
    alarms: tuple[str, ...] = ()
    """Faults of this start that do not end it, as sentences."""
    mirror: str = ""
    """State of the bucket of mirror_output, as a sentence."""
    host: str = ""
    pid: int = 0
    """PID to signal: the launcher's, or the single process's."""
    rank_pid: int = 0
    """PID of rank 0."""
    config: str = ""
    """The file of settings, where the command line names that alone."""
    started: str = ""
    time: str = ""
    token: int = 0
    """Token of the folder's lease; a lower one never replaces a higher one."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDS

    def is_of_same_start(self, other: RunStatus) -> bool:
        return (self.host, self.rank_pid, self.started) == (other.host, other.rank_pid, other.started)


@cache
def adapter() -> TypeAdapter[RunStatus]:
    from pydantic import ConfigDict, TypeAdapter, with_config

    # Without its cache of values, which are new at each reading: 78 bytes of each, up to 1.3 MB.
    return TypeAdapter(with_config(ConfigDict(allow_inf_nan=False, cache_strings="keys"))(RunStatus))


def read_status(path: Path) -> RunStatus | None:
    """Parse status.json; None if it is missing, damaged or no regular file."""
    try:
        return adapter().validate_json(read_file(path, MAX_BYTES))
    except (OSError, ValueError):
        return None


class StatusWriter:
    """Writes the status of one run from one of its processes; nothing before it is told which folder that is.

    A status that cannot be written never ends a run.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.status = RunStatus(RunState.STARTING)
        self.is_own: Callable[[RunStatus], bool] = lambda found: False
        """Predicate of a status of the start that this process belongs to."""
        self.holds_lock = False
        self.earlier: bytes | None = None
        """The content of the file before this start."""
        self.counted: tuple[int, float | None, float | None] | None = None
        """Step, loss, and when training ends by the last estimate, in seconds of time.monotonic()."""
        self.written, self.written_at = b"", 0.0
        self.lock = threading.RLock()

    def begin(self, folder: Path, config: str, token: int = 0) -> None:
        """Begin the status of a start; only rank 0, which holds the lock of the folder."""
        with self.lock:
            self.path, self.holds_lock = folder / STATUS, True
            with suppress(OSError):
                self.earlier = read_file(self.path, MAX_BYTES)
            before = read_status(self.path) or self.status
            self.status = replace(
                self.status,
                step=before.step,
                max_steps=before.max_steps,
                loss=before.loss,
                host=socket.gethostname(),
                pid=launcher_pid(),
                rank_pid=os.getpid(),
                config=config,
                started=now(),
                token=token,
            )
            self.is_own = self.status.is_of_same_start
            self._write()

    def follow(self, folder: Path) -> None:
        """Let another rank write how the run ended, once rank 0 has begun."""
        self.path = folder / STATUS
        if (found := read_status(self.path)) is not None:
            self.is_own = found.is_of_same_start

    def supervise(self, folder: Path) -> None:
        """Let the launcher write how the run of its rank 0 ended."""
        host, pid = socket.gethostname(), os.getpid()
        self.path = folder / STATUS
        # Rank 0 writes the launcher's pid into the status of its start.
        self.is_own = lambda found: (found.host, found.pid) == (host, pid)

    def train(self, step: int, max_steps: int) -> None:
        state = RunState.RUNNING if self.status.state is RunState.STARTING else self.status.state
        self._change(state=state, step=step, max_steps=max_steps)

    def count(self, step: int, loss: float, ends: float | None) -> None:
        """Keep what a step has measured for the next write."""
        # Without the lock: training must not wait for a slow disk.
        self.counted = step, loss if math.isfinite(loss) else None, ends

    def stopping(self, reason: str) -> None:
        """Say that a signal has asked for a stop, and what is done before."""
        self._change(state=RunState.STOPPING, reason=reason)

    def mirrored(self, sentence: str) -> None:
        """Record the state of mirror_output's bucket, or its fault."""
        self._change(mirror=sentence)

    def alarm(self, sentence: str) -> None:
        """Add a fault that does not end the run."""
        self._change(alarms=(*self.status.alarms, sentence))

    def show(self, doing: str, done: int, total: int) -> None:
        """Write a changed phase, every two seconds at most; called by the thread of the status line."""
        with self.lock:
            self.status = replace(self.status, doing=doing, done=done, total=total)
            if self.holds_lock and time.monotonic() - self.written_at >= WRITE_SECONDS:
                self._write(durably=False)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write the end of the run: finished on rank 0, or an error that this process is about to print."""
        try:
            yield
        except SimpleTunerError as error:
            self.fail(error)
            raise
        except Exception as error:
            self.fail(describe_bug(error))
            raise
        if self.holds_lock:
            self.end(RunState.FINISHED)

    def fail(self, error: SimpleTunerError) -> None:
        # A requested stop is no failure.
        state = RunState.STOPPED if error.exit_code in SIGNAL_CODES else RunState.FAILED
        self.end(state, error.message, error.hint)

    def withdraw(self) -> None:
        """Bring back the status before this start, and write none any more."""
        with self.lock:
            path, self.path = self.path, None
            if path is not None and self.holds_lock:
                self.holds_lock = False
                with suppress(OSError):
                    if self.earlier is None:
                        path.unlink(missing_ok=True)
                    else:
                        replace_status(path, self.earlier, durably=True)

    def end(self, state: RunState, reason: str = "", hint: str = "") -> None:
        """Write how the run ended, unless another process of this start has.

        Ranks that stopped may have done so because a launcher died, which another launcher notices later.
        """
        if self.path is None or not self.lock.acquire(timeout=LOCK_SECONDS):
            return
        try:
            found = read_status(self.path)
            is_kept = (
                found is not None and found.has_ended and (found.state, state) != (RunState.STOPPED, RunState.FAILED)
            )
            if is_kept or (found is not None and not self.is_own(found)):
                return
            if found is None and not self.holds_lock:
                return
            base = self.status if self.holds_lock else found
            assert base is not None
            self.status = replace(base, state=state, reason=reason, hint=hint, doing="", done=0, total=0)
            self._write()
            self.holds_lock = False  # the thread of the status line may still run
        finally:
            self.lock.release()

    def _change(self, **values: object) -> None:
        with self.lock:
            self.status = replace(self.status, **values)
            if self.holds_lock:
                self._write()

    def _write(self, durably: bool = True) -> None:
        assert self.path is not None
        shown = self._with_counted()
        # An end that another process of this start has written stays: the first one knows the reason.
        found = read_status(self.path) if self.written else None
        if found is not None and found.has_ended and self.is_own(found):
            self.holds_lock = False  # another rank has failed, and has said so
            return
        if found is not None and found.token > self.status.token:
            self.holds_lock = False  # the folder is another run's by now
            return
        content = json.dumps(asdict(shown), indent=2).encode()
        self.written_at = time.monotonic()
        if content == self.written:
            return
        self.written = content
        stamped = json.dumps({**asdict(shown), "time": now()}, indent=2).encode() + b"\n"
        with suppress(OSError):
            replace_status(self.path, stamped, durably)

    def _with_counted(self) -> RunStatus:
        if self.counted is None:
            return self.status
        step, loss, ends = self.counted
        left = max(0.0, ends - time.monotonic()) if ends is not None and not self.status.has_ended else None
        return replace(self.status, step=step, loss=loss, seconds_left=left)


def replace_status(path: Path, content: bytes, durably: bool) -> None:
    """Replace the file at once, so that no reader sees half of it. Raises OSError."""
    try:
        with atomic_file(path, durably) as file:
            file.write(content)
    except OSError:
        # The reason of a run's end must be readable on a full disk: the file's present size can be rewritten.
        overwrite(path, content)


def overwrite(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass
class Activity:
    """The current phase: its text, and a counter that all ranks increment at the same points.

    A rank whose counter is lower than another's is behind: the others wait for it.
    """

    phase: int = 0
    doing: str = ""
    unsaved: int = 0
    """The step that a stop would finish and save; 0 if there are no trained steps that a checkpoint lacks."""
    save_seconds: float = 0.0
    """Duration of saving, as far as it is known."""
    watched: bool = False
    """True if this phase uses CPU or disk unless it hangs; False for a flush to a slow disk."""

    changed: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when the answer to Ctrl-C changes (`unsaved`), so that the launcher learns of it at once."""
    show: Callable[[str], None] = field(default=lambda phase: None, repr=False)
    """Called with each phase, for the status line."""

    def begin(self, doing: str, unsaved: int = 0, watched: bool = True, shown_as: str = "") -> None:
        """Enter a phase. All ranks enter the same phases in the same order.

        `shown_as` is what the status line shows of several short phases that follow one another.
        """
        is_other_kind = (bool(unsaved), watched) != (bool(self.unsaved), self.watched)
        self.show(shown_as or doing)
        self.doing, self.unsaved, self.watched = doing, unsaved, watched
        self.phase += 1
        if is_other_kind:  # not at every step: steps may take milliseconds
            self.changed.set()

    def advance(self) -> None:
        """Count that this rank now waits for the others."""
        self.phase += 1
