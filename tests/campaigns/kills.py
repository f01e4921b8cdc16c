"""Kill runs at random moments, run the same command until it is done, and compare every file with an undisturbed run.

    .venv/bin/python tests/campaigns/kills.py --count=500 --results=kills.jsonl     # 30 CPU minutes
    .venv/bin/python tests/campaigns/kills.py --count=20 --kind=zero3 --seed=1 --victim="one rank"

Who is killed is drawn, too: all ranks at once, one rank, whose launcher must then end the others, the launcher, whose
ranks must then end by themselves, or the page that started the run, which must then go on. Kinds take turns; a kill
that came after its run had finished, as status.json has it, is none, though a process may still have lived. With
`--results`, what is found is appended there, and a campaign that was stopped goes on where it was. On a folder in
memory (`TMPDIR=/dev/shm/kills`) nothing waits for a disk.
`tests/end_to_end/test_campaigns.py` runs a sample.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from pathlib import Path

import psutil
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import SMALL, Starter, base, fork_server_context  # noqa: E402
from flags import last_wins, tokens_of  # noqa: E402
from page_server import page_server  # noqa: E402
from results import add_result, read_results  # noqa: E402
from video_files import film_entry, tone, write_film, write_films  # noqa: E402

from simpletuner.caches.store.shards import ShardReader  # noqa: E402
from simpletuner.checkpoints.layout import list_checkpoints, load_checkpoint, parse_step  # noqa: E402
from simpletuner.run_log import CONSOLE, START_CONSOLE  # noqa: E402
from simpletuner.system.processes.run_status import STATUS, RunState, read_status  # noqa: E402

HANG_SECONDS = 900
"""After which a run that nobody disturbs is said to hang, on a machine that may be busy."""
OLDEST_SECONDS = 15
"""How long a process of a killed run may live on."""
STOPPED = (0, 143, -signal.SIGTERM)
"""Exit codes of a run that was asked to stop; the last of one that did not listen yet."""
MOST_KILLS = 12
"""Of one run, before it may end: kills are cheaper than ends, which are compared."""
TIMINGS = {"samples_per_second", "seconds", "data_seconds", "tflops_per_second"}
SAVED_EACH, KEPT = 2, 3
"""Steps between checkpoints, and how many stay."""
SAVING = (f"--checkpoint_step_interval={SAVED_EACH}", f"--checkpoints_total_limit={KEPT}")
COMMON = ("--train_batch_size=2", "--vae_batch_size=3", *SAVING)
VALIDATION = ("--validation_prompt=a red circle", "--validation_step_interval=4", "--validation_num_inference_steps=1")
HELD_OUT = ("--eval_split=0.2", "--eval_step_interval=2", "--eval_timesteps=2")
CLIP = ("--validation_resolution=64x48@5",)
ON_DEMAND = ("--vae_cache_ondemand", "--text_cache_ondemand")


@dataclass(frozen=True)
class Kind:
    """A sort of run, and how likely each victim is."""

    flags: tuple[str, ...]
    ranks: int = 2
    media: str = "images"
    """Or another one of FIXTURES."""
    victims: Mapping[str, float] = field(default_factory=lambda: {"group": 0.92, "one rank": 0.04, "launcher": 0.04})
    """Warm ranks cost 2 CPU seconds a kill; a launcher and its ranks, which import torch, 12."""
    least: int = 1
    """Kills of one run."""


KINDS = {
    "fsdp2": Kind(("--fsdp_enable", "--use_ema", *VALIDATION)),
    "zero3": Kind(("--zero_stage=3", "--use_ema", "--mixed_precision=bf16")),
    "lora": Kind(("--model_type=lora", "--lora_rank=4", *HELD_OUT, *ON_DEMAND)),
    "split": Kind(("--fsdp_enable", "--state_layout=split", "--mixed_precision=bf16", *HELD_OUT)),
    "one": Kind(("--mixed_precision=bf16", "--use_ema", *HELD_OUT, *ON_DEMAND, *VALIDATION), ranks=1),
    "clips": Kind(("--fsdp_enable", "--use_ema", *HELD_OUT, *VALIDATION, *CLIP), media="clips"),
    "clips on demand": Kind(("--zero_stage=2", "--mixed_precision=bf16", *HELD_OUT, *ON_DEMAND), media="clips"),
    "zero2": Kind(("--zero_stage=2", "--use_ema", "--mixed_precision=bf16", *HELD_OUT)),
    "int8": Kind(("--model_type=lora", "--lora_rank=4", "--base_model_precision=int8", "--fsdp_enable", *HELD_OUT)),
    "dora": Kind(("--model_type=lora", "--lora_type=dora", "--lora_rank=4", "--fsdp_enable", "--use_ema")),
    "masks": Kind(("--fsdp_enable", "--log_sample_losses", *HELD_OUT), media="masks"),
    "pairs": Kind(("--fsdp_enable", *HELD_OUT), media="pairs"),
    "pairs by auto": Kind(("--fsdp_enable", *HELD_OUT), media="pairs by auto"),
    # A text is embedded with its first frame, so that both caches are of the data.
    "first frames by auto": Kind(("--fsdp_enable", "--use_ema", *HELD_OUT), media="first frames by auto"),
    "sound": Kind(("--fsdp_enable", *HELD_OUT), media="sound"),
    # Each run goes on from what went on from what went on; a stop saves where it is, so each step is one to save at.
    "resumes": Kind(
        ("--use_ema", "--checkpoint_step_interval=1", *HELD_OUT), ranks=1, victims={"stop": 0.7, "group": 0.3}, least=3
    ),
    "page": Kind(("--use_ema", *HELD_OUT), victims={"launcher": 0.4, "one rank": 0.3, "page": 0.3}),
}


@dataclass
class Campaign:
    """Kills of one kind of run; `problems` is empty if all promises held."""

    starter: Starter
    base: tuple[str, ...]
    folder: Path
    kind: Kind
    seed: int = 0
    steps: int = 10
    victims: Mapping[str, float] = field(default_factory=dict)
    """In place of the kind's own."""
    problems: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)

    def run(self, kills: int) -> None:
        """Kill that often."""
        for _ in self.runs(kills):
            pass

    def runs(self, kills: int, first: int = 0) -> Iterator[dict[str, object]]:
        """Kill that often, spread over runs that are numbered from `first` on; yield what came of each."""
        began = time.monotonic()
        wanted = self.undisturbed()
        # a real launcher and its ranks import torch first, which warm ranks do not
        longest = {"group": time.monotonic() - began, "launched": 3 * (time.monotonic() - began) + 3}
        end = self.killed.total() + kills
        for number in count(first):
            if (left := end - self.killed.total()) <= 0:
                return
            draw, told = random.Random(f"{self.seed} {number}"), len(self.problems)
            killed = self.kill_run(number, min(left, draw.randint(self.kind.least, MOST_KILLS)), longest, wanted, draw)
            self.killed += Counter(victim for victim, _ in killed)
            new = self.problems[told:]
            yield {"seed": self.seed, "run": number, "kills": len(killed), "killed": killed, "problems": new}

    def kill_run(
        self, number: int, kills: int, longest: dict[str, float], wanted: dict[str, str], draw: random.Random
    ) -> list[tuple[str, str]]:
        """Kill one run up to that often, and let it end; return who was killed, and what the run was doing."""
        output, killed = self.folder / f"run{number}", list[tuple[str, str]]()
        while len(killed) < kills and (victim := self.kill_once(output, longest, draw)):
            killed.append((victim, doing(output)))
        self.finish(output)
        self.compare(wanted, contents(output), output)
        shutil.rmtree(output, ignore_errors=True)
        return killed

    def undisturbed(self) -> dict[str, str]:
        """Return what a run leaves that nothing disturbed."""
        output = self.folder / "undisturbed"
        self.finish(output)
        assert not self.problems, self.problems
        found = contents(output)
        shutil.rmtree(output)
        return found

    def command(self, output: Path) -> tuple[str, ...]:
        """Return the flags of every start."""
        steps = f"--max_train_steps={self.steps}"
        return tuple(last_wins((f"--output_dir={output}", *SMALL, *self.base, *COMMON, *self.kind.flags, steps)))

    def finish(self, output: Path) -> None:
        """Run the command to its end."""
        run = self.starter.train(self.kind.ranks, *self.command(output))
        if (codes := run.wait(HANG_SECONDS)) != [0] * self.kind.ranks:
            self.problems.append(f"{output.name} ended with {codes}:\n{run.said}")

    def kill_once(self, output: Path, longest: dict[str, float], draw: random.Random) -> str:
        """Start the command, kill at a random moment, and look at what is left; return who was killed, if anyone."""
        victims = self.victims or self.kind.victims
        victim = draw.choices(list(victims), list(victims.values()))[0]
        if victim in ("group", "stop"):
            left = self.kill_ranks(output, draw.uniform(0.05, longest["group"] * self.share_left(output)), victim)
        else:
            victim, left = self.kill_launched(output, draw.uniform(0.5, longest["launched"]), victim, draw)
        if late := survivors(left):
            doing = self.abort(late, output)
            self.problems.append(f"{output.name}: {victim} killed, {len(late)} live {OLDEST_SECONDS} s on:\n{doing}")
            print(self.problems[-1], flush=True)
        for checkpoint in list_checkpoints(output / "checkpoints"):
            load_checkpoint(checkpoint)  # raises when one that can be seen is not whole
        return victim if left else ""

    def share_left(self, output: Path) -> float:
        """Return how much longer a run takes, of what a whole one takes: a third of that is its start and its end."""
        saved = max(map(parse_step, list_checkpoints(output / "checkpoints")), default=0)
        return (1 + 2 * (1 - saved / self.steps)) / 3

    def kill_ranks(self, output: Path, after: float, victim: str) -> list[psutil.Process]:
        """Kill all warm ranks, or ask them to stop; return those that had not ended, none where the run had."""
        run = self.starter.train(self.kind.ranks, *self.command(output))
        end = time.monotonic() + after
        while time.monotonic() < end and any(process.is_alive() for process in run.processes):
            time.sleep(0.01)
        ranks = [psutil.Process(process.pid) for process in run.processes if process.is_alive()]
        if victim == "stop":
            run.kill(signal.SIGTERM)
            if not all(code in STOPPED for code in run.wait(HANG_SECONDS)):
                self.problems.append(f"{output.name} was asked to stop:\n{run.said}")
        run.kill()
        run.wait()
        return [] if is_finished(output) else ranks

    def kill_launched(
        self, output: Path, after: float, victim: str, draw: random.Random
    ) -> tuple[str, list[psutil.Process]]:
        """Kill a real launcher, one of its ranks, or the page; return which, and all processes that should end then.

        A run that had finished by then has no victim.
        """
        start = self.started_on_page if "page" in self.kind.victims else self.launched
        with start(output) as (launcher, parent):
            end = time.monotonic() + after
            while time.monotonic() < end and is_alive(launcher):
                time.sleep(0.01)
            processes = [launcher, *launcher.children(recursive=True)] if is_alive(launcher) else []
            if victim == "page" and processes:
                parent.kill()
        if victim != "page" and processes:
            ranks = [process for process in processes if is_rank(process)] if victim == "one rank" else []
            victim = "one rank" if ranks else "launcher"
            (draw.choice(ranks) if ranks else launcher).kill()
        came_late = is_finished(output)
        if victim == "page":
            self.expect_end(launcher, output)
        return "" if came_late else victim, processes

    @contextmanager
    def launched(self, output: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
        """Start the command in a process of its own; yield the launcher twice."""
        command = [str(Path(sys.executable).with_name("simpletuner")), "train", *self.command(output)]
        with self.log_of(output).open("wb") as log:
            launcher = psutil.Popen(
                [*command, f"--num_processes={self.kind.ranks}"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        yield launcher, launcher

    @contextmanager
    def started_on_page(self, output: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
        """Start the command on a page; yield the launcher and the page. It outlives the page, which ends then."""
        pairs = (flag.removeprefix("--").partition("=") for flag in self.command(output))
        values = {name: value or "true" for name, _, value in pairs}
        values |= {"output_dir": output.name, "num_processes": str(self.kind.ranks)}
        (self.folder / f"{output.name}.json").write_text(json.dumps(values, indent=1))
        with page_server(self.folder) as server:
            answer = server.post("/runs/start", {"file": f"{output.name}.json"})
            if answer.code != 200:
                self.problems.append(f"{output.name} cannot be started on the page: {answer.code}\n{answer.text}")
            page = psutil.Process(server.process.pid)
            yield launcher_of(page), page

    def expect_end(self, launcher: psutil.Process, output: Path) -> None:
        """Wait for a run whose page was killed: it must go on to its last step."""
        survivors([launcher], 240)
        if not (output / "pipeline").exists():
            self.problems.append(f"{output.name} ended with its page:\n{self.log_of(output).read_text()}")

    def log_of(self, output: Path) -> Path:
        if "page" not in self.kind.victims:
            return self.folder / "launched.log"
        return next(path for name in (START_CONSOLE, CONSOLE) if (path := output / name).exists())

    def abort(self, processes: list[psutil.Process], output: Path) -> str:
        """End processes that should have ended; return the log, where faulthandler writes what they were doing."""
        for process in processes:
            process.send_signal(signal.SIGABRT)
        survivors(processes)
        return self.log_of(output).read_text(errors="replace")

    def compare(self, wanted: dict[str, str], found: dict[str, str], output: Path) -> None:
        """Note every file that differs."""
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                how = "is missing" if name not in found else "is left behind" if name not in wanted else "differs"
                self.problems.append(f"{output.name}: {name} {how}")
                if name.endswith(".jsonl"):
                    self.problems.append(f"wanted {wanted.get(name)}\nfound  {found.get(name)}")


def launcher_of(page: psutil.Process) -> psutil.Process:
    """Return the run that a page has just started, as soon as its process is no copy of the page any more."""
    end = time.monotonic() + OLDEST_SECONDS
    while time.monotonic() < end:
        with suppress(psutil.NoSuchProcess):
            for each in page.children():
                if "train" in each.cmdline():
                    return each
        time.sleep(0.01)
    raise AssertionError("the page has started no run")


def is_alive(process: psutil.Process) -> bool:
    if isinstance(process, psutil.Popen):  # a child of ours, which this reaps
        return process.poll() is None
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def doing(output: Path) -> str:
    """Return what a killed run says that it was doing, without its numbers; up to a second old."""
    try:
        status = json.loads((output / "status.json").read_text())
    except FileNotFoundError:
        return "starting"
    return re.sub(r"\d+", "N", status["doing"]) or status["state"]


def is_finished(output: Path) -> bool:
    status = read_status(output / STATUS)
    return status is not None and status.state is RunState.FINISHED


def survivors(processes: list[psutil.Process], seconds: float = OLDEST_SECONDS) -> list[psutil.Process]:
    """Wait until processes have ended; return those that have not. A zombie, which waits for its parent, has."""
    end = time.monotonic() + seconds
    while (alive := [each for each in processes if is_alive(each)]) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


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
        if path.is_file() and not name.startswith("cache/") and path.name not in (".lock", CONSOLE, START_CONSOLE):
            found[name] = READERS.get(path.name, tensors if path.suffix == ".safetensors" else whole)(path)
    for folder in sorted({path.parent for path in output.glob("cache/**/*.shard")}):
        reader = ShardReader(folder)
        for place in reader.records():
            record = reader.read(place)
            found[f"{folder.relative_to(output)}:{place.name}"] = hashed(record)
    return found


def tensors(path: Path) -> str:
    """Return a hash of the tensors in a file: the order of names in its header is not always the same."""
    return hashed(load_file(path))


def hashed(named: Mapping[str, Tensor]) -> str:
    """Hash names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
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


def how_it_ended(path: Path) -> str:
    return str(itemgetter("state", "step", "max_steps")(json.loads(path.read_text())))


READERS: dict[str, Callable[[Path], str]] = {
    "metrics.jsonl": rows_without_times,
    "settings.json": settings_without_folder,
    "settings_history.jsonl": lambda path: "",
    "report.html": lambda path: "",
    "log.txt": lambda path: "",
    "status.json": how_it_ended,
    "durations.json": lambda path: "",
    "README.md": lambda path: "",  # a model card, with samples per second
    "state.json": without_checksums,
    "simpletuner.json": without_checksums,
}


def fixtures(folder: Path, starter: Starter, family: str = "sdxl") -> tuple[str, ...]:
    """Return the flags that name a base model and images, which are made first."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = Path(__file__).parent.parent.parent / "examples" / "shapes" / "draw.py"
    subprocess.run(
        [sys.executable, str(draw), str(folder / "shapes"), "--count", "36"], check=True, capture_output=True
    )
    named = f"--pretrained_model_name_or_path={built(starter, family, folder / 'base')}"
    return (f"--model_family={family}", named, f"--instance_data_dir={folder / 'shapes'}")


def clip_fixtures(folder: Path, starter: Starter) -> tuple[str, ...]:
    """Return the flags that name a base model that trains on clips, and films, which are made first."""
    films = write_films(folder / "films", videos=12, folders=12)
    (folder / "films.json").write_text(json.dumps([film_entry(str(films))]))
    model = base("wan", built(starter, "wan", folder / "wan"), films)
    data = f"--data_backend_config={folder / 'films.json'}"
    return (*(flag for flag in model if not flag.startswith("--instance_data_dir")), data)


def mask_fixtures(folder: Path, starter: Starter) -> tuple[str, ...]:
    """Return the flags of a base model, and of images whose loss counts in the left half alone."""
    flags = fixtures(folder / "masked", starter)
    masks = beside(folder / "masked", left_half)
    return (*flags[:2], paired_data(folder / "masked", {"conditioning_type": "mask"}, masks))


def left_half(image: Image.Image) -> Image.Image:
    mask = Image.new("L", image.size)
    mask.paste(255, (0, 0, image.width // 2, image.height))
    return mask


def pair_fixtures(folder: Path, starter: Starter) -> tuple[str, ...]:
    """Return the flags of a FLUX.1 Kontext, and of images that have their negative as a reference."""
    flags = fixtures(folder / "paired", starter, "flux")
    index = folder / "paired" / "base" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "FluxKontextPipeline"}))
    references = beside(folder / "paired", ImageOps.invert)
    data = paired_data(folder / "paired", {"conditioning_type": "reference_strict", "resolution": 64}, references)
    return (*flags[:2], data, f"--tokenizer_max_length={tokens_of('flux')}")


def automatic_pair_fixtures(folder: Path, starter: Starter) -> tuple[str, ...]:
    """Return the flags of pairs that a FLUX.1 Kontext trains on by its own call."""
    return tuple(last_wins((*pair_fixtures(folder / "automatic", starter), "--model_family=auto")))


def first_frame_fixtures(folder: Path, starter: Starter) -> tuple[str, ...]:
    """Return the flags of clips that a Wan 2.1 continues by its own call from a first frame that CLIP sees too."""
    (own := folder / "continued").mkdir()
    flags = last_wins((*clip_fixtures(own, starter), "--model_family=auto"))
    first_frame_model(starter, own / "wan", model := own / "continues")
    return tuple(each.replace(str(own / "wan"), str(model)) for each in flags)


def sound_fixtures(folder: Path, starter: Starter) -> tuple[str, ...]:
    """Return the flags of an LTX-2 that continues first frames of films with their sound, where they have one."""
    (films := folder / "sounds").mkdir(parents=True)
    for number in range(18):
        tracks = [tone(200 + 50 * number, 1)] if number % 3 else []
        write_film(films / f"tone {number}.mov", *tracks, frames=12)
    video = {"num_frames": 9, "is_i2v": True}
    entry = {"id": "films", "dataset_type": "video", "instance_data_dir": str(films), "video": video, "resolution": 64}
    (folder / "sounds.json").write_text(json.dumps([entry | {"caption_strategy": "filename"}]))
    (model, named, *_) = base("ltxvideo2", built(starter, "ltxvideo2", folder / "ltx"), films)
    own = ("--sound_loss_weight=1", "--tokenizer_max_length=24", "--aspect_bucket_alignment=32")
    return (model, named, *own, f"--data_backend_config={folder / 'sounds.json'}")


def first_frame_model(starter: Starter, base: Path, folder: Path) -> Path:
    """Make a tiny Wan 2.1 that continues a first frame out of one that is given texts alone."""
    from models.test_image_to_video import save_wan

    builder = starter.context.Process(target=save_wan, args=(base, folder, "2.1-14b"))
    builder.start()
    builder.join()
    return folder


def beside(folder: Path, change: Callable[[Image.Image], Image.Image]) -> Path:
    """Make an image for each of those in `shapes`, under the same name."""
    (made := folder / "beside").mkdir()
    for path in (folder / "shapes").glob("*.png"):
        with Image.open(path) as image:
            change(image.convert("RGB")).save(made / path.name)
    return made


def paired_data(folder: Path, conditioning: dict[str, object], beside: Path) -> str:
    """Write a dataset with another one in `conditioning_data`; return the flag that names it."""
    images = {"id": "images", "type": "local", "instance_data_dir": str(folder / "shapes"), "resolution": 64}
    second = {"id": "beside", "type": "local", "instance_data_dir": str(beside), "dataset_type": "conditioning"}
    path = folder / "data.json"
    path.write_text(json.dumps([images | {"conditioning_data": ["beside"]}, second | conditioning], indent=1))
    return f"--data_backend_config={path}"


FIXTURES = {
    "images": fixtures,
    "clips": clip_fixtures,
    "masks": mask_fixtures,
    "pairs": pair_fixtures,
    "pairs by auto": automatic_pair_fixtures,
    "first frames by auto": first_frame_fixtures,
    "sound": sound_fixtures,
}


def built(starter: Starter, family: str, folder: Path) -> Path:
    """Build the tiny pipeline of a family, and return its folder."""
    import ranks

    builder = starter.context.Process(target=ranks.build_pipeline, args=(family, str(folder)))
    builder.start()
    builder.join()
    return folder


def run_campaigns(
    description: str | None,
    kinds: Collection[str],
    count: int,
    campaign_of: Callable[[Starter, str, Path, int], Campaign],
    victims: Collection[str] = ("group",),
) -> None:
    """Run the campaigns of the kinds that the command line names, and print what was found.

    `campaign_of` makes one for a starter, a kind, a folder of its own, whose parent all of them share, and a seed.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help="kills of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=kinds, action="append", help="one of several; default: all")
    parser.add_argument("--victim", choices=victims, action="append", help="one of several; default: the kind's own")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    chosen = given.kind or list(kinds)
    with tempfile.TemporaryDirectory() as name:
        results = given.results or Path(name) / "results.jsonl"
        starter = Starter(fork_server_context(), Path(name))
        turns = dict[str, Iterator[dict[str, object]]]()
        for kind in chosen:
            done = [row for row in read_results(results) if row["kind"] == kind and row["seed"] == given.seed]
            if (left := given.count // len(chosen) - sum(row["kills"] for row in done)) > 0:
                (folder := Path(name) / kind).mkdir()
                campaign = campaign_of(starter, kind, folder, given.seed)
                campaign.victims = dict.fromkeys(given.victim or (), 1.0)
                turns[kind] = campaign.runs(left, len(done))
        while turns:
            for kind, runs in list(turns.items()):
                if row := next(runs, None):
                    add_result(results, row := {"kind": kind, **row})
                    print(json.dumps(row), flush=True)
                else:
                    del turns[kind]
        rows = read_results(results)
    for kind in kinds:
        print(f"{kind}: {sum(row['kills'] for row in rows if row['kind'] == kind)} kills")
    problems = [problem for row in rows for problem in row["problems"]]
    print(f"{len(problems)} problems", *problems, sep="\n")
    raise SystemExit(bool(problems))


def main() -> None:
    made: dict[str, tuple[str, ...]] = {}

    def campaign_of(starter: Starter, kind: str, folder: Path, seed: int) -> Campaign:
        if (media := KINDS[kind].media) not in made:
            made[media] = FIXTURES[media](folder.parent, starter)
        return Campaign(starter, made[media], folder, KINDS[kind], seed)

    run_campaigns(__doc__, KINDS, 300, campaign_of, ("group", "one rank", "launcher", "page", "stop"))


if __name__ == "__main__":
    main()
