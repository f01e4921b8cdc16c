"""Damage one file at a time, run the same command, and see that it goes on rightly or says what is wrong.

    .venv/bin/python tests/campaigns/damage.py --count=3000 --results=damage.jsonl      # 25 CPU minutes
    .venv/bin/python tests/campaigns/damage.py --seed=0 --case=123 --scene=lora         # shows one

Files of an output folder, its caches and locks, SIMPLETUNER_HOME, the base model, the images, their table and the
configuration are drawn; a bit is flipped and all times kept, as by a failing disk, or the file is cut, emptied,
removed, or replaced by a folder, a link or a FIFO. A case fails if the run calls it a bug, hangs, or ends with other
weights, or other numbers of its new steps, without a word. With `--results`, each case is appended there, and a
campaign that was stopped goes on where it was. `tests/end_to_end/test_campaigns.py` runs a sample.

One process runs the command for a number of cases, one after another, where the run was made, so that notes which name
its folders are read: 0.4 CPU seconds a case of masks instead of 0.8. A case that is not answered well is run again in a
process of its own, whose answer counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import SMALL, Starter, fork_server_context  # noqa: E402
from flags import tokens_of  # noqa: E402
from kills import (  # noqa: E402
    CLIP,
    HELD_OUT,
    TIMINGS,
    VALIDATION,
    beside,
    clip_fixtures,
    first_frame_model,
    fixtures,
    left_half,
    sound_fixtures,
    tensors,
)
from results import add_result, read_results  # noqa: E402
from video_files import CODECS, film_entry  # noqa: E402

from simpletuner.checkpoints.export import export_single_file  # noqa: E402

HANG_SECONDS = 300
"""On a machine that may be busy: a run takes a second or two."""
SHARE = 20
"""Cases of one process."""
BEFORE, STEPS = 2, 3
"""Steps of the run that is damaged, and those after which it ends."""
ALLOWED_CODES = (0, 2, 3, 4)
GOOD = ("right", "said and right", "said and other", "another film", "refused")
LOG = "case.log"
COMMON = {"output_dir": "run", "data_backend_config": "data.json", "model_family": "sdxl", "train_batch_size": "4"}
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"


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
    seed: int = 0
    problems: list[str] = field(default_factory=list)
    usual: set[str] = field(default_factory=set)
    """What an undisturbed run says."""
    wanted: dict[str, str] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    """Files of a run by their folder, or that below the run's: images are most of all files."""
    answers: Counter[str] = field(default_factory=Counter)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"starter": None}  # it is of this process

    def prepare(self, scene: str, base: Path, images: Path, undisturbed: int = 2) -> None:
        """Make the run of a scene from a base model and images, and find what it is to end with, each time alike."""
        shutil.copytree(images, self.place / "shapes")
        (self.place / "home").mkdir()
        values = COMMON | parsed(SMALL) | SCENES[scene](self, self.place, base)
        (self.place / "config.json").write_text(json.dumps(values | {"checkpoint_step_interval": "1"}, indent=1))
        assert (done := self.train(self.place, BEFORE))[0] == 0, done[1]
        self.place.rename(self.whole)
        for number in range(undisturbed):
            self.restore()
            code, said = self.train(self.place, STEPS)
            assert code == 0, said
            answer = outcome_of(self.place), comparable(said)
            assert not number or answer == (self.wanted, self.usual), "an undisturbed run must not stand out"
            self.wanted, self.usual = answer
        for path in sorted(self.whole.rglob("*")):
            if path.is_file():
                name = path.relative_to(self.whole).as_posix()
                self.names.setdefault(place_of(name), []).append(name)

    @property
    def place(self) -> Path:
        """The folder where all runs are."""
        return self.folder / "place"

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def run(self, cases: Iterable[int], note: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        """Damage a copy of the run for each case; `note` is told how it was answered."""
        left = list(cases)
        while left:
            rows = self.share(left[:SHARE])
            for row in rows:
                if row["verdict"] not in GOOD and len(left) > 1:
                    (row,) = self.share([row["case"]])
                self.answers[row["verdict"]] += 1
                if row["verdict"] not in GOOD:
                    self.problems.append("{case}: {file} {damage}: {verdict} (exit code {code})\n{said}".format(**row))
                note(row)
            left = left[len(rows) :]

    def share(self, cases: Sequence[int]) -> list[dict[str, Any]]:
        """Run cases in one process, up to one that hangs or kills it; return how they were answered."""
        (results := self.folder / "rows.jsonl").unlink(missing_ok=True)
        (process,) = self.starter.start(run_cases, 1, self, cases, results).processes
        answered, end = 0, time.monotonic() + HANG_SECONDS
        while process.is_alive() and time.monotonic() < end:
            process.join(1)
            if (now := len(read_results(results))) > answered:
                answered, end = now, time.monotonic() + HANG_SECONDS
        if is_hung := process.is_alive():
            process.kill()
            process.join()
        rows = read_results(results)
        if len(rows) < len(cases):
            said = (self.folder / LOG).read_text(errors="replace")
            rows.append(self.row(cases[len(rows)], None if is_hung else process.exitcode, said))
        return rows

    def train(self, folder: Path, steps: int) -> tuple[int, str]:
        """Run the command in a folder, in a process of its own; return its exit code and what it said."""
        run = self.starter.start(in_folder, 1, str(folder), steps)
        (code,) = run.wait(HANG_SECONDS)
        return code, run.said

    def restore(self) -> None:
        """Put a copy of the run in its place, whose files are links, but those that a run writes in place."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.whole, self.place, copy_function=os.link)
        for path in [*self.place.rglob("*.jsonl"), *self.place.rglob("*.lock"), self.place / "run" / "log.txt"]:
            unlink_from_others(path)

    def drawn(self, number: int) -> tuple[str, str, random.Random]:
        """Return the name of the file that a case damages, and how."""
        draw = random.Random(f"{self.seed} {number}")
        return draw.choice(self.names[draw.choice(list(self.names))]), draw.choice(list(DAMAGES)), draw

    def case(self, number: int) -> dict[str, Any]:
        """Damage one file in a copy, run, and judge the answer."""
        name, damage, draw = self.drawn(number)
        self.restore()
        path = self.place / name
        times = [(each, each.stat()) for each in (path, path.parent)]
        unlink_from_others(path)
        DAMAGES[damage](path, draw)
        if damage.startswith("flipped"):
            for each, status in times:
                os.utime(each, ns=(status.st_atime_ns, status.st_mtime_ns))
        return self.row(number, *in_this_process(self.place, self.folder / LOG))

    def row(self, number: int, code: int | None, said: str) -> dict[str, Any]:
        name, damage, _ = self.drawn(number)
        verdict = self.verdict(code, said, self.place, name, damage)
        said = "" if verdict in GOOD else said
        return {"case": number, "file": name, "damage": damage, "verdict": verdict, "code": code, "said": said}

    def verdict(self, code: int | None, said: str, folder: Path, name: str, damage: str) -> str:
        """Return how a run answered this damage of a file."""
        if code is None:
            return "HANG"
        if "this is a bug" in said or "Traceback" in said:
            return "BUG"
        if code not in ALLOWED_CODES:
            return "WRONG EXIT CODE"
        if code:
            return "refused" if said.count("error:") == 1 and "hint:" in said else "NO SENTENCE"
        is_right = outcome_of(folder) == self.wanted
        if comparable(said) - self.usual:
            return "said and right" if is_right else "said and other"
        # Nothing in an MP4 or a WebM tells a changed bit from another picture: it is another film, encoded again.
        is_film = name.startswith("shapes/") and Path(name).suffix in CODECS and damage.startswith("flipped")
        return "right" if is_right else "another film" if is_film else "SILENT DIFFERENCE"


def make(folder: Path, starter: Starter, family: str) -> tuple[Path, Path]:
    """Make a base model, and images or films; return their folders."""
    if family == "wan":
        clip_fixtures(folder, starter)
        return folder / "wan", folder / "films"
    if family == "ltxvideo2":
        sound_fixtures(folder, starter)
        return folder / "ltx", folder / "sounds"
    fixtures(folder / family, starter, family)
    return folder / family / "base", folder / family / "shapes"


def parsed(flags: Iterable[str]) -> dict[str, str]:
    """Return flags as the values of a file."""
    pairs = (flag.removeprefix("--").partition("=") for flag in flags)
    return {name: value or "true" for name, _, value in pairs}


def whole_model(_: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A whole model from a folder, with captions in text files, EMA and validation images."""
    shutil.copytree(base, folder / "base")
    write_dataset(folder)
    return {"pretrained_model_name_or_path": "base", "use_ema": "true", **parsed(VALIDATION)}


def lora_of_one_file(damage: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A LoRA that begins with another one, on a model in one file, with a table of captions, and a held-out loss."""
    write_dataset(folder)
    model = {"pretrained_model_name_or_path": "model.safetensors", "single_file_config": "configs"}
    lora = {"model_type": "lora", "lora_rank": "2", **model}
    export_single_file(base, folder / "model.safetensors", "sdxl")
    shutil.copytree(base, folder / "configs", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(COMMON | parsed(SMALL) | lora))
    assert (done := damage.train(folder, 1))[0] == 0, done[1]
    (folder / "run" / "pipeline_lora_weights" / LORA_WEIGHTS).rename(folder / LORA_WEIGHTS)
    shutil.rmtree(folder / "run")
    texts = sorted((folder / "shapes").glob("*.txt"))
    rows = [{"filename": path.with_suffix(".png").name, "caption": path.read_text().strip()} for path in texts]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet")
    for path in texts:
        path.unlink()
    columns = {"path": "table.parquet", "filename_column": "filename", "caption_column": "caption"}
    columns["identifier_includes_extension"] = True
    write_dataset(folder, caption_strategy="parquet", parquet=columns)
    return {**lora, "lora_init": LORA_WEIGHTS, **parsed(HELD_OUT)}


def clips(_: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A whole model that trains on films and folders of frames, with a held-out loss and validation clips."""
    shutil.copytree(base, folder / "base")
    (folder / "data.json").write_text(json.dumps([film_entry("shapes")], indent=1))
    own = {"model_family": "wan", "pretrained_model_name_or_path": "base", "train_batch_size": "2"}
    return own | parsed((*HELD_OUT, *VALIDATION, *CLIP))


def masked(damage: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A whole model whose loss counts in the left half of each image, with losses of samples."""
    shutil.copytree(base, folder / "base")
    write_beside(folder, left_half, conditioning_type="mask")
    return {"pretrained_model_name_or_path": "base", "log_sample_losses": "true"}


def int8_lora(_: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A LoRA on a base in int8."""
    shutil.copytree(base, folder / "base")
    write_dataset(folder)
    own = {"pretrained_model_name_or_path": "base", "base_model_precision": "int8"}
    return {"model_type": "lora", "lora_rank": "2", **own, **parsed(HELD_OUT)}


def pairs(_: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A FLUX.1 Kontext that learns images from their negatives."""
    shutil.copytree(base, folder / "base")
    index = folder / "base" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "FluxKontextPipeline"}))
    write_beside(folder, ImageOps.invert, conditioning_type="reference_strict", resolution=64)
    own = {"model_family": "flux", "pretrained_model_name_or_path": "base"}
    return own | {"tokenizer_max_length": str(tokens_of("flux"))}


def automatic_pairs(damage: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A FLUX.1 Kontext that learns the same by its own call."""
    return pairs(damage, folder, base) | {"model_family": "auto"}


def first_frames(damage: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A Wan 2.1 that continues first frames of films by its own call; texts are embedded with them."""
    first_frame_model(damage.starter, base, folder / "base")
    (folder / "data.json").write_text(json.dumps([film_entry("shapes")], indent=1))
    own = {"model_family": "auto", "pretrained_model_name_or_path": "base", "train_batch_size": "2"}
    shown = {"validation_pairs": "1", "validation_num_inference_steps": "1"}
    return own | shown | {"tokenizer_max_length": str(tokens_of("wan"))} | parsed(HELD_OUT)


def with_sound(_: Damage, folder: Path, base: Path) -> dict[str, str]:
    """An LTX-2 that continues first frames of films with their sound, where they have one."""
    shutil.copytree(base, folder / "base")
    entry = json.loads((base.parent / "sounds.json").read_text())[0]
    (folder / "data.json").write_text(json.dumps([entry | {"instance_data_dir": "shapes"}], indent=1))
    own = {"model_family": "ltxvideo2", "pretrained_model_name_or_path": "base", "train_batch_size": "2"}
    own |= {"sound_loss_weight": "1", "tokenizer_max_length": "24", "aspect_bucket_alignment": "32"}
    return own | parsed(HELD_OUT)


def of_home(_: Damage, folder: Path, base: Path) -> dict[str, str]:
    """A whole model without a class of ours: SIMPLETUNER_HOME keeps its blocks, and the bytes of what is recomputed."""
    shutil.copytree(base, folder / "base")
    write_dataset(folder)
    return {"model_family": "auto", "pretrained_model_name_or_path": "base", "gradient_checkpointing": "auto"}


def write_beside(folder: Path, change: Callable[[Image.Image], Image.Image], **conditioning: Any) -> None:
    beside(folder, change)
    second = {"id": "beside", "type": "local", "instance_data_dir": "beside", "dataset_type": "conditioning"}
    images = {"id": "shapes", "type": "local", "instance_data_dir": "shapes", "conditioning_data": ["beside"]}
    (folder / "data.json").write_text(json.dumps([images, second | conditioning], indent=1))


SCENES: dict[str, Callable[[Damage, Path, Path], dict[str, str]]] = {
    "whole": whole_model,
    "lora": lora_of_one_file,
    "clips": clips,
    "masks": masked,
    "int8": int8_lora,
    "pairs": pairs,
    "pairs by auto": automatic_pairs,
    "first frames by auto": first_frames,
    "sound": with_sound,
    "home": of_home,
}
FAMILIES = {
    "clips": "wan",
    "pairs": "flux",
    "pairs by auto": "flux",
    "first frames by auto": "wan",
    "sound": "ltxvideo2",
}
"""Of the base model, where it is not SDXL."""


def write_dataset(folder: Path, **more: Any) -> None:
    entry = {"id": "shapes", "type": "local", "instance_data_dir": "shapes", **more}
    (folder / "data.json").write_text(json.dumps([entry], indent=1))


def comparable(said: str) -> set[str]:
    """Return the lines of a run that hold no measured speed or free memory."""
    return {line for line in said.splitlines() if "samples/s" not in line and "GiB per rank" not in line}


def in_folder(folder: str, steps: int) -> None:
    """Run the command line in a folder, which has SIMPLETUNER_HOME."""
    import ranks

    os.chdir(folder)
    os.environ["SIMPLETUNER_HOME"] = str(Path(folder, "home"))
    ranks.command_line(["train", "--config=config.json", f"--max_train_steps={steps}"])


def in_this_process(folder: Path, log: Path) -> tuple[int, str]:
    """Run the command line; return its exit code and what it said."""
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        in_folder(str(folder), STEPS)
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return code, log.read_text(errors="replace")


def run_cases(damage: Damage, cases: Sequence[int], results: Path) -> None:
    for number in cases:
        add_result(results, damage.case(number))


def place_of(name: str) -> str:
    """Return the folder of a file, of those that are drawn alike: `run/cache`, `home`, and the run's own as `run`."""
    first, *rest = name.split("/")
    return "/".join([first, *rest[:1]]) if first == "run" and len(rest) > 1 else first if rest else ""


def unlink_from_others(path: Path) -> None:
    """Make a file out of one of several links, with its times."""
    shutil.copy2(path, new := path.with_name(f"{path.name}.new"))
    new.replace(path)


def outcome_of(folder: Path) -> dict[str, str]:
    """Return hashes of the last tensors of a run and of what it exported, and the numbers of its new steps."""
    run = folder / "run"
    exports = [path for path in run.glob("pipeline*") if path.is_dir()]
    made = [run / "checkpoints" / f"checkpoint-{STEPS:06d}", *exports]
    files = [path for root in made for path in root.rglob("*.safetensors")]
    configs = [path for root in exports for path in root.rglob("*.json") if path.name != "simpletuner.json"]
    found = {path.relative_to(folder).as_posix(): tensors(path) for path in files}
    found |= {path.relative_to(folder).as_posix(): path.read_text(errors="replace") for path in configs}
    return found | {"metrics": json.dumps(new_rows(run / "metrics.jsonl"))}


def new_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps after the damage, without what was measured."""
    rows = [json.loads(line) for line in metrics.read_text(errors="replace").splitlines()]
    kept = [row for row in rows if row["step"] > BEFORE]
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in kept]


def main() -> None:
    """Run a campaign in a temporary folder, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="cases of all scenes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--scene", choices=SCENES, action="append", help="one of several; default: all")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    scenes = given.scene or list(SCENES)
    with tempfile.TemporaryDirectory() as name:
        results = given.results or Path(name) / "results.jsonl"
        starter = Starter(fork_server_context(), Path(name))
        families = {scene: FAMILIES.get(scene, "sdxl") for scene in scenes}
        made = {family: make(Path(name), starter, family) for family in set(families.values())}
        for scene in scenes:
            (folder := Path(name) / scene).mkdir()
            damage = Damage(starter, folder, given.seed)
            damage.prepare(scene, *made[families[scene]])
            whose = {"scene": scene, "seed": given.seed}
            done = {row["case"] for row in read_results(results) if whose.items() <= row.items()}
            cases = range(given.count // len(scenes)) if given.case is None else [given.case]
            damage.run([case for case in cases if case not in done], lambda row, whose=whose: add(results, whose | row))
        rows = read_results(results)
    bad = [row for row in rows if row["verdict"] not in GOOD]
    print(f"{len(rows)} cases {dict(Counter(row['verdict'] for row in rows))}: {len(bad)} problems")
    raise SystemExit(bool(bad))


def add(results: Path, row: dict[str, Any]) -> None:
    """Keep how a case was answered, and print it if it is a problem: what is found must survive a stop."""
    add_result(results, row)
    if row["verdict"] not in GOOD:
        print("{scene} {case}: {file} {damage}: {verdict} (exit code {code})\n{said}".format(**row), flush=True)


if __name__ == "__main__":
    main()
