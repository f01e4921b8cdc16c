"""Start two or three commands at the same moment in a fresh place, as nodes and scripts do; compare with one alone.

    .venv/bin/python tests/campaigns/races.py --cases=100 --results=races.jsonl
    .venv/bin/python tests/campaigns/races.py --cases=20 --seed=3 --among=merge,train

A place has an empty home, images, and a finished run; commands share folders of caches, class images and output. Each
one does what it does alone, or says in one sentence why it cannot; both together do what one does. Afterwards no
hidden file is left that one alone does not leave, and each command works again.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

import ranks  # noqa: E402
from buckets_here import bucket_server  # noqa: E402
from conftest import SMALL, Starter, fork_server_context  # noqa: E402
from flags import last_wins  # noqa: E402
from kills import HANG_SECONDS, automatic_pair_fixtures, contents, fixtures  # noqa: E402
from results import add_result, read_results  # noqa: E402
from s3_server import BUCKET  # noqa: E402

TRAINED = ("--model_type=lora", "--lora_rank=2", "--max_train_steps=1", "--train_batch_size=4", "--use_cpu")
REFUSED = (2, 3, 4)
"""Exit codes of a command that says what is wrong."""
FAULTS = re.compile(r"this is a bug|Traceback|Exception|Errno|\[Error")
MAY_BE_REFUSED = re.compile(
    "is in use|is using|is being cleared|exists already|another command is writing|another run|in use by"
)
MORE_IN_TOTAL = ("sample", "ask")
"""Commands of which each makes a file of its own."""
RANKS = 2
"""Ranks of a command named so."""
MIRROR = "MIRROR"
"""Stands for a place in the bucket that is empty before each case."""
OF_A_START = re.compile("data_listings|^settings.json|^settings_history|^log.txt")
"""Files that name the run's folder, or have another name after each start."""


def released(barrier: Any, wait_seconds: float, variables: dict[str, str], arguments: list[str]) -> None:
    """Run the command line once all are there."""
    if barrier is not None:
        barrier.wait(HANG_SECONDS)
    time.sleep(wait_seconds)
    ranks.command_line_with(variables, arguments)


@dataclass
class Races:
    """Commands of one place, and what each leaves alone; `problems` is empty if all promises held."""

    starter: Starter
    folder: Path
    pairs: tuple[str, ...] = ()
    """Flags of pairs of images that are trained on by the pipeline's own call."""
    commands: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    """Arguments by name, and the path below the place that a command makes."""
    alone: dict[str, tuple[str, int, set[str]]] = field(default_factory=dict)
    """What a command leaves there, its exit code, and its hidden files."""
    cases: int = 0
    """Fresh places so far."""

    @property
    def place(self) -> Path:
        return self.folder / "place"  # the same one for all: records have paths in them

    def prepare(self) -> None:
        whole = self.folder / "whole"
        flags = fixtures(whole, self.starter)
        for extra in sorted((whole / "shapes").glob("*"))[24:]:
            extra.unlink()
        pairs = automatic_pair_fixtures(whole, self.starter)
        for folder in (whole / "automatic" / "paired").glob("[!b]*/"):  # not the base model
            for extra in sorted(folder.glob("*.*"))[16:]:
                extra.unlink()
        whole.rename(self.place)
        flags, self.pairs = (tuple(each.replace(str(whole), str(self.place)) for each in own) for own in (flags, pairs))
        for file in self.place.glob("automatic/paired/*.json"):
            file.write_text(file.read_text().replace(str(whole), str(self.place)))
        base = flags[1].partition("=")[2]
        caches = (f"--cache_dir_vae={self.place}/caches/vae", f"--cache_dir_text={self.place}/caches/text")
        trained = last_wins((*SMALL, *flags, *TRAINED))
        started = self.starter.train(1, f"--output_dir={self.place}/run", *trained)
        assert started.wait(HANG_SECONDS) == [0], started.said
        shutil.copytree(self.place / "run", self.place / "run2")
        shared = [*trained, *caches]
        config = ["config", "init", *flags, f"--output={self.place}/made.toml"]
        classes = [
            {"id": "own", "type": "local", "instance_data_dir": str(self.place / "shapes")},
            {"id": "class", "type": "local", "instance_data_dir": str(self.place / "class"), "prior_images": 2}
            | {"prior_prompt": "a dog", "prior_seed": 1},
        ]
        (self.place / "classes.json").write_text(json.dumps(classes))
        of_classes = [each for each in shared if not each.startswith("--instance_data_dir")]
        of_classes.append(f"--data_backend_config={self.place / 'classes.json'}")
        run, lora = str(self.place / "run"), str(self.place / "run" / "pipeline_lora_weights")
        sampled = ("--prompt=a dog", "--size=64", "--steps=1", "--use_cpu", flags[1], f"--output={self.place}/samples")
        asked = ("--prompt=a dog", "--size=64", "--steps=1", "--use_cpu")
        auto = last_wins((*shared, "--model_family=auto"))
        of_pairs = last_wins((*SMALL, *self.pairs, *TRAINED, *caches))
        sharded = [*shared, "--fsdp_enable"]
        mirrored = [*trained, f"--mirror_output={MIRROR}"]
        self.commands = {
            "train": (["train", f"--output_dir={self.place}/new", *shared], "new"),
            "train-other": (["train", f"--output_dir={self.place}/other", *shared], "other"),
            "train-classes": (["train", f"--output_dir={self.place}/classes", *of_classes], "classes"),
            "train-classes-too": (["train", f"--output_dir={self.place}/classes2", *of_classes], "classes2"),
            "train-auto": (["train", f"--output_dir={self.place}/auto", *auto], "auto"),
            "train-auto-too": (["train", f"--output_dir={self.place}/auto2", *auto], "auto2"),
            "train-ranks": (["train", f"--output_dir={self.place}/ranks", *sharded], "ranks"),
            "train-ranks-too": (["train", f"--output_dir={self.place}/ranks2", *sharded], "ranks2"),
            "train-pairs": (["train", f"--output_dir={self.place}/pairs", *of_pairs], "pairs"),
            "train-pairs-ranks": (["train", f"--output_dir={self.place}/pairs2", *of_pairs], "pairs2"),
            "train-mirror": (["train", f"--output_dir={self.place}/mirrored", *mirrored], "mirrored"),
            "train-mirror-too": (["train", f"--output_dir={self.place}/mirrored2", *mirrored], "mirrored2"),
            "resume-long": (
                ["train", f"--output_dir={run}", *trained, "--max_train_steps=40"],
                "run/pipeline_lora_weights",
            ),
            "ask": (["sample", run, *asked, flags[1]], ""),
            "resume": (["train", f"--output_dir={run}", *trained, "--max_train_steps=2"], "run/pipeline_lora_weights"),
            "plan": (["plan", f"--output_dir={self.place}/new", *shared, "--gpu_memory=8GiB", "--json"], ""),
            "dataset-check": (["dataset", "check", f"--output_dir={self.place}/new", *shared, "--json"], ""),
            "cache-list": (["cache", "list", f"--output_dir={self.place}/new", *shared, "--json"], ""),
            "cache-clear": (["cache", "clear", "all", "--yes", f"--output_dir={self.place}/new", *shared], ""),
            "detect-blocks": (["detect-blocks", *flags, "--json"], ""),
            "refresh": (["detect-blocks", *flags, "--refresh", "--json"], ""),
            "models-check": (["models", f"--check={base}"], ""),
            "config-init": (config, "made.toml"),
            "config-force": ([*config, "--force"], "made.toml"),
            "config-export": (
                ["config", "export", "--to=accelerate", *flags, f"--output={self.place}/accelerate.yaml"],
                "accelerate.yaml",
            ),
            "deepspeed-build": (
                ["deepspeed", "build", "--zero_stage=2", *flags, f"--output={self.place}/zero.json", "--force"],
                "zero.json",
            ),
            "status": (["status", run, "--json"], ""),
            "runs-compare": (["runs", "compare", run, f"{run}2", f"--output={self.place}/compare.html"], ""),
            "runs-export": (["runs", "export", run, f"--output={self.place}/exported", flags[1]], "exported"),
            "merge": (["lora", "merge", base, lora, f"--output={self.place}/merged", "--force"], "merged"),
            "resize": (
                ["lora", "resize", lora, "--rank=1", f"--output={self.place}/resized", "--force"],
                "resized",
            ),
            "sample": (["sample", run, *sampled], "samples"),
        }
        self.place.rename(whole)

    def fresh(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.folder / "whole", self.place)
        self.cases += 1

    def start(self, names: Sequence[str], waits: Sequence[float]) -> list[tuple[int, str]]:
        """Run commands at once; return the exit code of each, and what it said."""
        worlds = [RANKS if "ranks" in name else 1 for name in names]
        barrier = self.starter.context.Barrier(sum(worlds)) if len(names) > 1 else None
        variables = {"SIMPLETUNER_HOME": str(self.place / "home"), "XDG_CACHE_HOME": str(self.place / "cache")}
        started = [
            self.starter.start(released, world, barrier, wait, variables, self.arguments(name))
            for name, world, wait in zip(names, worlds, waits, strict=True)
        ]
        return [(max(run.wait(HANG_SECONDS), key=abs), run.said) for run in started]

    def arguments(self, name: str) -> list[str]:
        place = f"s3://{BUCKET}/{self.cases}"
        return [each.replace(MIRROR, place) for each in self.commands[name][0]]

    def made(self, name: str) -> str:
        """Return what stands for all that a command makes."""
        below = self.commands[name][1]
        path = self.place / below
        if not below or not path.exists():
            return ""
        if path.is_file():
            return path.read_text()
        found = contents(path).items()
        return json.dumps({each: content for each, content in found if not OF_A_START.search(each)}, indent=1)

    def hidden(self) -> set[str]:
        found = (path.relative_to(self.place).as_posix() for path in self.place.rglob(".*"))
        return {re.sub(r"[0-9a-f]{8,}", "ID", name) for name in found}

    def run_alone(self, name: str) -> tuple[str, int, set[str]]:
        if name not in self.alone:
            self.fresh()
            [(code, said)] = self.start([name], [0.0])
            assert code in (0, *REFUSED) and not FAULTS.search(said), f"{name} alone: {code}\n{said}"
            if code:
                print(f"{name} alone ends with {code}: {said[-300:]}", flush=True)
            self.alone[name] = self.made(name), code, self.hidden()
        return self.alone[name]

    def trial(self, case: int, seed: int, among: Sequence[str]) -> dict[str, object]:
        draw = random.Random(f"{seed} {case}")
        first = draw.choice(among)
        names = [first, *(draw.choice((first, draw.choice(among))) for _ in range(draw.choice((1, 1, 1, 2))))]
        longest = 3 if "resume-long" in names else 0.5  # until it trains
        waits = [draw.choice((0.0, 0.0, draw.uniform(0, longest))) for _ in names]
        alone = {name: self.run_alone(name) for name in names}
        self.fresh()
        ended = self.start(names, waits)
        problems = [*self.problems_of(names, ended)]
        if left := self.hidden() - set[str]().union(*(hidden for _, _, hidden in alone.values())):
            problems.append(f"left {sorted(left)}")
        for name in {*names}:
            [(code, said)] = self.start([name], [0.0])
            if FAULTS.search(said) or (code != alone[name][1] and "exists already" not in said):
                problems.append(f"{name} again: {code}, {said[-2000:]}")
        codes = [code for code, _ in ended]
        return {"case": case, "seed": seed, "commands": names, "codes": codes, "problems": problems}

    def problems_of(self, names: Sequence[str], ended: Sequence[tuple[int, str]]) -> Iterator[str]:
        alone = {name: self.alone[name] for name in names}
        for name, (code, said) in zip(names, ended, strict=True):
            sentences = re.findall(r"^error: .*", said, re.MULTILINE)
            if FAULTS.search(said) or code not in (0, *REFUSED) or (code and len({*sentences}) != 1):
                yield f"{name} ended with {code}: {said[-3000:]}"
            elif code not in (0, alone[name][1]) and not MAY_BE_REFUSED.search(said):
                yield f"{name} was refused with {code}: {said[-600:]}"
        for name in {*names}:
            codes = {code for other, (code, _) in zip(names, ended, strict=True) if other == name}
            if 0 in codes and name not in MORE_IN_TOTAL and self.made(name) != alone[name][0]:
                yield f"{name} made something else: {different(alone[name][0], self.made(name))}"
            if alone[name][1] == 0 and 0 not in codes and len({*names}) == 1:
                yield f"{name}: all were refused"
        if {*names} == {"config-init"} and [code for code, _ in ended].count(0) != 1:
            yield "one has overwritten another without --force"
        if names.count("sample") > 1 and len(list((self.place / "samples").glob("*.png"))) < names.count("sample"):
            yield "two samples took one name"


def different(one: str, other: str) -> str:
    lines = {*one.splitlines()} ^ {*other.splitlines()}
    return "\n".join(sorted(lines)[:6])[:1500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case")
    parser.add_argument("--among", default="", help="names of commands to draw from; default: all")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as a rank has it; the fork server loads torch before
    with tempfile.TemporaryDirectory() as name, bucket_server(Path(name)):
        results = given.results or Path(name) / "results.jsonl"
        campaign = Races(Starter(fork_server_context(), Path(name)), Path(name))
        campaign.prepare()
        done = {row["case"] for row in read_results(results) if row["seed"] == given.seed}
        cases = [given.only] if given.only is not None else [each for each in range(given.cases) if each not in done]
        among = given.among.split(",") if given.among else list(campaign.commands)
        for case in cases:
            row = campaign.trial(case, given.seed, among)
            add_result(results, row)
            print(json.dumps({**row, "problems": len(row["problems"])}), *row["problems"], sep="\n  ", flush=True)
        failed = sum(bool(row["problems"]) for row in read_results(results))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
