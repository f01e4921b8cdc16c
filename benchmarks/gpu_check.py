"""What a GPU does, beside what `plan` and the rehearsal assume of it: one table, in at most 9 minutes.

    make gpu-check
    python benchmarks/gpu_check.py [--tiny] [--json] [--minutes=9] [PART...]

Weights and inputs are random, of the true shapes; nothing is downloaded. What does not fit the card, or the time, is
named as not measured. Each row is added to gpu-check.jsonl, in $OUT or here, as soon as it is measured. `--tiny` runs
the same code with tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu import Plans, farthest, run, show
from gpu_cases import ENGINES, FLUX, MIB, SDXL, SPLIT, TINY, Case, Flags, Record, smaller
from gpu_measures import DRAW, RUN
from interleaved import print_table

from simpletuner.counting.step_memory import CONTEXT_BYTES
from simpletuner.parallel.devices import Device, device_by_driver_name
from simpletuner.run_log import silence_torchao
from simpletuner.tools.plan.estimate import RunPlan
from simpletuner.tools.plan.measure import ATTENTION, HOST_GB_PER_SECOND, LINK, PRODUCTS, TRAFFIC
from simpletuner.training.auto import USABLE

PARTS = ("machine", "waits", "losses", "killed", "steps", "link")
NOT_MEASURED = "not measured here"
LORA: Flags = {"model_type": "lora", "train_batch_size": 1, "gradient_checkpointing": True}
RELEASED: Flags = {"optimizer_release_gradients": True, "max_grad_norm": 0}
EAGER: Flags = {"dynamo_backend": "no", "train_batch_size": 1, "gradient_checkpointing": True}
STEPS: dict[str, Flags] = {
    "SDXL, LoRA": SDXL | LORA,
    "FLUX.1-dev, full, split": SPLIT | EAGER,
    "SDXL, full, split": SDXL | EAGER | {"state_layout": "split"},
    "FLUX.1-dev, full, bf16": SPLIT | EAGER | RELEASED | {"state_layout": "bf16"},
    "FLUX.1-dev, LoRA": FLUX | LORA,
    "SDXL, full, split, compiled": SDXL | EAGER | {"state_layout": "split", "dynamo_backend": "inductor"},
}
"""Steps at 1024 px, the most telling first; those that `plan` says do not fit are left out."""


@dataclass(frozen=True)
class Row:
    """A figure that `plan`, the rehearsal or a tolerance assumes, and what was measured, or why nothing was."""

    what: str
    assumed: float | str
    here: float | str

    @property
    def ratio(self) -> str:
        numbers = isinstance(self.assumed, float | int) and isinstance(self.here, float | int)
        return f"{self.here / self.assumed:.2f}" if numbers and self.assumed else ""  # pyright: ignore[reportOperatorIssue]


@dataclass
class Check:
    """Measurements of one machine until the time is over; `device` is None for a card that `plan` does not know."""

    device: Device | None
    tiny: bool
    end: float
    plans: dict[str, Future[RunPlan]] = field(default_factory=dict)
    """Of STEPS, made by a thread while other processes use the GPU: each takes 20 CPU seconds."""

    def measured(self, case: Case) -> Record:
        """Return what a case measured in a process of its own, or the reason in place of each number."""
        record = run(case, self.end - time.monotonic())
        return {"error": f"{NOT_MEASURED}: the time was over"} if record is None else record

    def of_peak(self, name: str, share: float, scale: float = 1) -> float | str:
        return getattr(self.device, name) * share * scale if self.device else ""

    def case_of(self, name: str) -> Case:
        flags = STEPS[name]
        return Case("levers", name, smaller(flags | TINY | {"use_cpu": True}, True) if self.tiny else flags)

    def begin_plans(self, thread: ThreadPoolExecutor) -> None:
        plans = Plans(ExitStack())
        self.plans |= {name: thread.submit(plans.of, self.case_of(name)) for name in STEPS}

    def machine(self) -> Iterator[Row]:
        sizes = {"edge": 8192, "bytes": 2**31, "seconds": 5.0}
        if self.tiny:
            sizes = {"edge": 128, "bytes": MIB, "seconds": 0.1}
        assumed = {
            "context, MiB": CONTEXT_BYTES / MIB,
            "for 25 s, TFLOP/s": self.of_peak("peak_tflops", PRODUCTS),
            "copy, TB/s": self.of_peak("memory_gb_per_second", TRAFFIC, 1e-3),
            "pinned to device, GB/s": HOST_GB_PER_SECOND,
        }
        found = self.measured(Case("ceilings", "machine", sizes))
        for key, value in assumed.items():
            yield Row(key.replace("for 25 s", "bf16 products"), value, number(found, key))
        shape = {"shape": [1, 2, 64, 32] if self.tiny else [4, 24, 4608, 128], "use_cpu": self.tiny}
        found = self.measured(Case("attention", "auto", {"attention_backend": "auto", **shape}))
        for key in ("forward, TFLOP/s", "backward, TFLOP/s"):
            yield Row(f"attention {key}", self.of_peak("peak_tflops", ATTENTION), number(found, key))

    def waits(self) -> Iterator[Row]:
        for family in ("flux", "sdxl"):
            found = self.measured(Case("syncs", family, TINY | {"model_family": family, "use_cpu": self.tiny}))
            places = {place: count for place, count in found.items() if not isinstance(count, bool | str)}
            here = sum(places.values()) / 2 if places or not self.tiny else NOT_MEASURED
            # The logger reads the numbers of the step before.
            yield Row(f"waits per step, tiny {family}", 1, found.get("error", here))
            yield from (Row(f"  {count} x {place}", "", "") for place, count in places.items())

    def losses(self) -> Iterator[Row]:
        def norms(name: str, flags: Flags) -> Record:
            own = TINY | {"model_family": "flux", "learning_rate": 1e-3, "use_cpu": self.tiny} | flags
            return self.measured(Case("engines", f"flux, {name}", smaller(own, self.tiny)))

        reference = norms("CPU, fp32", ENGINES["CPU, fp32"])
        for name in ("fp32", "bf16", "split", "compiled", "FSDP2"):
            found = norms(name, ENGINES[name])
            off = farthest(found.get("norms", []), reference.get("norms", []))
            allowed = "below 1e-4" if name == "fp32" else "below 0.02"
            yield Row(f"gradient norms beside the CPU's, {name}, off by", allowed, number(found | {"off": off}, "off"))

    def killed(self) -> Iterator[Row]:
        """Yield how far losses are from those of the same steps before SIGKILL and another start."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            subprocess.run([sys.executable, str(DRAW), str(folder / "images")], check=True, capture_output=True)
            run = Run(folder, "killed", self.tiny).until_killed(after=9)
            before, saved = run.losses, run.saved_step
            after = run.until_end(len(before) + 1).losses
        is_whole = len(after) == len(before) + 1
        here: Any = farthest(before[saved:], after[saved:]) if is_whole else last_line(run.said)
        yield Row("losses after SIGKILL and resuming, off by", "below 1e-4", here)

    def steps(self) -> Iterator[Row]:
        for name in STEPS:
            yield from self.steps_of(name)

    def steps_of(self, name: str) -> Iterator[Row]:
        case, plan = self.case_of(name), self.plans[name].result()
        planned = plan.memory.gpu_bytes / MIB
        if not self.tiny and planned * MIB > USABLE * torch.cuda.mem_get_info()[0]:
            yield Row(f"{name}: s/step", "", f"{NOT_MEASURED}: takes {planned:,.0f} MiB")
            return
        found = self.measured(case)
        seconds = plan.step_seconds if self.device else None
        yield Row(f"{name}: s/step", seconds or "", number(found, "s/step"))
        if self.device and plan.step_seconds and "s/step" in found:
            mfu = (plan.mfu(self.device) or 0) * 100
            yield Row(f"{name}: MFU, %", mfu, mfu * plan.step_seconds / found["s/step"])
        context = 0 if self.tiny else CONTEXT_BYTES / MIB
        yield Row(f"{name}: peak of the allocator, MiB", planned - context, number(found, "peak, MiB"))
        yield Row(f"{name}: nvidia-smi, MiB", planned, number(found, "nvidia-smi, MiB"))

    def link(self) -> Iterator[Row]:
        count = 2 if self.tiny else torch.cuda.device_count()
        assumed = self.of_peak("link_gb_per_second", LINK)
        if count < 2:
            yield Row("all_gather, GB/s", assumed, f"{NOT_MEASURED}: one GPU")
            return
        size = MIB if self.tiny else 2**30
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        command = [*torchrun, str(Path(__file__).with_name("gpu_link.py")), str(size)]
        try:
            left = max(1.0, self.end - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=left)
            found = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            found = {"error": str(error)}
        for name in ("all_gather", "reduce_scatter"):
            yield Row(f"{name} of {count} ranks, GB/s", assumed, number(found, name))


@dataclass
class Run:
    """The command line with a tiny model, in a folder."""

    folder: Path
    name: str
    use_cpu: bool
    said: str = ""

    def start(self, steps: int) -> subprocess.Popen[str]:
        paths = {"instance_data_dir": self.folder / "images", "output_dir": self.folder / self.name}
        own = {"model_family": "flux", "use_cpu": self.use_cpu, "mixed_precision": "no", "lr_scheduler": "constant"}
        run = {key: value for key, value in RUN.items() if not key.startswith("validation")}
        flags = run | TINY | own | paths | {"max_train_steps": steps}
        words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in flags.items()]
        command = [sys.executable, "-m", "simpletuner", "train", *words]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def until_end(self, steps: int) -> Run:
        self.said = self.start(steps).communicate()[0]
        return self

    def until_killed(self, after: int) -> Run:
        """Kill it, and all that it has started, after so many steps, at least one of which is not saved.

        There is a checkpoint of every fifth.
        """
        process = self.start(100_000)
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGSTOP)  # so that no step and no checkpoint follow what is read here
            if len(self.losses) >= max(after, self.saved_step + 1):
                break
            os.killpg(process.pid, signal.SIGCONT)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return self

    @property
    def saved_step(self) -> int:
        folders = (self.folder / self.name / "checkpoints").glob("checkpoint-*")
        return max((int(folder.name.rpartition("-")[2]) for folder in folders), default=0)

    @property
    def losses(self) -> list[float]:
        """The losses by step; of a step that was taken twice, the later one."""
        file = self.folder / self.name / "metrics.jsonl"
        rows = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(row) for row in rows if row.endswith("\n")]
        return list({row["step"]: row["loss"] for row in found if "loss" in row}.values())


def last_line(said: str) -> str:
    return next(reversed([line for line in said.splitlines() if line.strip()]), "nothing was said")[:100]


def number(found: Record, key: str) -> float | str:
    """Return what was measured, else why not. A tool that is missing has reported 0 bytes."""
    value = found.get(key)
    missing = value is None or (value == 0 and "MiB" in key)
    return found.get("error", NOT_MEASURED) if missing else value  # pyright: ignore[reportReturnType]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, default=9)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    silence_torchao()
    gc.freeze()  # what was imported: collections of garbage among it are 3 of 13 CPU seconds of the tiny steps' plans
    if not arguments.tiny and not torch.cuda.is_available():
        print("error: torch sees no CUDA device here\nhint: --tiny runs the same code on the CPU", file=sys.stderr)
        return 3
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))  # fork server
    name = "no GPU, tiny models" if arguments.tiny else torch.cuda.get_device_name()
    device = None if arguments.tiny else device_by_driver_name(name)
    check = Check(device, arguments.tiny, time.monotonic() + 60 * arguments.minutes)
    parts, rows = arguments.parts or PARTS, []
    results = Path(os.environ.get("OUT", ".")) / "gpu-check.jsonl"
    with ThreadPoolExecutor(1) as thread, results.open("a", encoding="utf-8", buffering=1) as lines:
        if "steps" in parts:
            check.begin_plans(thread)
        for part in parts:
            for row in getattr(check, part)():
                print(f"{row.what}: {show(row.here)}", file=sys.stderr, flush=True)
                lines.write(json.dumps({"machine": name, **vars(row)}) + "\n")
                rows.append(row)
    title = f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    if arguments.json:
        print(json.dumps({"machine": title, "rows": [vars(row) for row in rows]}))
    else:
        cells = [[row.what, show(row.assumed), show(row.here), row.ratio] for row in rows]
        print_table(title, ["", "assumed", "here", "ratio"], cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
