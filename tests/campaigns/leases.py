"""Two writers on two machines want one place, and one is stopped, cut off or killed: who writes, and who is told?

    .venv/bin/python tests/campaigns/leases.py --count=200    # an hour; installs stores that are missing
    .venv/bin/python tests/campaigns/leases.py --count=40 --grounds=disk,bindfs,sshfs,s3fs,bucket,ignoring

Each writer checks its lease and then notes the time and its token. What was written by a lower token after a higher one
began is lost; a writer that was replaced and did not end with a sentence is silent. `disk` is a folder in which each
machine has its own table of locks; `ignoring` a bucket that creates what is there; the stores are those of
`real/stores.py`. `rclone-mount` runs by its name alone, since nothing decides there: a machine that has written a file
goes on reading its own, and in 5 of 6 trials two held one place. Mounts need root, and what
`tests/support/real_mounts.py` runs. `tests/end_to_end/test_campaigns.py` runs a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in (".", "support", "campaigns/real")]

from buckets_here import bucket_server  # noqa: E402
from installing import NotHere  # noqa: E402
from lease_holders import ForeignHolder  # noqa: E402
from real_mounts import CannotMount, mounted, sshfs_views  # noqa: E402
from s3_server import BUCKET  # noqa: E402
from stores import STORES  # noqa: E402

MACHINES = "abc"
PATIENCE = 120.0
RCLONE_FLAGS = ("--dir-cache-time=1s", "--vfs-write-back=100ms")
"""Of an rclone that is as much less late as beats are shorter; by default it lists after 5 min and writes after 5 s."""
BUCKETS = ("bucket", "ignoring", *STORES)
GROUNDS = {
    "disk": (0.3, 0.3),
    "bindfs": (0.3, 0.5),
    "sshfs": (0.3, 1.0),
    "s3fs": (1.0, 6.0),
    "rclone-mount": (1.0, 6.0),
}
GROUNDS |= dict.fromkeys(BUCKETS, (0.3, 1.0))
"""Seconds between two beats, and by which a place may be late; those of real runs are a minute, in which no trial would
end."""


@dataclass
class Ground:
    """A place as each machine sees it; `cut` stops the network of the first one until it is called again with False."""

    name: str
    views: list[str]
    seconds: float
    late: float
    cut: Callable[[bool], None] | None = None

    def place(self, number: int, view: int) -> str:
        place = f"{self.views[view]}/trial-{number}"
        if "://" not in place:
            Path(place).mkdir(exist_ok=True)
        return place


@dataclass
class Trial:
    """Writers of one place, and what was wrong with them."""

    ground: Ground
    number: int
    seed: int
    folder: Path
    holders: list[ForeignHolder] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lines: list[tuple[ForeignHolder, str]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.ground.name}-{self.number}.log"

    def start(self, machine: str) -> ForeignHolder:
        place = self.ground.place(self.number, MACHINES.index(machine))
        holder = ForeignHolder(place, machine, self.ground.seconds, self.ground.late, self.log)
        self.holders.append(holder)
        return holder

    def said(self, holder: ForeignHolder, *wanted: str) -> str:
        """Return the next line that begins with one of `wanted`; empty where the process ended before."""
        while line := holder.says():
            self.lines.append((holder, line))
            if line.startswith(wanted):
                return line
        return ""

    def expect(self, holder: ForeignHolder, *wanted: str) -> None:
        if not self.said(holder, *wanted):
            self.problems.append(f"no {' or '.join(wanted)}: {[line for each, line in self.lines if each is holder]}")

    def run(self) -> str:
        rng = random.Random(f"{self.ground.name} {self.seed} {self.number}")
        kinds = ["refused", "stopped", "stopped", "short", "killed", "clocks", *["cut"] * bool(self.ground.cut)]
        kind = kinds[self.number % len(kinds)]
        try:
            first = self.start("a")
            self.expect(first, "wrote")
            time.sleep(rng.uniform(0, self.ground.seconds))
            getattr(self, kind)(first, rng)
        finally:
            self.end()
        self.judge()
        return kind

    def refused(self, first: ForeignHolder, rng: random.Random) -> None:
        second = self.start("b")
        self.expect(second, "LeaseLost: another run is using")
        self.expect_code(second)

    def clocks(self, first: ForeignHolder, rng: random.Random) -> None:
        """The times of the record's file are an hour off, again and again."""
        second, shift = self.start("b"), rng.choice([-3600, 3600])
        record = Path(self.ground.place(self.number, 1), ".lock")
        while second.poll() is None:
            with suppress(OSError):  # a bucket has no such times
                os.utime(record, (time.time() + shift, time.time() + shift))
            time.sleep(0.05)
        self.expect(second, "LeaseLost: another run is using")

    def short(self, first: ForeignHolder, rng: random.Random) -> None:
        """Stopped for less than a holder lives: it goes on."""
        os.kill(first.pid, signal.SIGSTOP)
        second = self.start("b")
        time.sleep(rng.uniform(0, self.ground.seconds))
        os.kill(first.pid, signal.SIGCONT)
        self.expect(second, "LeaseLost: another run is using")
        if first.poll() is not None:
            self.problems.append("the first one ended")

    def stopped(self, first: ForeignHolder, rng: random.Random) -> None:
        os.kill(first.pid, signal.SIGSTOP)
        self.take_over(2)
        time.sleep(rng.uniform(0, 2 * self.ground.seconds))
        os.kill(first.pid, signal.SIGCONT)
        self.expect(first, "LeaseLost: another run")
        self.expect_code(first)

    def killed(self, first: ForeignHolder, rng: random.Random) -> None:
        first.kill()
        self.take_over(2)

    def cut(self, first: ForeignHolder, rng: random.Random) -> None:
        assert self.ground.cut is not None
        self.ground.cut(True)
        try:
            self.take_over(1)
            time.sleep(rng.uniform(0, 2 * self.ground.seconds))
        finally:
            self.ground.cut(False)
        self.expect(first, "LeaseLost: another run", "OSError")
        self.expect_code(first)

    def take_over(self, count: int) -> None:
        """Let several machines wait for the place, of which one gets it."""
        waiting = [self.start(machine) for machine in "bc"[:count]]
        said = [self.said(each, "held", "LeaseLost") for each in waiting]
        winners = [each for each, line in zip(waiting, said, strict=True) if line.startswith("held")]
        if len(winners) != 1:
            self.problems.append(f"{len(winners)} took over: {said}")
        for each in winners:
            self.expect(each, "wrote")

    def expect_code(self, holder: ForeignHolder) -> None:
        with suppress(subprocess.TimeoutExpired):
            if holder.wait(PATIENCE) == 3:
                return
        self.problems.append(f"silent: exit code {holder.returncode}")

    def end(self) -> None:
        for each in self.holders:
            each.kill()
            with suppress(subprocess.TimeoutExpired):
                each.wait(PATIENCE)
            if each.stdout is not None:
                each.stdout.close()

    def judge(self) -> None:
        rows = sorted((float(time), int(token)) for time, _, token in map(str.split, self.log.read_text().splitlines()))
        highest = 0
        for _, token in rows:
            if token < highest:
                self.problems.append(f"lost: token {token} wrote after {highest}")
                return
            highest = max(highest, token)


@contextmanager
def ground_named(name: str, base: Path) -> Iterator[Ground]:
    """Mount or serve a place. Raises what `real_mounts` raises where that is not possible here."""
    base.mkdir()
    with ExitStack() as stack:
        if name in MOUNTS:
            views = stack.enter_context(MOUNTS[name](base))
            yield Ground(name, [str(each) for each in views], *GROUNDS[name], cut_of(views[0]))
            return
        place = str(base)
        if name in STORES:
            place, variables = stack.enter_context(STORES[name][1](base, True))
            stack.enter_context(patch.dict(os.environ, variables))
        elif name in BUCKETS:
            proxy, _ = stack.enter_context(bucket_server(base))
            proxy.drops_conditions = name == "ignoring"
            place = f"s3://{BUCKET}/leases"
        yield Ground(name, [place] * len(MACHINES), *GROUNDS[name])


@contextmanager
def bindfs_views(base: Path) -> Iterator[list[Path]]:
    (base / "below").mkdir()
    with ExitStack() as stack:
        views = [base / f"view{number}" for number in range(len(MACHINES))]
        yield [stack.enter_context(mounted(each, "bindfs", str(base / "below"), str(each))) for each in views]


@contextmanager
def s3fs_views(base: Path) -> Iterator[list[Path]]:
    passwords = base / "passwords"
    passwords.write_text("A:hidden7\n")
    passwords.chmod(0o600)
    with bucket_server(base) as (proxy, _), ExitStack() as stack:
        given = f"passwd_file={passwords},url={proxy.server},use_path_request_style"
        views = [base / f"view{number}" for number in range(len(MACHINES))]
        yield [stack.enter_context(mounted(each, "s3fs", BUCKET, str(each), "-o", given)) for each in views]


@contextmanager
def rclone_views(base: Path) -> Iterator[list[Path]]:
    with bucket_server(base) as (proxy, _), ExitStack() as stack:
        store = f":s3,provider=Other,access_key_id=A,secret_access_key=hidden7,endpoint='{proxy.server}':{BUCKET}"
        command = ("rclone", "mount", "--daemon", "--vfs-cache-mode=full", *RCLONE_FLAGS)
        views = [base / f"view{number}" for number in range(len(MACHINES))]
        yield [
            stack.enter_context(mounted(each, *command, f"--cache-dir={each}.cache", store, str(each)))
            for each in views
        ]


MOUNTS = {"sshfs": partial(sshfs_views, count=len(MACHINES)), "bindfs": bindfs_views, "s3fs": s3fs_views}
MOUNTS["rclone-mount"] = rclone_views


def cut_of(view: Path) -> Callable[[bool], None]:
    """Return what stops, and lets go on, the process that serves a mount."""
    found = [
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdigit() and str(view).encode() in read_or_empty(each / "cmdline").split(b"\0")
    ]

    def cut(stopped: bool) -> None:
        for pid in found:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    return cut


def read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def run_trials(name: str, numbers: range, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Return how many trials of each kind ran on a ground, and what was wrong."""
    kinds, problems = Counter[str](), []
    with ground_named(name, folder / name) as ground:
        for number in numbers:
            trial = Trial(ground, number, seed, folder)
            kind = trial.run()
            kinds[kind] += 1
            problems += [f"{name} {number} ({kind}): {each}" for each in trial.problems]
            for each in trial.problems:
                print(f"{name} {number} ({kind}): {each}", file=sys.stderr, flush=True)
    return kinds, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="trials, over all grounds")
    parser.add_argument("--grounds", default=",".join(name for name in GROUNDS if name != "rclone-mount"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    names, wrong = arguments.grounds.split(","), 0
    with tempfile.TemporaryDirectory(prefix="leases-") as folder:
        for name in names:
            try:
                kinds, problems = run_trials(
                    name, range(-(-arguments.count // len(names))), arguments.seed, Path(folder)
                )
            except (CannotMount, NotHere) as why:
                print(f"{name}: {why}", file=sys.stderr, flush=True)
                continue
            lost, silent = (sum(what in each for each in problems) for what in ("lost:", "silent:"))
            row = {"ground": name, "trials": kinds.total(), "lost": lost, "silent": silent, "other": len(problems)}
            print(json.dumps({**row, "other": len(problems) - lost - silent, "kinds": dict(kinds)}), flush=True)
            wrong += len(problems)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
