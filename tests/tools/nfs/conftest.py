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

import pytest
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


@dataclass
class Nodes:
    """Start nodes on one folder, each a process; without further wishes they believe that it is mounted by NFS."""

    path: Path
    mountinfo: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, rank: int = 0, nodes: int = 2, before: tuple[str, ...] = (), **wish: Any) -> subprocess.Popen[str]:
        given = {"path": str(self.path), "rank": rank, "nodes": nodes, "timeout_seconds": 20}
        given |= {"mountinfo": str(self.mountinfo), **wish}
        command = [*before, sys.executable, str(NODE), json.dumps(given)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd="/"
        )
        self.running.append(process)
        return process

    def check(self, *wishes: dict[str, Any], **common: Any) -> list[Ended]:
        """Start one node for each wish, and return how they ended."""
        count = len(wishes)
        started = [self.start(rank, count, **{**common, **wish}) for rank, wish in enumerate(wishes)]
        return [ended(process) for process in started]

    def end(self, process: subprocess.Popen[str]) -> Ended:
        return ended(process)

    def left_behind(self) -> list[Path]:
        return sorted(self.path.rglob("*")) if self.path.exists() else []


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode, err, json.loads(out) if out else {})


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    path = tmp_path / "output"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"{LOCAL_ROOT}\n{NFS4.format(path=path)}\n")
    yield from running(Nodes(path, mountinfo))


def running(started: Nodes) -> Iterator[Nodes]:
    """End what a test has started."""
    yield started
    for process in started.running:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def open_nodes() -> Iterator[Nodes]:
    """Nodes on a folder that every user reaches; pytest's own are for one."""
    top = Path(tempfile.mkdtemp(prefix="simpletuner-nfs-"))
    path, mountinfo = top / "output", top / "mountinfo"
    path.mkdir()
    mountinfo.write_text(f"{LOCAL_ROOT}\n{NFS4.format(path=path)}\n")
    for open_to_all in (top, path):
        open_to_all.chmod(0o777)
    yield from running(Nodes(path, mountinfo))
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
