"""Real pipelines in miniature, drawn pictures, and real ranks: processes forked from one that has torch loaded.

A fresh process spends seconds importing torch and diffusers; the standard library's fork server pays that once.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count, groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
PHOTOGRAPHS = Path(__file__).parent / "fixtures" / "photographs"
sys.path.insert(0, str(ROOT / "tests" / "support"))

import ranks  # noqa: E402
from flags import last_wins, tokens_of  # noqa: E402
from patience import PATIENCE  # noqa: E402
from shared_fork_server import share_fork_server  # noqa: E402

BUILT = "TESTS_BUILT_ONCE"
"""The variable that names the folder of `built_once`."""

if "SIMPLETUNER_TEST_GPUS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # several ranks on one GPU are refused, and TF32 is not within tolerances
os.environ["TORCH_EXTENSIONS_DIR"] = str(ROOT / ".torch_extensions")  # not compiled again after another checkout's
os.environ["SIMPLETUNER_ACCELERATE_CONFIG"] = "none"  # what the developer's machine says must not decide a test
# glibc's heap in huge pages, of all processes that start from here: a forked rank has 16,000 instead of 26,000 page
# faults, and takes 0.46 instead of 0.51 CPU seconds.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")

hypothesis.settings.register_profile("no deadline", deadline=None)  # machines are noisy
hypothesis.settings.load_profile("no deadline")


def pytest_configure() -> None:
    """Take the signals that a shell ignores in what it starts with `&` or `nohup`: children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # one for all workers: what each finds complete is so for the others
        for variable in ("SIMPLETUNER_HOME", BUILT):
            folder = TemporaryDirectory(prefix=f"{variable.lower()}-")
            atexit.register(folder.cleanup)
            os.environ[variable] = folder.name
    gc.disable()  # until all tests are collected, and torch imported by some: 5 of 10 CPU seconds of each worker
    atexit.register(gc.freeze)  # the interpreter's end would collect garbage among all that was imported


def pytest_collection_finish() -> None:
    """Leave what was imported out of later collections, each of which would take 0.4 s."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest, so that no core waits for another one's last test."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = begun_with_long(items, workers, lambda item: item.get_closest_marker("long") is not None)


def begun_with_long(
    items: list[pytest.Item], workers: int, is_long: Callable[[pytest.Item], bool]
) -> Iterator[pytest.Item]:
    """Yield tests in an order of which each worker's part begins with its share of the long ones.

    xdist gives each worker an equal part of the list, and others take from the end of it. Tests of a file stay
    together: they share what takes long.
    """
    by_file = [list(tests) for _, tests in groupby(filter(is_long, items), key=lambda item: item.path)]
    short = (item for item in items if not is_long(item))
    left = len(items)
    for number in range(workers):
        part = left // (workers - number)
        begun = [item for tests in by_file[number::workers] for item in tests]
        yield from begun
        yield from islice(short, max(0, part - len(begun)))
        left -= part
    yield from short


SMALL = (
    "--resolution=64",
    "--aspect_bucket_alignment=16",
    "--mixed_precision=no",
    "--gradient_checkpointing=false",
    "--learning_rate=1e-3",
    "--caption_dropout_probability=0.2",
)
"""Flags of a run that takes a second: 64 px pictures in float32."""


def fork_server_context():
    """Return a context whose processes are forked from one that has imported everything heavy."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    return context


@pytest.fixture(scope="session")
def fork_server():
    share_fork_server(Path(os.environ[BUILT]))
    return fork_server_context()


@dataclass
class Ranks:
    """The processes of one run, and what they said."""

    processes: list[Any]
    logs: list[Path]

    def wait(self, timeout: float = PATIENCE) -> list[int]:
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        alive = [process for process in self.processes if process.is_alive()]
        for process in alive:
            process.kill()
            process.join()
        assert not alive, f"{len(alive)} ranks hang:\n{self.said}"
        return [process.exitcode for process in self.processes]

    def kill(self, number: int = signal.SIGKILL) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    @property
    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs if log.exists())


def free_port() -> int:
    """Return a port below 32768: one above may be given to any connection before rank 0 listens on it."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port := 10_000 + secrets.randbelow(20_000)))
            return port


@dataclass
class Starter:
    """Start functions or the command line on a number of ranks."""

    context: Any
    folder: Path
    started: list[Ranks] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def start(self, function: Callable[..., None], world: int, *arguments: Any) -> Ranks:
        port, number = free_port(), next(self.numbers)
        logs = [self.folder / f"run{number}-rank{rank}.log" for rank in range(world)]
        processes = [
            self.context.Process(target=ranks.as_rank, args=(function, rank, world, port, str(logs[rank]), *arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        self.started.append(Ranks(processes, logs))
        return self.started[-1]

    def train(self, world: int, *flags: str) -> Ranks:
        return self.start(ranks.command_line, world, ["train", *last_wins(flags)])


@pytest.fixture
def starter(fork_server, tmp_path):
    starter = Starter(fork_server, tmp_path)
    yield starter
    for run in starter.started:
        run.kill()


@pytest.fixture
def tmpfs(tmp_path):
    """Mount a file system of its own: `tmpfs("size=80m")` returns its folder."""
    folders: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"tmpfs{len(folders)}"
        folder.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if mounted.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, what it said, and its metrics."""

    output: Path
    said: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]


@pytest.fixture
def train(starter):
    """Run `simpletuner train` on real ranks and expect it to end with a code."""

    def run(output: Path, *flags: str, world: int = 1, code: int = 0) -> Trained:
        started = starter.train(world, f"--output_dir={output}", *SMALL, *flags)
        codes = started.wait()
        assert set(codes) == {code}, f"exit codes {codes}:\n{started.said}"
        return Trained(output, started.said)

    return run


@pytest.fixture(scope="session")
def built_once() -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a folder that the first worker to ask for it builds; the others wait for it, and no test changes it."""

    def built(name: str, build: Callable[[Path], object]) -> Path:
        folder = Path(os.environ[BUILT]) / name
        folder.parent.mkdir(exist_ok=True)
        with folder.with_name(f".{folder.name}.built").open("a+") as state:
            fcntl.flock(state, fcntl.LOCK_EX)
            state.seek(0)
            if not state.read():
                build(folder)
                state.write("built")
        return folder

    return built


@pytest.fixture(scope="session")
def pipelines(fork_server, built_once) -> Callable[[str], Path]:
    """Return the tiny pipeline of a family, built at the first call."""

    def build(folder: Path) -> None:
        builder = fork_server.Process(target=ranks.build_pipeline, args=(folder.name, str(folder)))
        builder.start()
        builder.join()
        assert builder.exitcode == 0, f"the tiny {folder.name} cannot be built"

    return cache(lambda family: built_once(f"base/{family}", build))


@pytest.fixture
def run_on(starter, tmp_path):
    """Run a function of `engines` on some ranks and return what it reports."""

    def run(function, world: int, *arguments):
        report = tmp_path / f"report-{len(starter.started)}.json"
        started = starter.start(function, world, *arguments, str(report))
        assert started.wait(900) == [0] * world, started.said
        return json.loads(report.read_text())

    return run


CACHED = ("flux", "flux2", "sdxl")
"""Families of which several tests of engines find all encoded."""


@pytest.fixture
def arguments_of(pipelines, shapes, filled_caches, tmp_path):
    """Return what those functions are told of a run: its family, pictures, folders and settings."""

    def made(family: str, **more):
        return {
            "family": family,
            "base": str(pipelines(family)),
            "pictures": str(shapes),
            "folder": str(tmp_path),
            "caches": str(filled_caches(family) if family in CACHED else tmp_path),
            **more,
        }

    return made


@pytest.fixture(scope="session")
def sdxl(pipelines) -> Path:
    return pipelines("sdxl")


@pytest.fixture(scope="session")
def flux(pipelines) -> Path:
    return pipelines("flux")


@pytest.fixture(scope="session")
def shapes(built_once) -> Path:
    draw = [sys.executable, str(ROOT / "examples" / "shapes" / "draw.py"), "--count", "36"]
    # A dataset is called by its folder, and its name is part of the seed of each sample: with another name, weights
    # that start near zero take other signs in Adam's first steps, and tolerances of parity do not hold.
    return built_once("shapes0", lambda folder: subprocess.run([*draw, str(folder)], check=True, capture_output=True))


@pytest.fixture(scope="session")
def few_shapes(built_once, shapes) -> Path:
    """Twelve of the pictures, a batch of four of each size: a third of what is encoded."""

    def copy(folder: Path) -> None:
        folder.mkdir(parents=True)
        for path in sorted(shapes.glob("*.png"))[::3]:
            for each in (path, path.with_suffix(".txt")):
                os.link(each, folder / each.name)

    return built_once("few/shapes0", copy)


def base(family: str, pipeline: Path, pictures: Path) -> tuple[str, ...]:
    """Return the flags that name a model and pictures, and shorten captions."""
    return (
        f"--model_family={family}",
        f"--pretrained_model_name_or_path={pipeline}",
        f"--instance_data_dir={pictures}",
        *([f"--tokenizer_max_length={tokens}"] if (tokens := tokens_of(family)) else []),
    )


@pytest.fixture
def filled_caches(fork_server, built_once, pipelines, shapes, tmp_path_factory) -> Callable[[str], Path]:
    """Return a folder of a test's own whose caches have all latents and captions of `shapes`, by family.

    Encoding them is a third of what a run of one step takes.
    """

    def build(folder: Path) -> None:
        family = folder.name
        flags = [*SMALL, *base(family, pipelines(family), shapes), *cache_flags(folder), "--max_train_steps=1"]
        with TemporaryDirectory() as made:
            run = Starter(fork_server, Path(made)).train(1, f"--output_dir={made}/run", *flags)
            assert run.wait() == [0], run.said

    def filled(family: str) -> Path:
        folder = tmp_path_factory.mktemp("caches") / family
        return shutil.copytree(built_once(f"caches/{family}", build), folder)

    return cache(filled)


def cache_flags(folder: Path) -> tuple[str, ...]:
    return f"--cache_dir_vae={folder / 'latents'}", f"--cache_dir_text={folder / 'text'}"


@pytest.fixture
def sdxl_uncached(sdxl, shapes) -> tuple[str, ...]:
    """Flags of a run that encodes all of its images and captions, into its output folder."""
    return base("sdxl", sdxl, shapes)


@pytest.fixture
def sdxl_flags(sdxl_uncached, filled_caches) -> tuple[str, ...]:
    return *sdxl_uncached, *cache_flags(filled_caches("sdxl"))


@pytest.fixture
def flux_flags(flux, shapes, filled_caches) -> tuple[str, ...]:
    return *base("flux", flux, shapes), *cache_flags(filled_caches("flux"))
