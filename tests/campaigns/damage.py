"""Damage one file at a time, run the same command, and see that it goes on rightly or says what is wrong.

    .venv/bin/python tests/campaigns/damage.py --cases 2000      # about 30 minutes on 2 cores

Files of an output folder, its caches, the base model, the images and the configuration are drawn; a bit is flipped, or
the file is cut, emptied, removed, or replaced by a folder, a link or a FIFO. A case fails if the run calls it a bug,
hangs, or ends with other weights without a word. `tests/test_campaigns.py` runs a small sample.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import SMALL, Starter, fork_server_context  # noqa: E402
from kills import fixtures, tensors  # noqa: E402

HANG_SECONDS = 60
AT_ONCE = 2
STEPS = 4
ALLOWED_CODES = (0, 2, 3, 4)
NOT_READ = (
    re.compile(r"run/validation/"),
    re.compile(r"run/(loss\.png|report\.html|metrics\.jsonl)"),
    re.compile(r"run/pipeline(-ema)?/(README\.md|samples/)"),
)
"""What a run writes for people and does not read again: it cannot notice damage in it, and no weight depends on it."""


def flip(path: Path, draw: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Keep the beginning."""
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(max(1, len(content)))])


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in a file's place."""
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped": flip,
    "flipped twice": lambda path, draw: (flip(path, draw), flip(path, draw))[0],
    "cut": cut,
    "emptied": lambda path, _: path.write_bytes(b"") and None,
    "removed": lambda path, _: path.unlink(),
    "a folder": lambda path, _: replace(path, Path.mkdir),
    "a link to itself": lambda path, _: replace(path, lambda name: name.symlink_to(name)),
    "a link to another file": lambda path, _: replace(path, lambda name: name.symlink_to("/etc/hostname")),
    "a FIFO": lambda path, _: replace(path, os.mkfifo),
}


@dataclass
class Damage:
    """Cases of damage to one finished half of a run; `problems` is empty if all promises held."""

    starter: Starter
    folder: Path
    random: random.Random
    problems: list[str] = field(default_factory=list)
    usual: set[str] = field(default_factory=set)
    """What an undisturbed run says."""
    answers: dict[str, int] = field(default_factory=dict)

    def run(self, cases: int, base: Path, images: Path) -> None:
        """Make the run from a base model and images, then damage it that often."""
        shutil.copytree(base, self.folder / "whole" / "base")
        shutil.copytree(images, self.folder / "whole" / "shapes")
        self.config(self.folder / "whole")
        self.train(self.folder / "whole", 2)
        undisturbed = self.copy("undisturbed")
        code, said = self.train(undisturbed, STEPS)
        assert code == 0, said
        wanted, self.usual = weights_of(undisturbed), comparable(said)
        again = self.copy("undisturbed again")
        _, said = self.train(again, STEPS)
        assert weights_of(again) == wanted and comparable(said) == self.usual, "an undisturbed run must not stand out"
        files = sorted(path for path in (self.folder / "whole").rglob("*") if path.is_file())
        names = [path.relative_to(self.folder / "whole").as_posix() for path in files if path.name != ".lock"]
        drawn = [(number, self.random.choice(names), self.random.choice(list(DAMAGES))) for number in range(cases)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda case: self.case(*case, wanted), drawn))

    def config(self, folder: Path) -> None:
        """Write the configuration: a settings file and a dataset file."""
        (folder / "data.json").write_text(
            json.dumps([{"id": "shapes", "type": "local", "instance_data_dir": "shapes"}], indent=1)
        )
        pairs = dict(flag.removeprefix("--").partition("=")[::2] for flag in SMALL)
        pairs |= {"model_family": "sdxl"}
        pairs |= {"pretrained_model_name_or_path": "base", "output_dir": "run", "data_backend_config": "data.json"}
        pairs |= {"train_batch_size": "4", "checkpoint_step_interval": "1", "use_ema": "true"}
        pairs |= {"validation_prompt": "a red circle", "validation_num_inference_steps": "1"}
        (folder / "config.json").write_text(json.dumps(pairs, indent=1))

    def train(self, folder: Path, steps: int) -> tuple[int | None, str]:
        """Run the command in a folder; return its exit code (None: it hangs) and what it said."""
        command = ["train", "--config=config.json", f"--max_train_steps={steps}"]
        run = self.starter.start(in_folder, 1, str(folder), command)
        (process,) = run.processes
        process.join(HANG_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return None, run.said
        return process.exitcode, run.said

    def copy(self, name: str) -> Path:
        """Return a copy of the folder whose files are links, but those that a run appends to."""
        target = self.folder / name
        shutil.copytree(self.folder / "whole", target, copy_function=os.link)
        for path in [*target.rglob("*.jsonl"), target / "run" / ".lock"]:  # written in place
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
        return target

    def case(self, number: int, name: str, damage: str, wanted: dict[str, str]) -> None:
        """Damage one file in a copy, run, and judge the answer."""
        folder = self.copy(f"case{number}")
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        DAMAGES[damage](path, random.Random(number))
        began = time.monotonic()
        code, said = self.train(folder, STEPS)
        verdict = self.verdict(name, code, said, folder, wanted)
        self.answers[verdict] = self.answers.get(verdict, 0) + 1
        if verdict not in ("right", "said and right", "said and other", "refused", "not read"):
            how = f"{verdict} (exit code {code}, {time.monotonic() - began:.0f} s)"
            self.problems.append(f"case {number}: {name} {damage}: {how}\n{said}")
            print(self.problems[-1], flush=True)  # what is found must survive a campaign that is stopped
        shutil.rmtree(folder, ignore_errors=True)

    def verdict(self, name: str, code: int | None, said: str, folder: Path, wanted: dict[str, str]) -> str:
        """Return how a run answered."""
        if code is None:
            return "HANG"
        if "this is a bug" in said or "Traceback" in said:
            return "BUG"
        if code not in ALLOWED_CODES:
            return "WRONG EXIT CODE"
        if code:
            return "refused" if said.count("error:") == 1 and "hint:" in said else "NO SENTENCE"
        is_right = weights_of(folder) == wanted
        if comparable(said) - self.usual:
            return "said and right" if is_right else "said and other"
        if is_right:
            return "right"
        return "not read" if any(each.match(name) for each in NOT_READ) else "SILENT DIFFERENCE"


def comparable(said: str) -> set[str]:
    """Return the lines of a run that hold no measured speed."""
    return {line for line in said.splitlines() if "samples/s" not in line}


def in_folder(folder: str, arguments: list[str]) -> None:
    """Run the command line in a folder."""
    import ranks

    os.chdir(folder)
    ranks.command_line(arguments)


def weights_of(folder: Path) -> dict[str, str]:
    """Return a hash of every tensor file that a run has made at its last step, and of what it exported."""
    made = [folder / "run" / "checkpoints" / f"checkpoint-{STEPS:06d}", folder / "run" / "pipeline"]
    files = [path for root in made for path in root.rglob("*.safetensors")]
    configs = [path for path in (folder / "run" / "pipeline").rglob("*.json") if path.name != "simpletuner.json"]
    found = {path.relative_to(folder).as_posix(): tensors(path) for path in files}
    return found | {path.relative_to(folder).as_posix(): path.read_text(errors="replace") for path in configs}


def main() -> None:
    """Run a campaign in a temporary folder, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starter = Starter(fork_server_context(), folder)
        fixtures(folder, starter)
        campaign = Damage(starter, folder, random.Random(given.seed))
        campaign.run(given.cases, folder / "base", folder / "shapes")
    print(f"{given.cases} cases {dict(sorted(campaign.answers.items()))}: {len(campaign.problems)} problems")
    raise SystemExit(bool(campaign.problems))


if __name__ == "__main__":
    main()
