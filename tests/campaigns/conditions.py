"""Run on machines that are not as they should be, once each, and go on where they are; compare as `kills.py` does.

    .venv/bin/python tests/campaigns/conditions.py --count=50 --results=conditions.jsonl
    .venv/bin/python tests/campaigns/conditions.py --condition="full disk" --kind=masks --seed=3

A disk or its inodes are full, memory is limited, /dev/shm is missing, HOME cannot be written, clocks jump, a rank is
stopped for a minute, or the network is cut for a while. No run may hang, call it a bug or end without a sentence, and
the same command must then end with the files of an undisturbed run. Needs root, for mounts and namespaces, and
libfaketime of Debian and gcc for clocks. `tests/end_to_end/test_campaigns.py` runs a sample.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import Starter, fork_server_context  # noqa: E402
from kills import FIXTURES, HANG_SECONDS, KINDS, Campaign, contents, is_rank  # noqa: E402
from results import add_result, read_results  # noqa: E402

CODES = frozenset({0, 3, 5})
"""Exit codes of ranks: they went on, or said that something is missing, or that another rank has ended."""
GOOD = ("went on", "refused", "crashed in a library")
STEPS = 12
"""Enough for a clock that jumps, a rank that stops and a network that is cut to come before the last one."""
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of unshare(2)
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
JUMPS = ("+0", "+400d", "-400d", "+1h", "-2h", "-30s")
SLEEP = """
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}
"""
"""libfaketime 0.9.10 answers EINVAL to each `time.sleep` of Python 3.11 where it leaves the monotonic clock alone."""


@dataclass
class Conditions:
    """Runs of one kind under each condition; `problems` is empty if all promises held."""

    campaign: Campaign
    stop_seconds: float = 60.0
    wanted: dict[str, str] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def problems(self) -> list[str]:
        return self.campaign.problems

    def run(self, condition: str, seed: int) -> dict[str, object]:
        """Run once under a condition, and again without it; return how it went."""
        self.wanted = self.wanted or self.campaign.undisturbed()
        draw, told = random.Random(f"{condition} {seed}"), len(self.problems)
        with self.folder() as folder:
            output = folder / "run"
            codes, said = CONDITIONS[condition](self, folder, draw)
            # Under a limit of memory oneDNN and others abort, or write to address 0.
            crashes = condition == "little memory" and min(codes) < 0
            verdict = "crashed in a library" if crashes else judge(codes, said)
            self.answers[verdict] += 1
            if verdict not in GOOD:
                self.problems.append(f"{condition} {seed}: {verdict} {codes}\n{said}")
            if folder.is_mount():
                subprocess.run(["mount", "-o", "remount,size=2g,nr_inodes=200k", str(folder)], check=True)
            self.campaign.finish(output)
            for path in output.glob("flight_recorder_rank_*"):  # for whoever looks for the reason of a stall
                path.unlink()
            self.campaign.compare(self.wanted, contents(output), output)
        row = {"condition": condition, "seed": seed, "verdict": verdict, "said": sentence_of(said)}
        return {**row, "problems": self.problems[told:]}

    @contextmanager
    def folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self.campaign.folder))
        try:
            yield folder
        finally:
            if folder.is_mount():
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
            shutil.rmtree(folder)

    def ranks(self, folder: Path, setup: str = "", value: str = "") -> tuple[list[int], str]:
        """Run warm ranks, each of which calls `setup` first; return their exit codes and what they said."""
        arguments = ["train", *self.campaign.command(folder / "run")]
        run = self.campaign.starter.start(prepared, self.campaign.kind.ranks, setup, value, arguments)
        return run.wait(HANG_SECONDS), run.said

    def launched(
        self, folder: Path, disturb: Callable[[psutil.Popen], None], *before: str, **variables: str
    ) -> tuple[list[int], str]:
        """Start the real command and its ranks, and call `disturb`."""
        program = [str(Path(sys.executable).with_name("simpletuner")), "train"]
        command = [*before, *program, *self.campaign.command(folder / "run"), "--num_processes=2"]
        log = folder / "launched.log"
        with log.open("wb") as file:
            launcher = psutil.Popen(command, stdout=file, stderr=file, env={**os.environ, **variables})
        disturb(launcher)
        return [launcher.wait(HANG_SECONDS)], log.read_text(errors="replace")


def trains(launcher: psutil.Popen, folder: Path) -> bool:
    """Wait for the first checkpoint; return False if the run has ended before."""
    end = time.monotonic() + HANG_SECONDS
    while not any(folder.glob("run/checkpoints/checkpoint-*")) and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    return launcher.poll() is None


def judge(codes: list[int], said: str) -> str:
    if "this is a bug" in said or "Traceback" in said:
        return "BUG"
    if not set(codes) <= CODES:
        return "WRONG EXIT CODE"
    if set(codes) == {0}:
        return "went on"
    return "refused" if "error: " in said and "hint: " in said else "NO SENTENCE"


def sentence_of(said: str) -> str:
    """Return the first error of what a run said."""
    return next((line for line in said.splitlines() if line.startswith("error: ")), "")


def prepared(setup: str, value: str, arguments: list[str]) -> None:
    """Change the machine as this process sees it, and run the command line."""
    import ranks

    if setup:
        SETUPS[setup](value)
    ranks.command_line(arguments)


def limit_memory(mebibytes: str) -> None:
    """Leave this much address space to what has torch loaded."""
    limit = psutil.Process().memory_info().vms + (int(mebibytes) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def hide_shared_memory(_: str) -> None:
    private_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", "/dev/shm"], check=True)


def lock_home(folder: str) -> None:
    private_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=True)
    os.environ.pop("SIMPLETUNER_HOME", None)
    os.environ["HOME"] = folder


def private_mounts() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


SETUPS: dict[str, Callable[[str], None]] = {
    "limit memory": limit_memory,
    "hide shared memory": hide_shared_memory,
    "lock home": lock_home,
}


def full_disk(trial: Conditions, folder: Path, draw: random.Random) -> tuple[list[int], str]:
    return on_tmpfs(trial, folder, f"size={draw.randint(1, 24_000)}k")


def no_inodes(trial: Conditions, folder: Path, draw: random.Random) -> tuple[list[int], str]:
    return on_tmpfs(trial, folder, f"nr_inodes={draw.randint(3, 90)}")


def on_tmpfs(trial: Conditions, folder: Path, options: str) -> tuple[list[int], str]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    return trial.ranks(folder)


def little_memory(trial: Conditions, folder: Path, draw: random.Random) -> tuple[list[int], str]:
    return trial.ranks(folder, "limit memory", str(draw.randint(1, 600)))


def no_shared_memory(trial: Conditions, folder: Path, _: random.Random) -> tuple[list[int], str]:
    return trial.ranks(folder, "hide shared memory")


def locked_home(trial: Conditions, folder: Path, _: random.Random) -> tuple[list[int], str]:
    (home := folder / "home").mkdir()
    return trial.ranks(folder, "lock home", str(home))


def jumping_clock(trial: Conditions, folder: Path, draw: random.Random) -> tuple[list[int], str]:
    """The wall clock jumps from start to end; the monotonic one does not, as on a machine whose clock is set."""
    (clock := folder / "clock").write_text("+0")
    (source := folder / "sleep.c").write_text(SLEEP)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(folder / "sleep.so"), str(source)], check=True)
    preload = f"{folder / 'sleep.so'} {FAKETIME}"
    faked = {"LD_PRELOAD": preload, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}

    def jump(launcher: psutil.Popen) -> None:
        while launcher.poll() is None:
            (new := folder / "new").write_text(draw.choice(JUMPS))
            new.replace(clock)  # never an empty file
            time.sleep(0.3)

    return trial.launched(folder, jump, **faked, FAKETIME_DONT_FAKE_MONOTONIC="1")


def stopped_rank(trial: Conditions, folder: Path, draw: random.Random) -> tuple[list[int], str]:
    def stop(launcher: psutil.Popen) -> None:
        if trains(launcher, folder) and (
            ranks := [each for each in launcher.children(recursive=True) if is_rank(each)]
        ):
            rank = draw.choice(ranks)
            rank.send_signal(signal.SIGSTOP)
            time.sleep(trial.stop_seconds)
            with suppress(psutil.NoSuchProcess):  # the others took it for dead
                rank.send_signal(signal.SIGCONT)

    return trial.launched(folder, stop)


def cut_network(trial: Conditions, folder: Path, draw: random.Random) -> tuple[list[int], str]:
    """The loopback device of a namespace of its own is down for a while: what ranks send one another is lost."""
    seconds = draw.uniform(1, 20)

    def cut(launcher: psutil.Popen) -> None:
        assert trains(launcher, folder)
        link = ["nsenter", "--net", f"--target={launcher.pid}", "ip", "link", "set", "lo"]
        subprocess.run([*link, "down"], check=True)
        time.sleep(seconds)
        if launcher.poll() is None:
            subprocess.run([*link, "up"], check=True)

    return trial.launched(folder, cut, "unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


CONDITIONS: dict[str, Callable[[Conditions, Path, random.Random], tuple[list[int], str]]] = {
    "full disk": full_disk,
    "no inodes": no_inodes,
    "little memory": little_memory,
    "no shared memory": no_shared_memory,
    "locked home": locked_home,
    "jumping clock": jumping_clock,
    "stopped rank": stopped_rank,
    "cut network": cut_network,
}
DEFAULT_KINDS = ("fsdp2", "zero2", "int8", "masks", "pairs")


def main() -> None:
    """Run a campaign in a temporary folder, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="runs of all conditions and kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="one of several; default: five of them")
    parser.add_argument("--condition", choices=CONDITIONS, action="append", help="one of several; default: all")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    kinds, conditions = given.kind or DEFAULT_KINDS, given.condition or list(CONDITIONS)
    each = max(1, given.count // (len(kinds) * len(conditions)))
    with tempfile.TemporaryDirectory() as name:
        results = given.results or Path(name) / "results.jsonl"
        starter, made = Starter(fork_server_context(), Path(name)), dict[str, tuple[str, ...]]()
        for kind in kinds:
            if (media := KINDS[kind].media) not in made:
                made[media] = FIXTURES[media](Path(name), starter)
            (folder := Path(name) / kind).mkdir()
            trial = Conditions(Campaign(starter, made[media], folder, KINDS[kind], steps=STEPS))
            done = {(row["condition"], row["seed"]) for row in read_results(results) if row["kind"] == kind}
            for condition in conditions:
                for seed in range(given.seed, given.seed + each):
                    if (condition, seed) not in done:
                        add_result(results, row := {"kind": kind, **trial.run(condition, seed)})
                        print(json.dumps(row), flush=True)
        rows = read_results(results)
    problems = [problem for row in rows for problem in row["problems"]]
    print(f"{len(rows)} runs {dict(Counter(row['verdict'] for row in rows))}: {len(problems)} problems")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
