"""Kill runs at random moments, run the same command until it is done, and compare every file with an undisturbed run.

    .venv/bin/python tests/campaigns/kills.py --kills 300      # about an hour on 2 cores

Who is killed is drawn, too: all ranks at once, one rank, whose launcher must then end the others, or the launcher,
whose ranks must then end by themselves.
`tests/test_campaigns.py` runs a small sample.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import SMALL, Starter, fork_server_context  # noqa: E402
from flags import last_wins  # noqa: E402

from simpletuner.caches.shards import ShardReader  # noqa: E402
from simpletuner.checkpoints.layout import list_checkpoints, load_checkpoint  # noqa: E402

OLDEST_SECONDS = 15
"""How long a process of a killed run may live on."""
RANKS = 2
VICTIMS = {"group": 0.65, "one rank": 0.15, "launcher": 0.2}
TIMINGS = {"samples_per_second", "seconds", "data_seconds", "tflops_per_second"}
FLAGS = (
    "--fsdp_enable",
    "--train_batch_size=2",
    "--vae_batch_size=3",
    "--use_ema",
    "--checkpoint_step_interval=2",
    "--checkpoints_total_limit=3",
    "--validation_prompt=a red circle",
    "--validation_step_interval=4",
    "--validation_num_inference_steps=1",
    "--max_train_steps=10",
)


@dataclass
class Campaign:
    """Kills of one command; `problems` is empty if all promises held."""

    starter: Starter
    flags: tuple[str, ...]
    folder: Path
    random: random.Random
    problems: list[str] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)

    def run(self, kills: int, most_in_a_run: int = 8) -> None:
        """Kill that often, spread over several runs, each of which is compared in the end."""
        began = time.monotonic()
        reference = self.undisturbed()
        # a real launcher and its ranks import torch first, which warm ranks do not
        longest = {"group": time.monotonic() - began, "launched": 3 * (time.monotonic() - began) + 15}
        number = 0
        while (left := kills - sum(self.killed.values())) > 0:
            output = self.folder / f"run{number}"
            for _ in range(min(left, self.random.randint(1, most_in_a_run))):
                self.kill_once(output, longest)
            self.finish(output)
            self.compare(reference, contents(output), output)
            shutil.rmtree(output, ignore_errors=True)
            number += 1

    def undisturbed(self) -> dict[str, str]:
        """Return what a run leaves that nothing disturbed."""
        output = self.folder / "undisturbed"
        self.finish(output)
        found = contents(output)
        shutil.rmtree(output)
        return found

    def command(self, output: Path) -> tuple[str, ...]:
        """Return the flags of every start."""
        return tuple(last_wins((f"--output_dir={output}", *SMALL, *self.flags, *FLAGS)))

    def finish(self, output: Path) -> None:
        """Run the command to its end."""
        run = self.starter.train(RANKS, *self.command(output))
        if (codes := run.wait()) != [0] * RANKS:
            self.problems.append(f"{output.name} ended with {codes}:\n{run.said}")

    def kill_once(self, output: Path, longest: dict[str, float]) -> None:
        """Start the command, kill at a random moment, and look at what is left."""
        victim = self.random.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if victim == "group":
            left = self.kill_ranks(output, self.random.uniform(0.05, longest["group"]))
        else:
            left = self.kill_launched(output, self.random.uniform(0.5, longest["launched"]), victim)
        self.killed[victim] = self.killed.get(victim, 0) + 1
        if late := psutil.wait_procs(left, timeout=OLDEST_SECONDS)[1]:
            doing = self.abort(late)
            self.problems.append(f"{output.name}: {victim} killed, {len(late)} live {OLDEST_SECONDS} s on:\n{doing}")
            print(self.problems[-1], flush=True)
        for checkpoint in list_checkpoints(output / "checkpoints"):
            load_checkpoint(checkpoint)  # raises when one that can be seen is not whole

    def kill_ranks(self, output: Path, after: float) -> list[psutil.Process]:
        """Kill all warm ranks; return them."""
        run = self.starter.train(RANKS, *self.command(output))
        time.sleep(after)
        ranks = [psutil.Process(process.pid) for process in run.processes if process.is_alive()]
        run.kill()
        run.wait()
        return ranks

    def kill_launched(self, output: Path, after: float, victim: str) -> list[psutil.Process]:
        """Kill a real launcher, or one of its ranks; return all processes that should end then."""
        command = [str(Path(sys.executable).with_name("simpletuner")), "train", *self.command(output)]
        with (self.folder / "launched.log").open("wb") as log:
            launcher = psutil.Popen(
                [*command, f"--num_processes={RANKS}"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        end = time.monotonic() + after
        while time.monotonic() < end and launcher.poll() is None:
            time.sleep(0.01)
        if launcher.poll() is not None:
            return []
        processes = [launcher, *launcher.children(recursive=True)]
        ranks = [process for process in processes if is_rank(process)]
        (launcher if victim == "launcher" or not ranks else self.random.choice(ranks)).kill()
        return processes

    def abort(self, processes: list[psutil.Process]) -> str:
        """End processes that should have ended; return the log, where faulthandler writes what they were doing."""
        for process in processes:
            process.send_signal(signal.SIGABRT)
        psutil.wait_procs(processes, timeout=OLDEST_SECONDS)
        return (self.folder / "launched.log").read_text(errors="replace")

    def compare(self, wanted: dict[str, str], found: dict[str, str], output: Path) -> None:
        """Note every file that differs."""
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                how = "is missing" if name not in found else "is left behind" if name not in wanted else "differs"
                self.problems.append(f"{output.name}: {name} {how}")


def is_rank(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ()
    except psutil.Error:  # it has just ended
        return False


def contents(output: Path) -> dict[str, str]:
    """Return what stands for the content of every file of a run, without what may differ: times, names of shards."""
    found = {}
    for path in sorted(output.rglob("*")):
        name = path.relative_to(output).as_posix()
        if path.is_file() and not name.startswith("cache/") and path.name != ".lock":
            found[name] = READERS.get(path.name, tensors if path.suffix == ".safetensors" else whole)(path)
    for folder in sorted({path.parent for path in output.glob("cache/**/*.shard")}):
        reader = ShardReader(folder)
        for place in reader.records():
            record = reader.read(place)
            values = b"".join(record[name].numpy().tobytes() for name in sorted(record))
            found[f"{folder.relative_to(output)}:{place.name}"] = hashlib.sha256(values).hexdigest()
    return found


def tensors(path: Path) -> str:
    """Return a hash of the tensors in a file: the order of names in its header is not always the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def without_checksums(path: Path) -> str:
    """Return JSON without the checksums of files that need not be equal byte by byte."""
    value = json.loads(path.read_text())
    return json.dumps({name: item for name, item in value.items() if not name.startswith("checksum")})


def whole(path: Path) -> str:
    """Return a hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows_without_times(path: Path) -> str:
    """Return the rows of metrics."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return json.dumps([{name: value for name, value in row.items() if name not in TIMINGS} for row in rows])


def settings_without_folder(path: Path) -> str:
    """Return the settings."""
    return json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "output_dir"})


READERS: dict[str, Callable[[Path], str]] = {
    "metrics.jsonl": rows_without_times,
    "settings.json": settings_without_folder,
    "settings_history.jsonl": lambda path: "",
    "report.html": lambda path: "",
    "log.txt": lambda path: "",
    "durations.json": lambda path: "",
    "README.md": lambda path: "",  # a model card, with samples per second
    "state.json": without_checksums,
    "simpletuner.json": without_checksums,
}


def fixtures(folder: Path, starter: Starter, family: str = "sdxl") -> tuple[str, ...]:
    """Return the flags that name a base model and images, which are made first."""
    import ranks

    draw = Path(__file__).parent.parent.parent / "examples" / "shapes" / "draw.py"
    subprocess.run(
        [sys.executable, str(draw), str(folder / "shapes"), "--count", "36"], check=True, capture_output=True
    )
    builder = starter.context.Process(target=ranks.build_pipeline, args=(family, str(folder / "base")))
    builder.start()
    builder.join()
    named = f"--pretrained_model_name_or_path={folder / 'base'}"
    return (f"--model_family={family}", named, f"--instance_data_dir={folder / 'shapes'}")


def main() -> None:
    """Run a campaign in a temporary folder, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starter = Starter(fork_server_context(), folder)
        campaign = Campaign(starter, fixtures(folder, starter), folder, random.Random(given.seed))
        campaign.run(given.kills)
    print(f"{sum(campaign.killed.values())} kills {campaign.killed}: {len(campaign.problems)} problems")
    print("\n".join(campaign.problems))
    raise SystemExit(bool(campaign.problems))


if __name__ == "__main__":
    main()
