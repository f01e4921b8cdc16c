"""Whole tiny runs on real file systems as two machines see them, one row each (table of docs/nfs.md).

    python tests/campaigns/real/runs_on_mounts.py [glusterfs sshfs s3fs]

Node 0 trains, node 1 looks and starts a second run in the same folder, node 0 gets SIGTERM, node 1 goes on to the end.
Root only, with what `mounts.py --install` installs; one to eight minutes each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mounts
from launchers import PROGRAM, flags

WAIT_SECONDS = 600
COLUMNS = ("status on the other machine", "second run", "SIGTERM", "resumed on the other", "metrics")


class Nodes:
    """Two nodes: each has its own mount bound to one path, in a mount and UTS namespace of its own."""

    def __init__(self, views: mounts.Views, base: Path) -> None:
        self.views, self.base, self.share = views, base, base / "share"
        self.share.mkdir()

    def start(self, node: int, *words: str) -> subprocess.Popen[str]:
        script = f"mount --bind '{self.views[node]}' '{self.share}' && hostname node{node} && exec \"$@\""
        log = (self.base / f"log-{node}-{time.monotonic_ns()}").open("w+")
        command = ["unshare", "-m", "-u", "sh", "-c", script, "sh", PROGRAM, *words]
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)

    def train(self, node: int, steps: int) -> subprocess.Popen[str]:
        given = [each for each in flags(self.base) if not each.startswith(("--output_dir", "--max_train", "--fsdp"))]
        kept = ("--checkpoint_step_interval=4", "--checkpoints_total_limit=2", f"--max_train_steps={steps}")
        return self.start(node, "train", *given, *kept, f"--output_dir={self.share / 'out'}")

    def said(self, node: int) -> str:
        return max(self.base.glob(f"log-{node}-*")).read_text()

    def status(self, node: int) -> dict[str, str]:
        self.start(node, "status", str(self.share / "out"), "--json").wait(WAIT_SECONDS)
        with suppress(ValueError):
            return json.loads(self.said(node))
        return {}


def row(name: str, base: Path) -> list[str]:
    with mounts.SYSTEMS[name][1](base) as views:
        nodes, out = Nodes(views, base), views[1] / "out"
        first = nodes.train(0, 100_000)
        while nodes.status(1).get("state") != "running" or nodes.status(1).get("step", 0) < 5:  # type: ignore[operator]
            assert first.poll() is None, nodes.said(0)
        found = [str(nodes.status(1)["state"]), str(nodes.train(1, 100_000).wait(WAIT_SECONDS))]
        os.killpg(first.pid, signal.SIGTERM)
        found.append(str(first.wait(WAIT_SECONDS)))
        steps = rows_of(views[0] / "out") + 6
        found.append(str(nodes.train(1, steps).wait(WAIT_SECONDS)))
        assert (out / "pipeline" / "model_index.json").exists(), nodes.said(1)
        return [*found, "each step once" if rows_of(out) == steps else f"{rows_of(out)} of {steps} steps"]


def rows_of(out: Path) -> int:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return len({each["step"] for each in lines if "loss" in each})


def main(names: list[str]) -> int:
    mounts.in_namespace(names, __file__)
    for variable in ("AWS_CA_BUNDLE", "SIMPLETUNER_IN_NAMESPACE"):  # as in mounts.py; and what is no setting
        os.environ.pop(variable, None)
    print(f"| {time.strftime('%Y-%m-%d')} | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    failed = 0
    for name in names or ("glusterfs", "sshfs", "s3fs"):
        base = Path(tempfile.mkdtemp(prefix="simpletuner-runs-", dir="/var/tmp"))
        try:
            answers = row(name, base)
            failed |= answers != ["running", "3", "143", "0", "each step once"]
        except (mounts.CannotMount, AssertionError) as why:
            answers, failed = [f"failed: {why}"], 1
        finally:
            shutil.rmtree(base, ignore_errors=True)
        print(f"| {name} {mounts.version_of(mounts.SYSTEMS[name][0])} | {' | '.join(answers)} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
