from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nfs_node
import pytest
from forked_launcher import ForkedProcess
from nfs_recorded import LOCAL_ROOT, NFS4
from patience import PATIENCE

ROOT = Path(__file__).parents[3]
NODE = ROOT / "tests" / "support" / "nfs_node.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Ended:
    """What one node printed and how it ended."""

    code: int
    said: str
    result: dict[str, Any]

    def __getitem__(self, check: str) -> dict[str, Any]:
        return next(finding for finding in self.result["checks"] if finding["check"] == check)

    def statuses(self) -> dict[str, str]:
        return {finding["check"]: finding["status"] for finding in self.result["checks"]}


class ForkedNode(ForkedProcess):
    """A forked node; what it prints is in files."""

    def __init__(self, process: Any, printed: tuple[Path, Path]) -> None:
        super().__init__(process)
        self.printed = printed

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self.printed)
        return out, err


@dataclass
class Nodes:
    """Start nodes on one folder, each a process; without further wishes they believe that it is mounted by NFS."""

    path: Path
    mountinfo: Path
    folder: Path
    fork_server: Any
    running: list[subprocess.Popen[str] | ForkedNode] = field(default_factory=list)

    def start(
        self, rank: int = 0, nodes: int = 2, before: tuple[str, ...] = (), **wish: Any
    ) -> subprocess.Popen[str] | ForkedNode:
        given = {"path": str(self.path), "rank": rank, "nodes": nodes, "timeout_seconds": 20}
        given |= {"mountinfo": str(self.mountinfo), **wish}
        if not before:
            return self.fork(given)
        command = [*before, sys.executable, str(NODE), json.dumps(given)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd="/"
        )
        self.running.append(process)
        return process

    def fork(self, given: dict[str, Any]) -> ForkedNode:
        """Start a node without its interpreter, which would take 0.25 of its 0.3 CPU seconds."""
        out, err = (self.folder / f"node-{len(self.running)}.{name}" for name in ("out", "err"))
        process = self.fork_server.Process(target=nfs_node.forked, args=(given, str(out), str(err)))
        process.start()
        self.running.append(node := ForkedNode(process, (out, err)))
        return node

    def check(self, *wishes: dict[str, Any], **common: Any) -> list[Ended]:
        """Start one node for each wish, and return how they ended."""
        count = len(wishes)
        started = [self.start(rank, count, **{**common, **wish}) for rank, wish in enumerate(wishes)]
        return [ended(process) for process in started]

    def end(self, process: subprocess.Popen[str] | ForkedNode) -> Ended:
        return ended(process)

    def left_behind(self) -> list[Path]:
        return sorted(self.path.rglob("*")) if self.path.exists() else []


def ended(process: subprocess.Popen[str] | ForkedNode) -> Ended:
    out, err = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode or 0, err, json.loads(out) if out else {})


@pytest.fixture
def nodes(tmp_path, fork_server) -> Iterator[Nodes]:
    path = tmp_path / "output"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"{LOCAL_ROOT}\n{NFS4.format(path=path)}\n")
    yield from running(Nodes(path, mountinfo, tmp_path, fork_server))


def running(started: Nodes) -> Iterator[Nodes]:
    """End what a test has started."""
    yield started
    for process in started.running:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def open_nodes(tmp_path, fork_server) -> Iterator[Nodes]:
    """Nodes on a folder that every user reaches; pytest's own are for one."""
    top = Path(tempfile.mkdtemp(prefix="simpletuner-nfs-"))
    path, mountinfo = top / "output", top / "mountinfo"
    path.mkdir()
    mountinfo.write_text(f"{LOCAL_ROOT}\n{NFS4.format(path=path)}\n")
    for open_to_all in (top, path):
        open_to_all.chmod(0o777)
    yield from running(Nodes(path, mountinfo, tmp_path, fork_server))
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture
def mounted(tmp_path):
    """Mount something for the length of a test; skips where that is not allowed."""
    points: list[Path] = []

    def mount(point: Path, *arguments: str) -> Path:
        point.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        points.append(point)
        return point

    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    yield mount
    for point in points:
        subprocess.run(["umount", str(point)], check=True)
