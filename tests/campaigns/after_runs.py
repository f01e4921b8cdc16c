"""Kill commands that make something of a finished run, or fill their disk; compare what they make at the next call.

    .venv/bin/python tests/campaigns/after_runs.py --count=100 --results=after_runs.jsonl
    .venv/bin/python tests/campaigns/after_runs.py --command=sample --count=20 --seed=3

`runs export` and `lora merge` in another precision, `lora resize`, `lora average`, and `sample` with an image. What a
killed command leaves is a whole result or none; one on a full disk says so in a sentence; the same command then makes
what an undisturbed one makes, and nothing is left beside it. Needs root, for mounts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

import ranks  # noqa: E402
from conftest import SMALL, Starter, fork_server_context  # noqa: E402
from flags import last_wins  # noqa: E402
from kills import HANG_SECONDS, contents, pair_fixtures  # noqa: E402
from results import add_result, read_results  # noqa: E402

TRAINED = ("--model_type=lora", "--lora_rank=4", "--checkpoint_step_interval=1", "--max_train_steps=2")
NEWEST = "checkpoint-000002"
SAMPLED = ("--prompt=edit it", "--size=64", "--steps=2", "--seed=1", "--use_cpu")


@dataclass
class Commands:
    """A finished run, and commands that write to a folder `result`; `problems` is empty if all promises held."""

    starter: Starter
    folder: Path
    base: str = ""
    commands: dict[str, list[str]] = field(default_factory=dict)
    wanted: dict[str, tuple[list[str], float]] = field(default_factory=dict)
    """Hashes of what each command makes, sorted, and the seconds that it takes."""

    def prepare(self) -> None:
        flags = pair_fixtures(self.folder, self.starter)
        run, base = self.folder / "run", flags[1].partition("=")[2]
        train = last_wins((f"--output_dir={run}", *SMALL, *flags, *TRAINED))
        started = self.starter.train(1, *train)
        assert started.wait(HANG_SECONDS) == [0], started.said
        lora, of_base = str(run / "pipeline_lora_weights"), flags[1]
        image = next((self.folder / "paired" / "beside").glob("*.png"))
        self.commands = {
            "export": [
                "runs",
                "export",
                str(run),
                "--checkpoint=checkpoint-000002",
                "--export_precision=fp16",
                of_base,
            ],
            "merge": ["lora", "merge", base, lora, "--export_precision=float8", "--force"],
            "resize": ["lora", "resize", lora, "--rank=1", "--force"],
            "average": ["lora", "average", str(run), of_base, "--force"],
            "sample": ["sample", str(run), *SAMPLED, of_base, f"--image={image}"],
        }

    def trial(self, command: str, number: int, seed: int) -> dict[str, object]:
        """Disturb a command once, and let it run again; return how it went."""
        draw, problems = random.Random(f"{command} {number} {seed}"), list[str]()
        if command not in self.wanted:
            with self.place("size=1g") as place:
                began = time.monotonic()
                code, said = self.run(command, place)
                assert code == 0, said
                self.wanted[command] = made(place), time.monotonic() - began
        hashes, seconds = self.wanted[command]
        is_full = draw.random() < 0.5
        with self.place(f"size={draw.randint(4, 1200)}k" if is_full else "size=1g") as place:
            code, said = self.run(command, place, None if is_full else draw.uniform(0, seconds))
            if is_full and code not in (0, 3):
                problems.append(f"ended with {code}: {said}")
            left = made(place, hidden=False)
            if left and left != hashes:
                problems.append(f"left a half result: {left}")
            subprocess.run(["mount", "-o", "remount,size=1g", str(place)], check=True)
            if command == "export" and left:  # which replaces nothing
                code = 0
            else:
                code, said = self.run(command, place)
            if code or (found := made(place)) not in (hashes, 2 * hashes):  # sample keeps what is there
                problems.append(f"again: {code}, {said if code else found}")
        how = "full disk" if is_full else "kill"
        return {"command": command, "number": number, "seed": seed, "how": how, "problems": problems}

    def run(self, command: str, place: Path, kill_after: float | None = None) -> tuple[int | None, str]:
        started = self.starter.start(ranks.command_line, 1, [*self.commands[command], f"--output={place / 'result'}"])
        if kill_after is not None:
            started.processes[0].join(kill_after)
            started.kill()
        return started.wait(HANG_SECONDS)[0], " ".join(started.said.split())[-600:]

    @contextmanager
    def place(self, options: str) -> Iterator[Path]:
        place = Path(tempfile.mkdtemp(dir=self.folder))
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)


def made(place: Path, hidden: bool = True) -> list[str]:
    """Return the hashes of all files below a folder; without those that a killed command has not named yet."""
    found = contents(place)
    return sorted(each for name, each in found.items() if hidden or not f"/{name}".count("/."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("export", "merge", "resize", "average", "sample")
    parser.add_argument("--command", choices=names, action="append", help="one of several; default: all")
    parser.add_argument("--count", type=int, default=50, help="trials of all commands together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    chosen = given.command or names
    with tempfile.TemporaryDirectory() as name:
        results = given.results or Path(name) / "results.jsonl"
        campaign = Commands(Starter(fork_server_context(), Path(name)), Path(name))
        campaign.prepare()
        for number in range(len(read_results(results)), given.count):
            row = campaign.trial(chosen[number % len(chosen)], number, given.seed)
            add_result(results, row)
            print(json.dumps(row), flush=True)
        rows = read_results(results)
    problems = [problem for row in rows for problem in row["problems"]]
    print(f"{len(rows)} trials, {len(problems)} problems", *problems, sep="\n")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
