"""What training steps take on one GPU, beside what `simpletuner plan` and a roofline model predict.

    python benchmarks/gpu.py [--tiny] [--results=FILE] [PART...]

Weights and inputs are random, of the true shapes; nothing is downloaded. Each case runs in a process of its own, so
that its memory is really free, and adds a line to FILE (gpu-results.jsonl in $OUT or here). Cases that FILE holds are
not run again: the same command continues after an interruption, and with a complete FILE it prints the tables on any
machine. A part stops after 8 minutes; what is left of it runs the next time. `--tiny` runs the same code with tiny
models on the CPU, and compiles one of them only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_cases import MIB, Case, Record, all_cases
from gpu_measures import RUNNERS, measure
from interleaved import print_table

from simpletuner.counting.step_memory import Workload
from simpletuner.parallel.devices import DEVICES, device_by_driver_name
from simpletuner.report import Report
from simpletuner.settings.values.shape import SampleShape
from simpletuner.tools.plan.estimate import RunPlan, SampleShapes, estimate_run, opened_family
from simpletuner.tools.plan.planner import flops_per_sample

PART_SECONDS = 480
STEP_PARTS = ("levers", "batches", "sdxl")
PRELOADED = [
    "gpu_quiet",
    "gpu_measures",
    "simpletuner.models.families.flux",
    "simpletuner.models.families.sdxl",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
]


def run_part(cases: Sequence[Case], file: Path) -> None:
    """Run the cases of a part that the file does not hold."""
    end = time.monotonic() + PART_SECONDS
    for number, case in enumerate(missing := [each for each in cases if not found(each, file)]):
        record = run(case, end - time.monotonic())
        if record is not None and case.limit_mib and "OutOfMemory" in record.get("error", ""):
            # how much it is, then; the table says that the limit does not hold
            record = run(replace(case, limit_mib=0), end - time.monotonic())
            record = record and record | {"over the limit": True}
        if record is None:
            left = len(missing) - number
            print(f"{case.part}: {left} cases are left after {PART_SECONDS} s; the same command continues")
            return
        line = json.dumps({"part": case.part, "name": case.name, "flags": case.flags, **record})
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"\n{line}\n")  # begins a line even after one that was cut off
        print(f"{case.part}: {case.name}: {record.get('error') or 'done'}", flush=True)


def run(case: Case, seconds: float) -> Record | None:
    """Return what a case measured; None if it takes longer."""
    # What is preloaded asks CUDA how many devices there are (diffusers.utils.torch_utils, torchao), after which torch
    # refuses CUDA in every fork.
    has_gpu = torch.cuda.device_count() > 0
    context = multiprocessing.get_context("spawn") if has_gpu else multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(case, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(max(0, seconds)) else None
    except EOFError:
        process.join()
        return {"error": f"ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def records_of(file: Path) -> Iterator[Record]:
    """Yield what was measured; lines that were cut off are passed over."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def found(case: Case, file: Path) -> Record | None:
    return next((record for record in records_of(file) if case.is_of(record)), None)


def print_numbers(measured: Sequence[tuple[Case, Record]]) -> None:
    """Print what is no training step, a number per line."""
    rows = []
    for case, record in measured:
        values = {name: value for name, value in record.items() if name not in ("part", "name", "flags")}
        rows += [
            [f"{case.part}: {case.name}", key, case.expected.get(key, ""), show(value)] for key, value in values.items()
        ]
    print_table("machine, kernels and waits", ["case", "what", "expected", "measured"], rows)


def print_parity(measured: Sequence[tuple[Case, Record]]) -> None:
    """Print how far the gradient norms and losses of each case are from those of float32 on the CPU."""
    reference = {case.flags["model_family"]: record for case, record in measured if case.name.endswith("CPU, fp32")}
    rows = []
    for case, record in measured:
        theirs = reference.get(case.flags["model_family"], {})
        off = [show(farthest(record.get(name, []), theirs.get(name, []))) for name in ("norms", "losses")]
        rows.append([case.name, show(record.get("s/step")), *off, show(record.get("images")), record.get("error", "")])
    names = ["", "s/step", "norms off by", "losses off by", "images", ""]
    print_table(f"{measured[0][0].part} of tiny models, beside float32 on the CPU", names, rows)


def farthest(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the largest relative difference between two series."""
    pairs = zip(values, others, strict=False)
    return max((abs(value - other) / abs(other) for value, other in pairs), default=None)


def print_steps(measured: Sequence[tuple[Case, Record]]) -> None:
    """Print what steps took, and what `plan` predicts of the same settings."""
    rows = []
    columns = ["s/step", "peak, MiB", "reserved, MiB", "nvidia-smi, MiB"]
    with ExitStack() as stack:
        plans = Plans(stack)
        for case, record in measured:
            plan, seconds = plans.of(case), record.get("s/step")
            samples = case.settings.effective_batch_size
            mfu = seconds and f"{plan.flops_per_sample * samples / seconds / plans.device.peak_tflops / 1e12:.1%}"
            theirs = [show(plan.step_seconds), f"{plan.mfu(plans.device) or 0:.1%}", show(plan.memory.gpu_bytes / MIB)]
            said = record.get("error", "") or f"more than {case.limit_mib:,} MiB" * record.get("over the limit", False)
            expected = "; ".join(f"{value} {name}" for name, value in case.expected.items())
            first, *others = (show(record.get(each)) for each in columns)
            rows.append([f"{case.part}: {case.name}", first, mfu or "", *others, *theirs, expected, said])
    names = ["case", "s/step", "MFU", *columns[1:], "plan: s", "MFU", "MiB", "expected", ""]
    print_table("training steps, beside `simpletuner plan` and the roofline model", names, rows)


class Plans:
    """Plans of many settings, which share the traces of a model."""

    def __init__(self, stack: ExitStack) -> None:
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self.device = device_by_driver_name(name) or DEVICES["H200"]
        self.stack, self.known = stack, dict[tuple[Any, ...], tuple[Workload, int]]()

    def of(self, case: Case) -> RunPlan:
        settings = case.settings
        key = (settings.model.model_dump_json(), settings.lora.model_dump_json(), case.shape)
        if key not in self.known:
            family = self.stack.enter_context(opened_family(settings, Report(quiet=True)))
            self.known[key] = (
                Workload(family, SampleShape(case.shape)),
                flops_per_sample(family, SampleShape(case.shape)),
            )
        workload, flops = self.known[key]
        return estimate_run(settings, workload, SampleShapes({SampleShape(case.shape): 1}), self.device, flops)


def show(value: Any) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(RUNNERS)}; all without")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu-results.jsonl")
    arguments = parser.parse_args()
    parts = arguments.parts or list(RUNNERS)
    if unknown := set(parts) - set(RUNNERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts are {', '.join(RUNNERS)}")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))  # fork server
    cases = [case for case in all_cases(arguments.tiny) if case.part in parts]
    for part in parts:
        run_part([case for case in cases if case.part == part], arguments.results)
    measured = [(case, record) for case in cases if (record := found(case, arguments.results))]
    tables = [
        (print_numbers, ("syncs", "ceilings", "attention")),
        (print_parity, ("engines",)),
        (print_parity, ("runs",)),
        (print_steps, STEP_PARTS),
    ]
    for print_part, names in tables:
        if chosen := [(case, record) for case, record in measured if case.part in names]:
            print_part(chosen)


if __name__ == "__main__":
    main()
