"""What a start imports and what it costs: modules by package, files of ours, CPU seconds and memory to the first step.

    python benchmarks/start_budget.py [CHECKOUT]

With CHECKOUT, another checkout of this repository whose .venv is installed, each row has that one's value behind it;
both run in turns. Counts depend on the versions of libraries alone, not on the machine:
tests/end_to_end/test_start_budget.py holds them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusers_script import make_inputs
from interleaved import print_table
from startup import QUESTIONS, answer, prepare

HERE = Path(__file__).parent
ROUNDS = 3
SHARDED = ("--num_processes=2", "--fsdp_enable")


@dataclass(frozen=True)
class Start:
    """The modules that were imported before the first step, and the CPU seconds of the rank that wrote it down; its
    memory, without files that are mapped (RssAnon), and with them."""

    modules: frozenset[str]
    cpu_seconds: float
    own_mib: float
    resident_mib: float

    def count(self, package: str) -> int:
        """Return how many modules of a package, subpackages included, were imported."""
        return count_by_package(self.modules)[package]


def count_by_package(modules: frozenset[str]) -> Counter[str]:
    return Counter(name.partition(".")[0] for name in modules)


def start(folder: Path, python: str, *flags: str, steps: int = 1) -> Start:
    """Train the tiny SDXL of `make_inputs` in a fresh process, without tracing, and return how it came to step 1."""
    clock = folder / "clock"
    clock.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(HERE / "step_clock"), "STEP_CLOCK": str(clock)}
    environment |= {"STEP_CLOCK_OWNER": str(os.getpid()), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"SIMPLETUNER_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "simpletuner", "train", "--use_cpu", "--model_family=sdxl", "--mixed_precision=no"]
    command += [f"--pretrained_model_name_or_path={folder / 'model'}", f"--instance_data_dir={folder / 'images'}"]
    command += [f"--output_dir={folder / 'output'}", f"--cache_dir_vae={folder / 'vae'}"]
    command += [f"--cache_dir_text={folder / 'text'}", "--resolution=64", f"--max_train_steps={steps}", *flags]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first = clock.read_text().splitlines()[0]
    lines = (line.split() for line in (folder / "clock.status").read_text().splitlines())
    mib = {line[0]: int(line[1]) / 1024 for line in lines if line[-1] == "kB"}
    modules = frozenset((folder / "clock.modules").read_text().split())
    return Start(modules, float(first.split()[1]), mib["RssAnon:"], mib["VmRSS:"])


def new_run(folder: Path, python: str, *flags: str) -> Start:
    shutil.rmtree(folder / "output", ignore_errors=True)
    return start(folder, python, *flags)


def starts(folder: Path, python: str) -> dict[str, Start]:
    """Return a new run, its resume and a sharded new run, with what can be kept from earlier runs kept."""
    return {
        "new run": new_run(folder, python),
        "resume": start(folder, python, steps=2),
        "new run, LoRA": new_run(folder, python, "--model_type=lora"),
        "new run, FSDP2 on 2 ranks": new_run(folder, python, *SHARDED),
    }


def start_rows(folder: Path, pythons: Mapping[str, str]) -> list[list[str]]:
    """Return counts and CPU seconds of each kind of start, of each checkout in turns."""
    found: dict[str, list[dict[str, Start]]] = {name: [] for name in pythons}
    for number in range(ROUNDS + 1):  # the first one encodes, and compiles modules of ours
        for name, python in pythons.items():
            kinds = starts(folder / name, python)
            if number:
                found[name].append(kinds)
    rows = []
    for kind in found[next(iter(found))][0]:
        for name, rounds in found.items():
            counts = count_by_package(rounds[0][kind].modules)
            of_rounds = [(each[kind].cpu_seconds, each[kind].own_mib, each[kind].resident_mib) for each in rounds]
            seconds, own, resident = map(statistics.median, zip(*of_rounds, strict=True))
            most = ", ".join(f"{package} {count}" for package, count in counts.most_common(5))
            measured = [f"{seconds:.2f}", f"{own:.0f}", f"{resident:.0f}"]
            rows.append([f"{kind}, {name}", str(counts["simpletuner"]), str(counts.total()), *measured, most])
    return rows


def modules_of_answer(folder: str, name: str, python: str = sys.executable) -> frozenset[str]:
    """Return the modules that a command of startup.py imports, as Python's own account of imports says."""
    account = answer(folder, QUESTIONS[name], "-X", "importtime", program=python).splitlines()
    return frozenset(line.rpartition("|")[2].strip() for line in account if line.startswith("import time:"))


def main() -> None:
    pythons = {"here": sys.executable}
    if len(sys.argv) > 1:
        pythons["there"] = str(Path(sys.argv[1]) / ".venv" / "bin" / "python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in pythons:
            (folder / each).mkdir()
            make_inputs(folder / each)
        columns = ["tiny SDXL, one core", "files of ours", "modules", "CPU s to the first step"]
        columns += ["MiB of its own", "MiB resident", "most modules"]
        print_table("before the first step", columns, start_rows(folder, pythons))
        prepare(name)
        rows = []
        for question in QUESTIONS:
            counts = [count_by_package(modules_of_answer(name, question, each)) for each in pythons.values()]
            rows.append([question, *(f"{each['simpletuner']} of {each.total()}" for each in counts)])
        print_table("files of ours among the modules of an answer", ["command", *pythons], rows)


if __name__ == "__main__":
    main()
