"""Command lines of Python processes that this program starts: ranks, runs, detection, checks and uploads."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a separate process of this interpreter."""
    # -P: `python -m` would import from the current folder first, so that a user's queue.py or typing.py would
    # run in the place of a library. -u: what it prints is seen at once.
    return [sys.executable, "-P", "-u", "-m", module, *arguments]
