"""`output_dir/log.txt`: a run's messages with times, and those of libraries, which go nowhere else.

It is a handler of Python's logging, since that is where libraries log. Each record is one append to the file,
so several processes can write to it: the ranks and their launcher.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from simpletuner.credentials import mask_credentials

# The logger of `Report`. Not propagated: a library's root logger would print it again.
LOGGER = logging.getLogger("simpletuner")

MOST_KEPT = 1000
"""Records that are kept before it is known where to write."""

LOG = "log.txt"
CONSOLE = "console.txt"
"""Output of the run that has the folder, where a page has started it."""
# Beginning of the first entry of a start: what is above is of earlier ones.
STARTED = "started: "
# Output of a start from a page until it has the folder: a mistake in its settings is nowhere else.
START_CONSOLE = "console.start.txt"
# Flags for appending to a run's own files: symbolic links are not followed, and a FIFO is not waited for.
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK

# Characters that move the cursor, reverse text or cannot be printed: C0 and C1 controls except tab and
# newline, bidirectional marks, and the surrogates that stand for bytes of a file name that are not UTF-8.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Make text safe for terminals and logs, also where it has several lines."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


class RunLog(logging.Handler):
    """Append records to a file; those that come before `write_to` are kept for it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.flags = source, APPEND
        self.path: Path | None = None
        self.begun: int | None = None
        """The size of the file before this start, if this process may create it."""
        self.kept: list[logging.LogRecord] = []
        self.setFormatter(logging.Formatter("%(message)s"))

    def write_to(self, path: Path, create: bool, heading: str) -> None:
        """Write to a file from now on, first a heading, if there is one, above what was kept.

        Raises OSError where that cannot be; without `create`, only where the file exists.
        """
        self.path, self.flags = path, APPEND if create else APPEND & ~os.O_CREAT
        if create:
            descriptor = os.open(path, self.flags, 0o666)
            self.begun = os.fstat(descriptor).st_size
            os.close(descriptor)
        kept, self.kept = self.kept, []
        if heading:
            first = LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, heading, (), None)
            first.created = min([first.created, *(record.created for record in kept)])
            kept.insert(0, first)
        for record in kept:
            self.emit(record)

    def withdraw(self) -> None:
        """Cut off what this start has written, with a file of its own, and write nothing any more."""
        path, self.path = self.path, None
        with suppress(OSError):
            if path is not None and self.begun is not None:
                os.truncate(path, self.begun) if self.begun else path.unlink()

    def emit(self, record: logging.LogRecord) -> None:
        if self.path is None:
            self.kept = [*self.kept[-MOST_KEPT:], record]
            return
        with suppress(OSError):  # a full disk must not end a run because of its log
            # Opened for each record: the launcher's file is there only once its first rank has made it.
            descriptor = os.open(self.path, self.flags, 0o666)
            try:
                os.write(descriptor, self.line_of(record).encode(errors="backslashreplace"))
            finally:
                os.close(descriptor)

    def line_of(self, record: logging.LogRecord) -> str:
        """Return time, source where it is not rank 0's report, and text, whose further lines are indented."""
        time = logging.Formatter().formatTime(record, "%Y-%m-%d %H:%M:%S")
        names = [self.source, "" if record.name == LOGGER.name else f"{record.name}:"]
        text = escape_controls(mask_credentials(self.format(record))).strip("\n").replace("\n", "\n    ")
        return " ".join([time, *filter(None, names), text]) + "\n"


def start_run_log(source: str) -> None:
    """Take what is logged from now on, Python's warnings included, off the terminal.

    `source` names this process in the log, where it is not the first rank.
    """
    log = RunLog(source)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    for logger in (LOGGER, logging.getLogger()):
        logger.addHandler(log)
    logging.captureWarnings(True)


def write_log_to(path: Path, create: bool, heading: str = "") -> None:
    """Write what was logged so far, below a heading, and what will be, to a file. Raises OSError."""
    for log in logs_of(LOGGER):
        log.write_to(path, create, heading)


def withdraw_log() -> None:
    """Leave the file that is written to as it was before this start."""
    for log in logs_of(LOGGER):
        log.withdraw()


def take_over(logger_name: str) -> None:
    """Have a library's messages go to the log alone."""
    logger = logging.getLogger(logger_name)
    logger.handlers.clear()
    logger.propagate = True


def silence_torchao() -> None:
    """Drop what an import of torchao says: diffusers imports it wherever it is installed.

    Version 0.18 logs which of its CUDA kernels do not fit this machine, and registers enums as torch 2.13
    advises against; diffusers misses what it has renamed.
    """
    for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)


def stop_run_log() -> None:
    for logger in (LOGGER, logging.getLogger()):
        for log in logs_of(logger):
            logger.removeHandler(log)
    logging.captureWarnings(False)


def logs_of(logger: logging.Logger) -> list[RunLog]:
    return [handler for handler in logger.handlers if isinstance(handler, RunLog)]
